"""The pickles of calls and results: only their owner reads and writes them, and they are there whole or not at all."""

from __future__ import annotations

import os
import pickle
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle

from hpc_train.errors import UserError
from hpc_train.regular_files import open_to_read

_PATIENCE = 60.0
"""Seconds that a file system may take to show a node what the login node wrote."""


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter. Raises UserError if it cannot be made, or is somebody else's."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; choose a folder that can be written") from None
    return path


def pickled(what: Any) -> bytes:
    """With functions and classes of `__main__` by value."""
    return bytes(cloudpickle.dumps(what, pickle.HIGHEST_PROTOCOL))


def save(what: Any, path: Path) -> None:
    """Replace `path` by the pickle of `what`."""
    write(pickled(what), path)


def write(data: bytes, path: Path) -> None:
    """Replace `path` by a file with `data`, mode 0600."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def load(path: Path) -> Any:
    """What `save` wrote. Raises UserError if anybody else could have written it: a pickle is a program."""
    with open_to_read(path) as file:
        refuse_others(path, os.fstat(file.fileno()))
        return pickle.load(file)


def refuse_others(path: Path, status: os.stat_result) -> None:
    """Raise UserError for a file that another user owns or may write."""
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise UserError(f"{path}: is not yours alone (owner {status.st_uid}, mode {status.st_mode & 0o777:o}); not run")


def wait_for(path: Callable[[], Path]) -> Path:
    """`path` as soon as it exists: sbatch may be faster than the last rename at submission."""
    deadline = time.monotonic() + _PATIENCE
    while not (found := path()).exists():
        if time.monotonic() > deadline:
            raise UserError(f"{found}: is not there; is it on a file system that this node shares?")
        time.sleep(0.1)
    return found
