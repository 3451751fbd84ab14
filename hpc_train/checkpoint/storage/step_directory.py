"""Names in a checkpoint directory: find its steps, name its files, mark steps bad or weights-only.

The name of a directory tells its state, so there is no stored list of steps that could be out of date.

step-<n>                 committed
step-<n>.old-<token>     committed; used only if step-<n> is absent, between the two renames of a replacement
step-<n>.tmp-<token>     being written, or left by a dead process
step-<n>.trash-<token>   being deleted
step-<n>/bad             why the step is marked bad: it can be loaded, but checkpoint.resume=auto and retention skip it
weights/step-<n>         without optimizer state (checkpoint.weights_every); ignored by retention and resume=auto
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.errors import CheckpointError, UnreadableError
from hpc_train.checkpoint.format.integer_columns import LARGEST_INTEGER
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, read_manifest, read_sequence
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard
from hpc_train.regular_files import NotRegularError, read_regular, replace_file, sync_directory

SHARDS_FOLDER = "shards"
FILES_PER_FOLDER = 64
"""Shard files in a folder; each has its table of digests beside it."""
WEIGHTS_FOLDER = "weights"
"""Folder, within the checkpoint directory, of steps without optimizer state."""
BAD_MARK_FILE = "bad"
"""File in the directory of a step marked bad; its text is the reason."""
_MAX_REASON_BYTES = 64 << 10
BASE_DIGEST = "base_digest"
"""Key in `extra` of a step with adapters only: the digest of the files that they were trained on."""
_WEIGHTS_ONLY_KEY = "weights_only"
_OPTIMIZER_PREFIX = "optim."
_log = logging.getLogger(__name__)
_MAX_REMEMBERED = 1000
"""Sequence numbers to skip for each unreadable manifest; more saves are never kept in one directory."""
_COMMITTED = re.compile(r"step-(0|[1-9][0-9]*)(\.old-.+)?")


def step_path(directory: Path, step: int) -> Path:
    """Return the path of a committed step."""
    return directory / f"step-{step}"


def uncommitted_path(path: Path, kind: str, token: str) -> Path:
    """Return the path of a step under a name of another kind: tmp, old or trash."""
    return path.with_name(f"{path.name.partition('.')[0]}.{kind}-{token}")


def parse_step(path: Path) -> int | None:
    """Return the step of a directory by its name; None if the name is not that of a committed step."""
    match = _COMMITTED.fullmatch(path.name)
    return int(match[1]) if match else None


def find_steps(directory: Path) -> dict[int, Path]:
    """Return the committed steps and their paths; empty if the directory does not exist.

    Raises OSError if it cannot be listed: a run must not start over because of a failed listing.
    """
    try:
        with os.scandir(directory) as entries:
            committed = [entry for entry in entries if _COMMITTED.fullmatch(entry.name)]
            names = sorted((entry.name for entry in committed if _is_step(entry, directory)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        if directory.is_dir():
            raise  # a stale handle of a network file system, not a missing directory
        return {}
    paths = [directory / name for name in names]  # step-7 comes after step-7.old-..., and so overrides it
    return {step: path for path in paths if (step := parse_step(path)) is not None}


def _is_step(entry: os.DirEntry[str], directory: Path) -> bool:
    """Return whether the entry is a directory and not a link, which could lead to anything, anywhere."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return True
        _warn_once(directory / entry.name, "it is a link" if entry.is_symlink() else "it is not a directory")
    except OSError as error:
        _warn_once(directory / entry.name, str(error.strerror))
    return False


@lru_cache(maxsize=1024)
def _warn_once(path: Path, why: str) -> None:
    _log.warning("checkpoint: %s is passed over: %s", path, why)


def locate_step(directory: Path, step: int) -> Path:
    """Return the path of a committed step. Raises UserError, with the existing steps, if it does not exist."""
    steps = find_steps(directory)
    if step in steps:
        return steps[step]
    choices = f"it has {', '.join(map(str, sorted(steps)))}; choose one of them" if steps else "it has none"
    raise UserError(f"checkpoint step {step} is not in {directory}: {choices}, or use checkpoint.resume=auto")


def list_committed_steps(directory: Path) -> list[int]:
    """Return the committed steps in the order of their commits, the newest last, without verifying them.

    After a rollback the newest is not the highest step. A step whose manifest cannot be read counts as newest, so that
    a search for the newest sound step meets it, and reports it.
    """
    steps = find_steps(directory)
    return sorted(steps, key=lambda step: _make_age_key(steps[step], step))


