"""Remove old checkpoints and what dead processes left. A rename comes before the deletion: none is ever half there."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

from hpc_train.checkpoint.catalogue import beside, committed, found, readable, step_of

_log = logging.getLogger(__name__)
_LEFTOVER = re.compile(r"step-[0-9]+\.(tmp|trash)-(.+)")
_LEASE_SECONDS = 2 * 3600
"""A temporary directory of another host is dead if nothing in it changed for this long; clocks may be an hour apart."""


def prune(directory: Path, keep: int) -> list[int]:
    """Keep the `keep` newest whole checkpoints, remove all others and what dead processes left. For one process a run.

    Newest by the order of commits, not by step. Those with a missing or damaged manifest or a file of the wrong size
    do not count, and as long as fewer than `keep` whole ones exist nothing committed is removed. Returns the steps
    removed. What cannot be removed is logged and left for the next time.
    """
    assert keep >= 1, keep
    sweep(directory)
    steps = found(directory)
    whole = [step for step in committed(directory) if _has_its_files(steps[step], step)]
    if len(whole) < keep:
        return []
    return [step for step in sorted(set(steps) - set(whole[-keep:])) if discard(steps[step])]


def discard(path: Path) -> bool:
    """Take a committed directory away: one rename, then its files. Returns whether it is no longer committed."""
    trash = beside(path, "trash", new_token())
    try:
        path.rename(trash)
    except OSError as error:
        _log.warning("checkpoint: %s could not be removed: %s", path, error)
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def sweep(directory: Path) -> None:
    """Delete what is certainly dead: trash, temporary directories whose writer is gone, replaced steps."""
    if not directory.is_dir():
        return
    steps = found(directory)
    for path in list(directory.iterdir()):
        leftover = _LEFTOVER.fullmatch(path.name)
        step = step_of(path)
        if leftover and (leftover[1] == "trash" or _is_dead(path, leftover[2])):
            shutil.rmtree(path, ignore_errors=True)
        elif step is not None and steps.get(step, path) != path:
            discard(path)


def new_token() -> str:
    """Unique, and tells whose it is: `<host>.<process id>.<random>`."""
    return f"{_host()}.{os.getpid()}.{secrets.token_hex(4)}"


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())


def _is_dead(path: Path, token: str) -> bool:
    host, _, rest = token.partition(".")
    process = rest.partition(".")[0]
    if host == _host() and process.isdecimal() and not _is_running(int(process)):
        return True
    return time.time() - _last_change(path) > _LEASE_SECONDS


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # somebody else's; or no process id at all: then only time tells
    return True


def _last_change(path: Path) -> float:
    try:
        return max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
    except OSError:
        return time.time()  # it is going away under our eyes: somebody else is at it


def _has_its_files(path: Path, step: int) -> bool:
    """Whether the manifest is sound and every file has its size; a look at the catalogue, not at the data."""
    manifest = readable(path, step)
    if manifest is None:
        return False
    try:
        return all((path / file.name).stat().st_size == file.bytes for file in manifest.files)
    except OSError:
        return False
