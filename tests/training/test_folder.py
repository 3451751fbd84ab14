"""The run directory: private, one attempt at a time, continued only by a config that agrees."""

import multiprocessing
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hpc_train.config.compose import compose
from hpc_train.config.plain_config import config_from_dict
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.training.run_directory import RunDirectory, locate_run_directory, make_attempt, prepare_run_directory


def _prepared(path: Path, *overrides: str) -> tuple[RunDirectory, RunConfig]:
    config = compose([f"run_dir={path}", *overrides])
    folder = locate_run_directory(config)
    prepare_run_directory(folder, config)
    return folder, config


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_run_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder, _ = _prepared(tmp_path / "a" / "run")
    finally:
        os.umask(before)
    assert _mode(folder.path) == 0o700
    assert _mode(folder.config) == 0o600
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.yaml", "logs"], "nothing left beside"


def test_a_directory_that_was_open_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    folder, _ = _prepared(tmp_path)
    assert _mode(folder.path) == 0o700


def test_config_yaml_is_the_config(tmp_path: Path) -> None:
    folder, config = _prepared(tmp_path, "optim.lr=0.125", "model=gpt2_tiny")
    plain = OmegaConf.to_container(OmegaConf.load(folder.config))
    assert config_from_dict(plain) == config  # type: ignore[arg-type]


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^run_dir=\S+/file/run: Not a directory; choose .*$"):
        _prepared(tmp_path / "file" / "run")


def test_an_unset_run_dir_is_named_by_date_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = locate_run_directory(compose())
    assert folder.path.relative_to(tmp_path).match("runs/????-??-??/??-??-??-*")
    assert not (tmp_path / "runs").exists()


def test_checkpoints_may_lie_elsewhere(tmp_path: Path) -> None:
    assert locate_run_directory(compose([f"checkpoint.dir={tmp_path}/c"])).checkpoints == tmp_path / "c"


def _started(path: Path, *overrides: str) -> None:
    folder, _ = _prepared(path, *overrides)
    (folder.checkpoints / "step-3").mkdir(parents=True)


@pytest.mark.parametrize(
    "change",
    ["train.steps=77", "parallel=fsdp", "launch.ranks=4", "train.micro_batch=4", "checkpoint.every=7", "cluster=slurm"],
)
def test_how_a_run_is_run_may_change(tmp_path: Path, change: str) -> None:
    _started(tmp_path)
    _prepared(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("optim.lr=0.5", "optim.lr is 0.5 and was 0.003"),
        ("model.layers=9", "model.layers is 9 and was 4"),
        ("train.global_batch=32", "train.global_batch is 32 and was 16"),
        ("train.seed=1", "train.seed is 1 and was 0"),
        ("precision=bf16", "precision.name is bf16 and was fp32"),
        ("train.sequence_length=64", "train.sequence_length is 64 and was 256"),
    ],
)
def test_what_a_run_computes_may_not_change(tmp_path: Path, change: str, key: str) -> None:
    _started(tmp_path)
    with pytest.raises(UserError) as caught:
        _prepared(tmp_path, change)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_without_a_checkpoint_or_not_to_be_resumed_is_replaced(tmp_path: Path) -> None:
    _prepared(tmp_path)
    _prepared(tmp_path, "optim.lr=0.5")
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    _prepared(tmp_path, "optim.lr=0.25", "checkpoint.resume=never")


def test_steps_are_the_committed_ones(tmp_path: Path) -> None:
    folder, _ = _prepared(tmp_path)
    for name in ("step-10", "step-9", "step-11.tmp-ab", "step-x"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert folder.steps() == [9, 10]


def test_no_two_processes_get_the_same_attempt(tmp_path: Path) -> None:
    folder, _ = _prepared(tmp_path)
    context = multiprocessing.get_context("fork")
    taken = context.SimpleQueue()
    processes = [context.Process(target=lambda: taken.put([make_attempt(folder) for _ in range(8)])) for _ in range(8)]
    for process in processes:
        process.start()
    attempts = [attempt for _ in processes for attempt in taken.get()]
    for process in processes:
        process.join()
    assert sorted(attempts) == list(range(64))
    assert all(folder.logs(attempt).is_dir() for attempt in attempts)
