"""`bench data` measures all its sides on the same text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpc_train.cli.main import main
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from chat_models import save_tokenizer


def test_each_side_has_a_time_and_a_share_of_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tokenizer(tmp_path / "model", eos_token="</s>")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"word {n} " * 20}) + "\n" for n in range(50)))
    words = ["bench", "data", str(tmp_path / "a.jsonl"), "--tokenizer", str(folder), "--workers", "1"]
    capsys.readouterr()
    assert main([*words, "--rounds", "1", "--json"]) == EXIT_DONE
    facts = json.loads(capsys.readouterr().out)
    assert facts["documents"] == 50
    assert {"library", "data build"} <= facts["seconds"].keys()
    assert facts["of_library"]["library"] == 1.0
    assert all(value > 0 for value in facts["seconds"].values())
    assert main([*words, "--rounds", "0"]) == EXIT_USER_ERROR
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "model"]
