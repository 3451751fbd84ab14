"""A run of a model of transformers whose folder moves: each command says so, and goes on where it is told the place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers
import yaml

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.job_spec import make_spec
from hpc_train.training.run_directory import check_same_config, locate_run_directory, prepare_run_directory


def draw_base(folder: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    draw_base(tmp_path / "base")
    return tmp_path / "base"


def test_commands_find_a_model_that_has_moved(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["model=hf", "data=stdlib", "adapter=lora", "train.sequence_length=32", "launch.ranks=1", "run_dir=run"]
    words += ["train.global_batch=2", "train.micro_batch=2", "train.eval_batches=1"]
    assert main(["train", "model.path=base", "train.steps=2", *words]) == 0
    frozen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert frozen["model"]["path"] == str(base)
    shutil.move("run", "moved_run")  # a run itself may move
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run, new = tmp_path / "moved_run", tmp_path / "new"
    evaluate = ["eval", str(run), "--batches", "1"]
    assert main(evaluate) == 0
    before = capsys.readouterr().out.splitlines()[-3:]
    shutil.move(base, new)
    generate = ["generate", str(run), "--prompt", "a", "--tokens", "2"]
    for command in (evaluate, generate, ["checkpoint", "export", str(run), "out", "--merged"]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert f"model.path={base}, which is not there; say where this folder is now with --base FOLDER" in told
        assert main([*command, "--base", "../new"]) == 0
        if command is evaluate:
            assert capsys.readouterr().out.splitlines()[-3:] == before
    assert main([*generate[:1], str(new), *generate[2:], "--base", "x"]) == 2
    monkeypatch.chdir(tmp_path)
    again = ["train", "train.steps=3", *words[:-1], f"run_dir={run}"]
    assert main([*again, "model.path=base"]) == 2
    assert "of a run whose folder has moved, where it is now" in capsys.readouterr().err
    export = ["checkpoint", "export", str(run), "--adapter", "--base", "new"]
    assert main([*export, "fits"]) == 0
    assert capsys.readouterr().err == ""
    shutil.rmtree(new)
    draw_base(new)
    assert main([*export, "misfits"]) == 0
    assert f"adapters were trained on other weights than those now in model.path={new} (" in capsys.readouterr().err
    assert main([*again, "model.path=new"]) == 0
    printed = capsys.readouterr()
    assert "step 3/3" in printed.out
    assert (
        "warning: its adapters were trained on other weights than those now in model.path" in printed.out + printed.err
    )


def test_a_model_beside_one_that_is_still_there_is_another_run(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "other")
    words = ["model=hf", f"run_dir={tmp_path / 'run'}"]
    config = compose([*words, f"model.path={base}"])
    folder = locate_run_directory(config)
    prepare_run_directory(folder, make_spec(config, folder, 1, {}).run_config())
    other = compose([*words, f"model.path={tmp_path / 'other'}"])
    with pytest.raises(UserError, match=r"model\.path is .*other and was .*base"):
        check_same_config(folder, other)
