"""Save a step: every rank writes its shard beside, rank 0 commits all of them by one rename."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_train.api import Piece, World
from hpc_train.checkpoint.agreement import on_all
from hpc_train.checkpoint.catalogue import beside, next_sequence, step_path
from hpc_train.checkpoint.errors import CheckpointError, LostRanksError
from hpc_train.checkpoint.files import make_directory, sync_directory, write_file
from hpc_train.checkpoint.holdings import Held, gather
from hpc_train.checkpoint.index import INDEX, index_image, is_ordinary
from hpc_train.checkpoint.lock import Lock
from hpc_train.checkpoint.manifest import MANIFEST, Manifest, ShardFile, incomplete
from hpc_train.checkpoint.retention import discard, new_token, sweep
from hpc_train.checkpoint.shard import SHARDS, Stage, Staged, folders, shard_name, write_shard
from hpc_train.checkpoint.storage.place import Place
from hpc_train.checkpoint.storage.policy import Behaviour

if TYPE_CHECKING:
    import torch.distributed as dist


class Written(NamedTuple):
    """What one rank has written."""

    files: tuple[tuple[ShardFile, Held], ...] = ()
    """With what each holds; a file is named by one rank only."""
    finite: bool = True


@dataclass(frozen=True)
class Saved:
    """A save that has ended (an api.Handle)."""

    step: int
    path: Path
    bytes: int
    """Of all shard files; 0 if nothing was committed."""
    seconds: float
    """From the call to the outcome."""
    stall: float = 0.0
    """Seconds of it during which the pieces must not change."""
    error: CheckpointError | None = None
    lost: bool = False
    """It failed because a rank is gone or late; their group is of no use any more."""

    def wait(self) -> None:
        """Return if the checkpoint is committed; raise CheckpointError, the same on every rank, if it is not."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Taken:
    """A step whose pieces are copied: they may change, and nothing is on the disk yet."""

    step: int
    staged: Staged | None
    """None if this rank has nothing to write."""
    extra: dict[str, Any]
    started: float
    stall: float
    failure: Exception | None = None
    """Why this rank could not copy; told to the others when they meet."""
    finite: bool = True
    """As far as the training knows; the writer looks at the state itself."""
    validation_loss: float | None = None
    """See Manifest."""


def save(directory: Path, step: int, pieces: Iterable[Piece], extra: dict[str, Any], world: World) -> Saved:
    """Write a checkpoint of `step` under `directory`, whole or not at all. Every rank of `world` calls it.

    pieces: of this rank; only those with replica 0 are written. Over all ranks they must cover each logical tensor
    exactly once.
    extra: what JSON can hold, the same on every rank (rank 0's is kept). It comes back from `load`.

    The protocol: rank 0 sees that there is room for all and makes `step-<n>.tmp-<token>`; every rank writes, hashes and
    synchronises its own file; rank 0 gathers sizes and checksums, writes and synchronises the manifest and the
    directories, renames it to `step-<n>` and synchronises the parent; all ranks learn the outcome. If any rank fails,
    nothing is committed, the temporary directory is removed, earlier checkpoints are untouched, and `wait` raises the
    same CheckpointError on every rank.
    If a process dies, what is left is ignored by readers and removed by a later save or prune.

    A step that is already committed is replaced, and is readable, in its old or in its new form, at every moment: after
    a rollback the state of the same step may differ, so keeping the old one would be wrong.

    Returns when the outcome is known; checkpoint.background has saves that return when the pieces are copied.
    """
    return finish(directory, take(Stage(), step, pieces, extra), world)


def take(
    stage: Stage,
    step: int,
    pieces: Iterable[Piece],
    extra: dict[str, Any],
    finite: bool = True,
    validation_loss: float | None = None,
) -> Taken:
    """Copy what this rank writes. An empty rectangle is left out unless its tensor is empty."""
    assert step >= 0, step
    started = time.monotonic()
    staged, failure = None, None
    try:
        mine = [piece for piece in pieces if piece.replica == 0 and (piece.local.numel() or 0 in piece.shape)]
        staged = stage.take(mine) if mine else None
    except Exception as error:
        failure = error
    return Taken(step, staged, extra, started, time.monotonic() - started, failure, finite, validation_loss)


