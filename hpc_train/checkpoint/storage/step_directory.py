"""Which steps a directory holds, which of them hold weights only, and which are marked bad.

The names are the truth: there is no list to go stale.

step-<n>                 committed
step-<n>.old-<token>     committed; counts only while step-<n> is absent, between the two renames of a replacement
step-<n>.tmp-<token>     being written, or left by a process that died
step-<n>.trash-<token>   being deleted
step-<n>/bad             why somebody marked it bad: it loads, but checkpoint.resume=auto and retention pass it over
weights/step-<n>         without optimizer state (checkpoint.weights_every); neither retention nor resume=auto sees them
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_train.checkpoint.errors import CheckpointError, UnreadableError
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, read_manifest, read_sequence
from hpc_train.checkpoint.format.manifest_encoding import LARGEST_INTEGER
from hpc_train.checkpoint.storage.file_system import sync_directory, write_durable_file
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard
from hpc_train.regular_files import NotRegularError, read_regular

if TYPE_CHECKING:
    pass

_log = logging.getLogger(__name__)
_MOST_REMEMBERED = 1000
"""How much later than a readable checkpoint one may be that cannot be read: as many saves are never kept."""
_COMMITTED = re.compile(r"step-(0|[1-9][0-9]*)(\.old-.+)?")


def step_path(directory: Path, step: int) -> Path:
    """Where a step is once it is committed."""
    return directory / f"step-{step}"


def uncommitted_path(path: Path, kind: str, token: str) -> Path:
    """The same step under another kind of name: tmp, old or trash."""
    return path.with_name(f"{path.name.partition('.')[0]}.{kind}-{token}")


def parse_step(path: Path) -> int | None:
    """The step that a directory of this name holds; None if the name is not that of a committed one."""
    match = _COMMITTED.fullmatch(path.name)
    return int(match[1]) if match else None


def find_steps(directory: Path) -> dict[int, Path]:
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
    return {step: path for path in paths if (step := parse_step(path)) is not None}


def _is_step(entry: os.DirEntry[str], directory: Path) -> bool:
    """Return whether the entry is a directory and not a link, which could lead to anything, anywhere."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return True
        _warn_once(directory / entry.name, "it is a link" if entry.is_symlink() else "it is no directory")
    except OSError as error:
        _warn_once(directory / entry.name, str(error.strerror))
    return False


@lru_cache(maxsize=1024)
def _warn_once(path: Path, why: str) -> None:
    _log.warning("checkpoint: %s is passed over: %s", path, why)


def locate_step(directory: Path, step: int) -> Path:
    """Where a committed step is. Raises UserError, with the steps there are, if it is not."""
    steps = find_steps(directory)
    if step in steps:
        return steps[step]
    there = f"it has {', '.join(map(str, sorted(steps)))}; choose one of them" if steps else "it has none"
    raise UserError(f"checkpoint step {step} is not in {directory}: {there}, or use checkpoint.resume=auto")


def list_committed_steps(directory: Path) -> list[int]:
    """Committed steps in the order of their commits, the newest last; whether they are sound is for `verify` to say.

    After a rollback the newest is not the highest step. One whose manifest cannot be read counts as newest, so that
    whoever looks for the newest sound one passes it, and says so.
    """
    steps = find_steps(directory)
    return sorted(steps, key=lambda step: _age_key(steps[step], step))


def next_sequence_number(directory: Path) -> int:
    """Sequence number of the next commit: above all others, also those that the file system does not give just now."""
    numbers, hidden = [0], 0
    for step, path in find_steps(directory).items():
        try:
            numbers.append(_sequence(path, step, _identity(path / MANIFEST_FILE)))
        except UnreadableError:
            hidden += 1
        except CheckpointError:
            continue
    return min(
        max(numbers) + 1 + hidden * _MOST_REMEMBERED, LARGEST_INTEGER
    )  # with equal numbers, the higher step is newer


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
    return read_sequence(path, step)


def try_read_manifest(path: Path, step: int) -> Manifest | None:
    """The manifest of a step, None if it is damaged."""
    try:
        return read_manifest(path, step)
    except CheckpointError:
        return None


