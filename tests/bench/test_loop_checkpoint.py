"""`bench loop-checkpoint` runs both sides on two ranks, and says what is wrong with its numbers in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_USER_ERROR


@pytest.mark.usefixtures("forked_ranks")
def test_both_sides_are_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "loop-checkpoint", "--mib", "1", "--rounds", "2", "--dir", str(tmp_path), "--json"]
    assert main(words) == 0
    table = json.loads(capfd.readouterr().out)
    assert (table["ranks"], table["mib"]) == (2, 1)
    for operation in ("save", "stall", "load"):
        assert set(table["seconds"][operation]) == {"Checkpointer", "DCP"}
        ratio = table["dcp_over_ours"][operation]
        assert 0 < ratio["least"] <= ratio["median"] <= ratio["most"]
    assert list(tmp_path.iterdir()) == []


def test_wrong_numbers_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in ((("--rounds", "0"), "--rounds 0"), (("--dir", str(tmp_path / "no")), "no such directory")):
        assert main(["bench", "loop-checkpoint", *words]) == EXIT_USER_ERROR
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert why in error