def finish(
    directory: Path,
    taken: Taken,
    world: World,
    group: dist.ProcessGroup | None = None,
    place: Place | None = None,
    lock: Lock | None = None,
) -> Saved:
    """Write and commit what every rank took. group: see agreement; for calls beside others of the same ranks.

    place: what was found out about the directory; rank 0's counts. lock: rank 0's, without which nothing is committed.
    A rank that is lost fails the save as any other error does, with `lost` set.
    """
    path = step_path(directory, taken.step)
    temporary = None
    try:
        token, how = on_all(
            world, lambda: _need(taken), lambda needs: prepare(path, needs, place or Place(), lock), group
        )
        temporary = beside(path, "tmp", token)
        written = on_all(
            world,
            lambda: _write(temporary, world.rank, taken, how),
            lambda ranks: commit(temporary, path, _manifest(directory, taken, ranks), lock),
            group,
        )
    except (CheckpointError, LostRanksError) as error:
        if temporary is not None and world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        failed = CheckpointError(f"checkpoint step {taken.step} was not saved in {directory}: {error}")
        lost = isinstance(error, LostRanksError)
        return Saved(taken.step, path, 0, time.monotonic() - taken.started, taken.stall, failed, lost)
    return Saved(taken.step, path, written, time.monotonic() - taken.started, taken.stall)


def _need(taken: Taken) -> int:
    """Bytes that this rank will write."""
    if taken.failure is not None:
        raise taken.failure
    return taken.staged.size if taken.staged is not None else 0


def prepare(path: Path, needs: list[int], place: Place, lock: Lock | None = None) -> tuple[str, Behaviour]:
    """Make the temporary directory and its folders, once for all ranks; returns its token, and how to write there.

    needs: bytes of every rank. Without room for them CheckpointError is raised, and nothing is made.
    """
    directory, token = path.parent, new_token()
    make_directory(directory)
    if lock is not None:
        lock.check()
    sweep(directory, sole=lock is not None)
    system = place.check(directory, needs)
    temporary = beside(path, "tmp", token)
    try:
        how = place.make(temporary, temporary / SHARDS, system, needs)
        for folder in folders(len(needs)):
            (temporary / folder).mkdir(mode=0o700)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return token, how


def _write(temporary: Path, rank: int, taken: Taken, how: Behaviour) -> Written:
    """This rank's file, if it has anything to write."""
    staged = taken.staged
    if staged is None:
        return Written()
    with ThreadPoolExecutor(1) as pool:
        finite = pool.submit(staged.is_finite)
        return Written((write_shard(temporary, shard_name(rank), staged, how),), finite.result())


def _manifest(directory: Path, taken: Taken, ranks: list[Written]) -> Manifest:
    files = [it for written in ranks for it in written.files]
    holdings = gather([held for _, held in files])
    wrong = incomplete(holdings)
    if wrong:
        raise CheckpointError(f"tensor {wrong[0]!r}: {wrong[1]}")
    finite = taken.finite and all(written.finite for written in ranks)
    score = taken.validation_loss if taken.validation_loss is not None and isfinite(taken.validation_loss) else None
    names = tuple(file for file, _ in files)
    return Manifest(taken.step, next_sequence(directory), len(ranks), holdings, names, taken.extra, finite, score)


def commit(temporary: Path, path: Path, manifest: Manifest, lock: Lock | None = None) -> int:
    """On rank 0, when every file is on the disk. Returns the bytes of all files."""
    write_file(temporary / MANIFEST, manifest.to_bytes())
    if is_ordinary(manifest):
        write_file(temporary / INDEX, index_image(manifest))
    for folder in sorted({(temporary / file.name).parent for file in manifest.files}):
        sync_directory(folder)
    for folder in (temporary / SHARDS, temporary):
        sync_directory(folder)
    if lock is not None:
        lock.check()
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
    return manifest.size


def _undo(temporary: Path, path: Path, replaced: Path | None) -> None:
    """Give the names back, so that an error means that nothing was committed."""
    with suppress(OSError):
        if path.exists() and not temporary.exists():
            path.rename(temporary)
        if replaced and replaced.exists():
            replaced.rename(path)
