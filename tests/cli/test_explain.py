"""`hpc-train explain`: one key, a part, JSON, and a suggestion for a typo."""

from __future__ import annotations

import json

import pytest

from hpc_train.cli.main import main


def test_a_key_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "parallel.tp"]) == 0
    text = capsys.readouterr().out
    for wanted in ("parallel.tp", "tensor parallelism", "type:     int", "default:  1", "range:    >= -1", "file:"):
        assert wanted in text
    assert main(["--help", "parallel.tp"]) == 0
    assert capsys.readouterr().out == text


def test_a_part_lists_its_options_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "precision"]) == 0
    first, _, *keys = capsys.readouterr().out.splitlines()
    assert first.startswith("precision= one of bf16, ")
    assert "(default: fp32)" in first
    assert any(line.startswith("precision.name ") for line in keys)


def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "train.steps", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert set(found) == {"key", "type", "default", "range", "meaning", "file", "variant", "related"}


def test_a_typo_is_one_line_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "xyz.qqq"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("hpc-train: xyz.qqq: no such key; `hpc-train explain PART` lists those of cluster, model, ")
    assert len(line) < 250
    assert main(["explain", "layer"]) == 2
    assert capsys.readouterr().err == "hpc-train: layer: no such key; did you mean 'model.layers'?\n"
    assert main(["explain", "train.stesp"]) == 2
    assert capsys.readouterr().err == "hpc-train: train.stesp: no such key; did you mean 'train.steps'?\n"


def test_help_of_a_command_is_not_taken_for_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    for usage in ("plan", "plan validate", "data build"):
        with pytest.raises(SystemExit) as stopped:
            main(["--help", *usage.split()])
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: hpc-train {usage} ")


def test_keys_of_one_kind_of_model_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "model"]) == 0
    assert "model.patch_size (vit)" in capsys.readouterr().out