def _age_key(path: Path, step: int) -> tuple[float, int]:
    manifest = try_read_manifest(path, step)
    return (float("inf") if manifest is None else manifest.sequence, step)


def shard_file_name(number: int, ranks: range | None = None) -> str:
    """Path within a step's directory of the file of that number, from 0: however many there are, no folder has many.

    ranks: those that write it; None: the one of that number.
    """
    ranks = range(number, number + 1) if ranks is None else ranks
    last = f"-{ranks[-1]:06d}" if len(ranks) > 1 else ""
    return f"{SHARDS_FOLDER}/{number // FILES_PER_FOLDER:03d}/{ranks[0]:06d}{last}.h5"


SHARDS_FOLDER = "shards"


FILES_PER_FOLDER = 64
"""Shard files in a folder; each has its table of digests beside it."""


def list_shard_folders(files: int) -> list[str]:
    """The folders that so many files need."""
    return [str(Path(shard_file_name(first)).parent) for first in range(0, files, FILES_PER_FOLDER)]


WEIGHTS_FOLDER = "weights"
"""Directory, within that of the checkpoints."""
_OPTIMIZER_PREFIX = "optim."
_WEIGHTS_ONLY_KEY = "weights_only"


def is_weight(name: str) -> bool:
    """Whether a tensor is a parameter or a buffer, not state of the optimizer (api.Piece)."""
    return not name.startswith(_OPTIMIZER_PREFIX)


def select_weights(shards: Iterable[TensorShard]) -> list[TensorShard]:
    """The shards that a step without optimizer state has."""
    return [shard for shard in shards if is_weight(shard.name)]


def mark_weights_only(extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` of a step without optimizer state; only this tells it from one whose optimizer has none."""
    return {**extra, _WEIGHTS_ONLY_KEY: True}


def holds_weights_only(extra: dict[str, Any]) -> bool:
    """Whether a step was saved without optimizer state."""
    return bool(extra.get(_WEIGHTS_ONLY_KEY, False))


def is_weights_only(directory: Path, step: int) -> bool:
    """The same of a committed step; False where its manifest is damaged, which loading will say."""
    manifest = try_read_manifest(locate_step(directory, step), step)
    return manifest is not None and holds_weights_only(manifest.extra)


BAD_MARK_FILE = "bad"
"""File in the directory of a step that is marked; its text is the reason."""
_MAX_REASON_BYTES = 64 << 10
"""Maximum bytes of a reason."""


def mark_bad(directory: Path, step: int, why: str) -> None:
    """Mark a committed step: checkpoint.resume=auto no longer takes it. A mark that is there is replaced.

    Raises UserError if the step is not there, CheckpointError if the mark cannot be written.
    """
    path = locate_step(directory, step)
    beside = path / f".{BAD_MARK_FILE}-{os.getpid()}"
    try:
        beside.unlink(missing_ok=True)
        write_durable_file(beside, (" ".join(why.split()) + "\n").encode())
        beside.replace(path / BAD_MARK_FILE)
        sync_directory(path)
    except OSError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} was not marked: {error.strerror}") from error


def unmark_bad(directory: Path, step: int) -> None:
    """Take the mark away, if there is one. Raises as `mark_bad`."""
    path = locate_step(directory, step)
    try:
        (path / BAD_MARK_FILE).unlink(missing_ok=True)
        sync_directory(path)
    except OSError as error:
        raise CheckpointError(f"the mark of step {step} in {directory} was not removed: {error.strerror}") from error


def explain_bad_step(path: Path, manifest: Manifest | None) -> str | None:
    """Why a step is not to be gone on from; None if nothing speaks against it.

    path: of the directory of the step. Raises OSError if it cannot be seen whether there is a mark.
    """
    try:
        return f"is marked bad: {read_bad_mark(path)}"
    except FileNotFoundError:
        return None if manifest is None or manifest.finite else "has NaN or infinity in it, or in the loss"


def read_bad_mark(path: Path) -> str:
    """Return why a step is marked bad. Raises FileNotFoundError if it is not, OSError if that cannot be determined."""
    try:
        return read_regular(path / BAD_MARK_FILE, _MAX_REASON_BYTES).decode("utf-8", "replace").strip()
    except NotRegularError as error:
        return str(error.strerror)  # whatever it is, somebody has put it there
