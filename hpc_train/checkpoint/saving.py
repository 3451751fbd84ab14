"""Save a step: every rank writes its shard beside, rank 0 commits all of them by one rename."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.api import Piece, World
from hpc_train.checkpoint.agreement import on_all, on_first
from hpc_train.checkpoint.catalogue import beside, next_sequence, step_path
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.files import sync_directory, write_file
from hpc_train.checkpoint.manifest import FORMAT_VERSION, MANIFEST, Entry, Manifest, ShardFile, incomplete
from hpc_train.checkpoint.retention import discard, new_token, sweep
from hpc_train.checkpoint.shard import write_shard

_Shard = tuple[ShardFile, tuple[Entry, ...]]


@dataclass(frozen=True)
class Saved:
    """A save that has ended (an api.Handle)."""

    step: int
    path: Path
    bytes: int
    """Of all shard files; 0 if nothing was committed."""
    seconds: float
    error: CheckpointError | None = None

    def wait(self) -> None:
        """Return if the checkpoint is committed; raise CheckpointError, the same on every rank, if it is not."""
        if self.error is not None:
            raise self.error


def save(directory: Path, step: int, pieces: Iterable[Piece], extra: dict[str, Any], world: World) -> Saved:
    """Write a checkpoint of `step` under `directory`, whole or not at all. Every rank of `world` calls it.

    pieces: of this rank; only those with replica 0 are written. Over all ranks they must cover each logical tensor
    exactly once. They may change as soon as this returns.
    extra: what JSON can hold, the same on every rank (rank 0's is kept). It comes back from `load`.

    The protocol: rank 0 makes `step-<n>.tmp-<token>`; every rank writes, synchronises and checksums its own file;
    rank 0 gathers sizes and checksums, writes and synchronises the manifest and the directory, renames it to `step-<n>`
    and synchronises the parent; all ranks learn the outcome. If any rank fails, nothing is committed, the temporary
    directory is removed, earlier checkpoints are untouched, and `wait` raises the same CheckpointError on every rank.
    If a process dies, what is left is ignored by readers and removed by a later save or prune.

    A step that is already committed is replaced, and is readable, in its old or in its new form, at every moment: after
    a rollback the state of the same step may differ, so keeping the old one would be wrong.

    Returns when the outcome is known (a later writer may return sooner: call `wait` before relying on it).
    """
    assert step >= 0, step
    started = time.monotonic()
    path = step_path(directory, step)
    temporary = None
    try:
        temporary = beside(path, "tmp", on_first(world, lambda: _prepare(path)))
        written = on_all(
            world,
            lambda: _write(temporary, world.rank, pieces),
            lambda shards: _commit(temporary, path, _manifest(step, directory, shards, extra)),
        )
    except CheckpointError as error:
        if temporary is not None and world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        failed = CheckpointError(f"checkpoint step {step} was not saved in {directory}: {error}")
        return Saved(step, path, 0, time.monotonic() - started, failed)
    return Saved(step, path, written, time.monotonic() - started)


def _prepare(path: Path) -> str:
    """Make the temporary directory; returns its token."""
    directory, token = path.parent, new_token()
    if not directory.is_dir():
        directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        sync_directory(directory.parent)
    sweep(directory)
    beside(path, "tmp", token).mkdir(mode=0o700)
    return token


def _write(temporary: Path, rank: int, pieces: Iterable[Piece]) -> _Shard | None:
    """This rank's file; None if it has nothing to write. An empty rectangle is left out unless its tensor is empty."""
    mine = [piece for piece in pieces if piece.replica == 0 and (piece.local.numel() or 0 in piece.shape)]
    return write_shard(temporary / f"shard-{rank}.h5", mine) if mine else None


def _manifest(step: int, directory: Path, shards: list[_Shard | None], extra: dict[str, Any]) -> Manifest:
    present = [shard for shard in shards if shard is not None]
    entries = tuple(entry for _, of_file in present for entry in of_file)
    wrong = incomplete(entries)
    if wrong:
        raise CheckpointError(f"tensor {wrong[0]!r}: {wrong[1]}")
    files = tuple(file for file, _ in present)
    return Manifest(FORMAT_VERSION, step, next_sequence(directory), len(shards), entries, files, extra)


def _commit(temporary: Path, path: Path, manifest: Manifest) -> int:
    """On rank 0, when every file is on the disk. Returns the bytes of all files."""
    write_file(temporary / MANIFEST, manifest.to_bytes())
    sync_directory(temporary)
    replaced = beside(path, "old", new_token()) if path.exists() else None
    try:
        if replaced:
            path.rename(replaced)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError:
        _undo(temporary, path, replaced)
        raise
    if replaced:
        discard(replaced)
    return sum(file.bytes for file in manifest.files)


def _undo(temporary: Path, path: Path, replaced: Path | None) -> None:
    """Give the names back, so that an error means that nothing was committed."""
    with suppress(OSError):
        if path.exists() and not temporary.exists():
            path.rename(temporary)
        if replaced and replaced.exists():
            replaced.rename(path)
