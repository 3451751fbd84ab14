"""`bench loader` measures all its sides on the same text, and needs the package `datasets` for it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from chat_models import save_tokenizer


def test_each_side_has_a_speed_or_the_missing_package_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tokenizer(tmp_path / "model", eos_token="</s>")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"word {n} " * 20}) + "\n" for n in range(50)))
    words = ["bench", "loader", str(tmp_path / "a.jsonl"), "--tokenizer", str(folder), "--rounds", "1", "--json"]
    sizes = ["--batches", "3", "--batch", "2", "--sequence-length", "16"]
    capsys.readouterr()
    code = main([*words, *sizes])
    captured = capsys.readouterr()
    if importlib.util.find_spec("datasets") is None:
        assert (code, captured.err.count("\n")) == (EXIT_USER_ERROR, 1)
        assert "pip install datasets" in captured.err
        return
    assert code == EXIT_DONE
    facts = json.loads(captured.out)
    assert facts["tokens"] == 3 * 2 * 16
    assert set(facts["tokens_per_second"]) == {"hpc_train", "datasets blocks", "tokenized while read"}
    assert facts["ours_by_this"]["hpc_train"] == 1.0
