"""A submission leaves all of its directory or nothing, and is the only one there that waits or runs."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.clients import Ask
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import gather
from hpc_train.launch.state.points import Point, is_run
from hpc_train.launch.state.states import State
from hpc_train.regular_files import read_text
from hpc_train.training.folder import check_owner, write_private

LOCK = ".lock"
_FROZEN = frozenset({"job.json", "config.yaml", "plan.json", "schedule.csv"})


@contextmanager
def submission(path: Path) -> Iterator[None]:
    """Make this run or sweep directory, or go on with one that there is; nobody else submits from it meanwhile.

    What is raised inside takes back all that is new: it, those above it that were made for it, or what was added to it
    and changed in what it was frozen with. Raises UserError for whatever the system refuses, such as a full disk.
    """
    check_owner(path)
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        with alone(path), _taken_back(path):
            yield
    except BaseException as error:
        with suppress(OSError):
            for folder in new:
                folder.rmdir()  # those that are empty
        if isinstance(error, OSError):
            raise UserError(f"run_dir={path}: {error.strerror}; choose a directory that can be written") from error
        raise


@contextmanager
def _taken_back(path: Path) -> Iterator[None]:
    names = {entry.name for entry in path.iterdir()}
    frozen = {name: read_text(path / name) for name in _FROZEN & names}
    try:
        yield
    except BaseException:
        for entry in path.iterdir():
            if entry.name not in names:
                _remove(entry)
        for name, text in frozen.items():
            if read_text(path / name) != text:
                write_private(path / name, text)
        raise


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Raises UserError while another command submits from this directory.

    On file systems without locks nobody is refused.
    """
    lock = path / LOCK
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; nothing can be submitted from there") from None
    try:
        if not _locked(descriptor, lock):
            raise UserError(f"{path}: another command submits from it right now; see `hpc-train status {path}`")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _locked(descriptor: int, lock: Path) -> bool:
    """Whether the lock is ours, and still the file that others find."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_ino == lock.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return True


def refuse_open(run: Path, ask: Ask) -> None:
    """Raise UserError if a job of this run directory still waits or runs: it would read what is frozen there anew."""
    if not is_run(run):
        return
    facts = gather([Point(run.name, run)], ask)[0]
    status = decide(facts)
    if status.state.ended or not (status.state.waiting or status.state is State.RUNNING or facts.silent):
        return
    job = f"job {status.job_id} is" if status.job_id else "a run is"
    why = f" ({status.reason})" if status.reason else ""
    raise UserError(
        f"run_dir={run}: {job} {status.state} there{why}; `hpc-train cancel {run}` ends it, or use a new run_dir"
    )