def choose_sequence_number(directory: Path) -> int:
    """Return a sequence number for the next commit, above all others, even of manifests that are unreadable now."""
    numbers, hidden = [0], 0
    for step, path in find_steps(directory).items():
        try:
            numbers.append(_read_sequence(path, step, _read_identity(path / MANIFEST_FILE)))
        except UnreadableError:
            hidden += 1
        except CheckpointError:
            continue
    # Bounded by what a manifest may hold; with equal numbers, the higher step counts as newer.
    return min(max(numbers) + 1 + hidden * _MAX_REMEMBERED, LARGEST_INTEGER)


def _read_identity(path: Path) -> tuple[int, ...]:
    """Return a key that changes if the file is replaced or written to; empty if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=64)
def _read_sequence(path: Path, step: int, identity: tuple[int, ...]) -> int:
    """Read the sequence number of a step; cached, because reading a large manifest takes longer than a small save."""
    return read_sequence(path, step)


def try_read_manifest(path: Path, step: int) -> Manifest | None:
    """Read the manifest of a step; None if it is damaged."""
    try:
        return read_manifest(path, step)
    except CheckpointError:
        return None


def _make_age_key(path: Path, step: int) -> tuple[float, int]:
    manifest = try_read_manifest(path, step)
    return (float("inf") if manifest is None else manifest.sequence, step)


def shard_file_name(number: int, ranks: range | None = None) -> str:
    """Return the path, within the directory of a step, of shard file `number`, from 0.

    Files are spread over folders of FILES_PER_FOLDER. ranks: the ranks that write it; None: the rank of that number.
    """
    ranks = range(number, number + 1) if ranks is None else ranks
    last = f"-{ranks[-1]:06d}" if len(ranks) > 1 else ""
    return f"{SHARDS_FOLDER}/{number // FILES_PER_FOLDER:03d}/{ranks[0]:06d}{last}.h5"


def list_shard_folders(files: int) -> list[str]:
    """Return the folders for this number of files."""
    return [str(Path(shard_file_name(first)).parent) for first in range(0, files, FILES_PER_FOLDER)]


def is_weight(name: str) -> bool:
    """Return whether a tensor of this name is a parameter or buffer, not optimizer state (see TensorShard)."""
    return not name.startswith(_OPTIMIZER_PREFIX)


def select_weights(shards: Iterable[TensorShard]) -> list[TensorShard]:
    """Return the shards of parameters and buffers."""
    return [shard for shard in shards if is_weight(shard.name)]


def mark_base(extra: dict[str, Any], digest: str | None) -> dict[str, Any]:
    """Return `extra` with the digest of the base of a step with adapters only; None: the step has all weights."""
    return extra if digest is None else {**extra, BASE_DIGEST: digest}


def mark_weights_only(extra: dict[str, Any]) -> dict[str, Any]:
    """Return `extra` with the mark of a step without optimizer state.

    Only this mark tells it from a step whose optimizer has no state.
    """
    return {**extra, _WEIGHTS_ONLY_KEY: True}


def holds_weights_only(extra: dict[str, Any]) -> bool:
    """Return whether a step was saved without optimizer state, from its `extra`."""
    return bool(extra.get(_WEIGHTS_ONLY_KEY, False))


def mark_bad(directory: Path, step: int, why: str) -> None:
    """Mark a committed step as bad, so that checkpoint.resume=auto skips it. Replaces an existing mark.

    Raises UserError if there is no such step, CheckpointError if the mark cannot be written.
    """
    path = locate_step(directory, step)
    try:
        replace_file(path / BAD_MARK_FILE, " ".join(why.split()) + "\n", sync=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint step {step} in {directory} was not marked: {error.strerror}") from error


def unmark_bad(directory: Path, step: int) -> None:
    """Remove the mark of a step, if it has one. Raises as `mark_bad`."""
    path = locate_step(directory, step)
    try:
        (path / BAD_MARK_FILE).unlink(missing_ok=True)
        sync_directory(path)
    except OSError as error:
        raise CheckpointError(f"the mark of step {step} in {directory} was not removed: {error.strerror}") from error


def explain_bad_step(path: Path, manifest: Manifest | None) -> str | None:
    """Return why a run should not resume from a step; None if it may.

    path: directory of the step. Raises OSError if it cannot be determined whether it is marked.
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
        return str(error.strerror)  # not a regular file, but still put there as a mark
