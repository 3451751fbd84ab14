"""Which checkpoints a directory holds. The names are the truth: there is no list to go stale.

step-<n>                 committed
step-<n>.old-<token>     committed; counts only while step-<n> is absent, between the two renames of a replacement
step-<n>.tmp-<token>     being written, or left by a process that died
step-<n>.trash-<token>   being deleted
"""

from __future__ import annotations

import logging
import os
import re
from functools import lru_cache
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError, UnreadableError
from hpc_train.checkpoint.manifest import MANIFEST, Manifest, read, sequence
from hpc_train.checkpoint.pattern import LARGEST
from hpc_train.errors import UserError

_log = logging.getLogger(__name__)
_ROOM = 1000
"""How much later than a readable checkpoint one may be that cannot be read: as many saves are never kept."""
_COMMITTED = re.compile(r"step-(0|[1-9][0-9]*)(\.old-.+)?")


def step_path(directory: Path, step: int) -> Path:
    """Where a step is once it is committed."""
    return directory / f"step-{step}"


def beside(path: Path, kind: str, token: str) -> Path:
    """The same step under another kind of name: tmp, old or trash."""
    return path.with_name(f"{path.name.partition('.')[0]}.{kind}-{token}")


def step_of(path: Path) -> int | None:
    """The step that a directory of this name holds; None if the name is not that of a committed one."""
    match = _COMMITTED.fullmatch(path.name)
    return int(match[1]) if match else None


def found(directory: Path) -> dict[int, Path]:
    """Committed steps and where they are; empty if there is no such directory.

    Raises OSError if it cannot be listed: that there is nothing to go on from must not be a guess.
    """
    try:
        with os.scandir(directory) as entries:
            ours = [entry for entry in entries if _COMMITTED.fullmatch(entry.name)]
            names = sorted((entry.name for entry in ours if _is_step(entry, directory)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir():
            raise  # a server that forgot a handle; asked again, it knows
        return {}
    paths = [directory / name for name in names]  # step-7 comes after step-7.old-..., and so overrides it
    return {step: path for path in paths if (step := step_of(path)) is not None}


def _is_step(entry: os.DirEntry[str], directory: Path) -> bool:
    """Return whether the entry is a directory and not a link, which could lead to anything, anywhere."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return True
        _tell_once(directory / entry.name, "it is a link" if entry.is_symlink() else "it is no directory")
    except OSError as error:
        _tell_once(directory / entry.name, str(error.strerror))
    return False


@lru_cache(maxsize=1024)
def _tell_once(path: Path, why: str) -> None:
    _log.warning("checkpoint: %s is passed over: %s", path, why)


def locate(directory: Path, step: int) -> Path:
    """Where a committed step is. Raises UserError, with the steps there are, if it is not."""
    steps = found(directory)
    if step in steps:
        return steps[step]
    there = f"it has {', '.join(map(str, sorted(steps)))}; choose one of them" if steps else "it has none"
    raise UserError(f"checkpoint step {step} is not in {directory}: {there}, or use checkpoint.resume=auto")


def committed(directory: Path) -> list[int]:
    """Committed steps in the order of their commits, the newest last; whether they are sound is for `verify` to say.

    After a rollback the newest is not the highest step. One whose manifest cannot be read counts as newest, so that
    whoever looks for the newest sound one passes it, and says so.
    """
    steps = found(directory)
    return sorted(steps, key=lambda step: _age_key(steps[step], step))


def next_sequence(directory: Path) -> int:
    """Sequence number of the next commit: above all others, also those that the file system does not give just now."""
    numbers, hidden = [0], 0
    for step, path in found(directory).items():
        try:
            numbers.append(_sequence(path, step, _identity(path / MANIFEST)))
        except UnreadableError:
            hidden += 1
        except CheckpointError:
            continue
    return min(max(numbers) + 1 + hidden * _ROOM, LARGEST)  # with equal numbers, the higher step is newer


def _identity(path: Path) -> tuple[int, ...]:
    """Another one when the file is another, or has been written to; of a file that is not there nothing."""
    try:
        it = path.lstat()
    except OSError:
        return ()
    return it.st_dev, it.st_ino, it.st_size, it.st_mtime_ns, it.st_ctime_ns


@lru_cache(maxsize=64)
def _sequence(path: Path, step: int, identity: tuple[int, ...]) -> int:
    """Of one step; read once, as a manifest of many tensors takes longer than a small save."""
    return sequence(path, step)


def readable(path: Path, step: int) -> Manifest | None:
    """The manifest of a step, None if it is damaged."""
    try:
        return read(path, step)
    except CheckpointError:
        return None


def _age_key(path: Path, step: int) -> tuple[float, int]:
    manifest = readable(path, step)
    return (float("inf") if manifest is None else manifest.sequence, step)
