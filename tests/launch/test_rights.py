"""A run's files are private to their owner whatever the umask, and nobody runs in another user's directory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from other_user import SOMEBODY, as_somebody, need_root

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.launch.submit import transact_submission
from hpc_train.training.run_directory import check_owner, locate_run_directory, prepare_run_directory

QUICK = ("model=llama_tiny", "launch.ranks=2", "train.steps=1", "train.sequence_length=16", "train.tensorboard=true")


def open_to_others(top: Path) -> dict[str, str]:
    """List everything below, including the top, that another user could read, write or enter by its own mode."""
    modes = {path: path.lstat().st_mode for path in (top, *top.rglob("*")) if not path.is_symlink()}
    return {str(path): f"{stat.S_IMODE(mode):o}" for path, mode in modes.items() if mode & 0o077}


def train(folder: Path, umask: int, *words: str) -> None:
    command = [sys.executable, "-m", "hpc_train", "train", *QUICK, *words]
    done = subprocess.run(command, cwd=folder, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_under_an_open_umask_is_private_also_in_directories_that_were_open(tmp_path: Path) -> None:
    (tmp_path / "run/logs").mkdir(parents=True)
    (tmp_path / "run/logs").chmod(0o700)
    (tmp_path / "run/.submitit").mkdir()
    for path in (tmp_path / "run", tmp_path / "run/.submitit"):
        path.chmod(0o775)
    train(tmp_path, 0o000, "run_dir=run")
    assert {"job.json", "config.yaml", "metrics.jsonl", "events.jsonl", "logs", ".submitit", "checkpoints"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }
    assert open_to_others(tmp_path / "run") == {}


@pytest.mark.long
def test_a_sweep_under_an_open_umask_is_private(tmp_path: Path) -> None:
    train(tmp_path, 0o000, "-m", "run_dir=sweep", "train.seed=1,2", "checkpoint.every=0", "launch.ranks=1")
    assert len(list((tmp_path / "sweep/points").iterdir())) == 2
    assert open_to_others(tmp_path / "sweep") == {}


def another_users(path: Path, link: bool) -> Path:
    need_root()
    path.mkdir()
    if link:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    return path


@pytest.mark.parametrize("link", [False, True], ids=["directory", "link"])
@pytest.mark.parametrize("command", ["train", "submit", "prepare"])
def test_root_leaves_the_directory_of_another_user_alone(tmp_path: Path, link: bool, command: str) -> None:
    path = another_users(tmp_path / "run", link)
    before = path.stat().st_mode
    config = compose([*QUICK, f"run_dir={path}"])

    def begin() -> None:
        if command == "train":
            from hpc_train.cli.output import TERMINAL
            from hpc_train.launch.train import train_here
            from hpc_train.runtime.stop_request import StopRequest

            train_here([*QUICK, f"run_dir={path}"], None, StopRequest(), TERMINAL)
        elif command == "submit":
            with transact_submission(path):
                raise AssertionError("began")
        else:
            prepare_run_directory(locate_run_directory(config), config)

    with pytest.raises(UserError) as refused:
        begin()
    assert str(refused.value).startswith(f"run_dir={path}: belongs to user {SOMEBODY}, and this is root")
    assert "\n" not in str(refused.value)
    assert (path.stat().st_mode, list(path.iterdir())) == (before, [])


def test_a_link_of_roots_to_a_users_own_directory_is_followed() -> None:
    need_root()
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        own, link = Path(name) / "own", Path(name) / "link"
        own.mkdir()
        os.chown(own, SOMEBODY, SOMEBODY)
        link.symlink_to(own)
        code = "check_owner(Path(arguments[0])); print(json.dumps('followed'))"
        imports = "from pathlib import Path\nfrom hpc_train.training.run_directory import check_owner"
        assert as_somebody(code, str(link), imports=imports) == "followed"


def test_one_that_is_not_there_yet_is_anybodys(tmp_path: Path) -> None:
    check_owner(tmp_path / "not/there")
    check_owner(tmp_path)
