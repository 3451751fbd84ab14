"""`bench loss`: both sides run for real, and what it refuses."""

from __future__ import annotations

import json

import pytest

from hpc_train.cli.main import main

SMALL = ["--tokens", "64", "--hidden", "8", "--vocabulary", "1000", "--chunk", "8", "--rounds", "2"]


def test_both_sides_are_timed_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loss", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(found["seconds"][side] > 0 for side in ("full", "chunked"))
    assert found["chunk_bytes"] == 8 * 1000 * 4
    assert found["peak_bytes"]["full"] > 64 * 1000 * 4
    assert found["memory"] == found["peak_bytes"]["chunked"] / found["peak_bytes"]["full"]


def test_memory_is_counted_without_computing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loss", *SMALL]) == 0
    measured = capsys.readouterr().out
    assert main(["bench", "loss", *SMALL, "--count"]) == 0
    counted = capsys.readouterr().out
    assert "speed" in measured
    assert "speed" not in counted
    assert measured.split("memory ")[-1] == counted.split("memory ")[-1]


def test_a_chunk_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loss", "--chunk", "0"]) == 2
    assert "--chunk 0: must be at least 1" in capsys.readouterr().err
