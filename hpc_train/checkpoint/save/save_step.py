"""Save a step: every rank writes its shard file beside, rank 0 commits all of them by one rename.

`stage_step` copies what this rank writes, `write_and_commit` does the rest; `save_step` is both. `LayoutCache`
remembers what the files of the last save held: an unchanged layout is neither sent to rank 0 nor encoded again, which
takes longer than the save.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_index import INDEX_FILE, build_index
from hpc_train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, ShardFile, find_incomplete_tensor
from hpc_train.checkpoint.format.manifest_encoding import encode_columns
from hpc_train.checkpoint.format.shard_layout import FileLayout, StepLayout, gather_layouts
from hpc_train.checkpoint.provenance import Origin, SaveTimer, SaveTimes
from hpc_train.checkpoint.rank_consensus import gather_and_decide
from hpc_train.checkpoint.save.shard_file import ShardStager, StagedShard, write_shard
from hpc_train.checkpoint.save.shared_file import WriterGroup
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.file_system import (
    WritePolicy,
    make_directory,
    run_concurrently,
    sync_directory,
    write_durable_file,
)
from hpc_train.checkpoint.storage.lock import Lock
from hpc_train.checkpoint.storage.retention import discard_step, make_token, sweep_leftovers
from hpc_train.checkpoint.storage.step_directory import (
    SHARDS_FOLDER,
    list_shard_folders,
    next_sequence_number,
    shard_file_name,
    step_path,
    uncommitted_path,
)
from hpc_train.errors import LostRanksError
from hpc_train.interfaces import TensorShard, World
from hpc_train.runtime.processes import pause_gc

if TYPE_CHECKING:
    import torch.distributed as dist

    from hpc_train.checkpoint.save.incremental import StepChanges

DescribedFiles = tuple[tuple[ShardFile, FileLayout], ...]
"""Of one rank, with what each holds."""
FileUpdates = tuple[tuple[ShardFile, FileLayout | None], ...]
"""The same; None stands for what the only file of the last save held."""


@dataclass
class LayoutCache:
    """One rank's memory from save to save."""

    _mine: FileLayout | None = None
    """What this rank's only file held in the last save that it knows to be committed."""
    _telling: FileLayout | None = None
    """The same of this save."""
    _of_ranks: dict[int, FileLayout] = field(default_factory=dict)
    """On rank 0, of every rank, in the last save that was committed; so it knows whatever a rank leaves out."""
    _hearing: dict[int, FileLayout] = field(default_factory=dict)
    _held: Sequence[FileLayout] = ()
    _holdings: StepLayout | None = None
    _listed: tuple[StepLayout, dict[str, bytes]] | None = None
    _index: tuple[StepLayout, list[str], bytes] | None = None

    def tell(self, files: FileUpdates) -> FileUpdates:
        """What rank 0 must be told. Nothing counts as told until `settle`."""
        known, self._mine, self._telling = self._mine, None, None
        if len(files) != 1:
            return files
        (file, held), self._telling = files[0], files[0][1]
        return ((file, None if held is known else held),)

    def settle(self) -> None:
        """It is committed."""
        self._mine = self._telling

    def hear(self, ranks: Sequence[FileUpdates]) -> list[tuple[ShardFile, FileLayout]]:
        """On rank 0, all files, from what it was told. What is new counts as known with `keep`."""
        found: list[DescribedFiles] = [
            tuple((file, self._of_ranks[rank] if held is None else held) for file, held in files)
            for rank, files in enumerate(ranks)
        ]
        self._hearing = {rank: files[0][1] for rank, files in enumerate(found) if len(files) == 1}
        return [it for files in found for it in files]

    def keep(self) -> None:
        """They are committed."""
        self._of_ranks = self._hearing

    def holdings(self, held: Sequence[FileLayout]) -> StepLayout:
        """On rank 0. Raises CheckpointError if the files do not hold every tensor exactly once."""
        if self._holdings is None or list(self._held) != list(held):
            self._held, self._holdings = (), None
            holdings = gather_layouts(held)
            wrong = find_incomplete_tensor(holdings)
            if wrong:
                raise CheckpointError(f"tensor {wrong[0]!r}: {wrong[1]}")
            self._held, self._holdings = held, holdings
        return self._holdings

    def text(self, manifest: Manifest) -> bytes:
        """The content of manifest.json. Raises as Manifest.to_bytes does."""
        if self._listed is None or self._listed[0] is not manifest.holdings:
            self._listed = manifest.holdings, encode_columns(manifest.holdings)
        return manifest.to_bytes(self._listed[1])

    def index(self, manifest: Manifest) -> bytes:
        """The content of index.h5. Raises as index_image does."""
        names = [file.name for file in manifest.files]
        if self._index is None or self._index[0] is not manifest.holdings or self._index[1] != names:
            self._index = manifest.holdings, names, build_index(manifest)
        return self._index[2]


class WrittenShard(NamedTuple):
    """What one rank has written."""

    files: FileUpdates = ()
    """With what each holds; a file is named by one rank only."""
    finite: bool = True
    warning: str | None = None
    """See Saved."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SaveResult:
    """A save that has ended (an api.Handle)."""

    step: int
    path: Path
    bytes: int
    """Of all shard files; 0 if nothing was committed."""
    seconds: float
    """From the call to the outcome."""
    stall: float = 0.0
    """Seconds of it for which the training waited."""
    error: CheckpointError | None = None
    lost: bool = False
    """It failed because a rank is gone or late; their group is of no use any more."""
    shared: int = 0
    """Of `bytes`, those of files that were written with earlier steps (see incremental)."""
    warning: str | None = None
    """What a person should know of it, though it was committed; the same on every rank."""
    times: SaveTimes | None = None
    """On rank 0, if it is committed."""

    def wait(self) -> None:
        """Return if the checkpoint is committed; raise CheckpointError, the same on every rank, if it is not."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class StagedStep:
    """A step whose pieces are copied, or are being copied: nothing is on the disk yet."""

    step: int
    staged: StagedShard | None
    """None if this rank has nothing to write."""
    extra: dict[str, Any]
    started: float
    stall: float
    failure: Exception | None = None
    """Why this rank could not copy; told to the others when they meet."""
    finite: bool = True
    """As far as the training knows; the writer looks at the state itself."""
    validation_loss: float | None = None
    origin: Origin | None = None
    """See Manifest."""
    changes: StepChanges | None = None
    """What of it is new; None: all of it is written."""

    @property
    def stalled(self) -> float:
        """Seconds for which the training has waited for the copy until now."""
        if self.staged is not None and self.staged.filling is not None:
            return time.monotonic() - self.started
        copying = self.staged.copying if self.staged is not None else None
        return self.stall + (copying.stall if copying is not None else 0.0)


def save_step(
    directory: Path, step: int, pieces: Iterable[TensorShard], extra: dict[str, Any], world: World | None
) -> SaveResult:
    """Write a checkpoint of `step` under `directory`, whole or not at all. Every rank of `world` calls it.

    Raises CheckpointError, on every rank, if it is not committed. No world means a single process.

    pieces: of this rank; only those with replica 0 are written. Over all ranks they must cover each logical tensor
    exactly once.
    extra: what JSON can hold, the same on every rank (rank 0's is kept). It comes back from `load`.

    The protocol: rank 0 sees that there is room for all and makes `step-<n>.tmp-<token>`; every rank writes, hashes and
    synchronises its own file; rank 0 gathers sizes and checksums, writes and synchronises the manifest and the
    directories, renames it to `step-<n>` and synchronises the parent; all ranks learn the outcome. If any rank fails,
    nothing is committed, the temporary directory is removed, earlier checkpoints are untouched, and every rank raises
    the same CheckpointError.
    If a process dies, what is left is ignored by readers and removed by a later save or prune.

    A step that is already committed is replaced, and is readable, in its old or in its new form, at every moment: after
    a rollback the state of the same step may differ, so keeping the old one would be wrong.

    Returns when the outcome is known; checkpoint.background has saves that return when the pieces are copied.
    """
    saved = write_and_commit(directory, stage_step(ShardStager(), step, pieces, extra, late=True), world)
    saved.wait()
    return saved


@pause_gc()
def stage_step(
    stage: ShardStager,
    step: int,
    pieces: Iterable[TensorShard],
    extra: dict[str, Any],
    finite: bool = True,
    validation_loss: float | None = None,
    overlap: bool = False,
    late: bool = False,
) -> StagedStep:
    """Copy what this rank writes. An empty rectangle is left out unless its tensor is empty. overlap: see copying.

    late: copy while it is written, because the caller waits for the save anyway; see filling.
    """
    assert step >= 0, step
    started = time.monotonic()
    staged, failure = None, None
    try:
        mine = [
            piece for piece in _check_pieces(pieces) if piece.replica == 0 and (piece.local.numel() or 0 in piece.shape)
        ]
        staged = stage.take(mine, overlap, late) if mine else None
    except Exception as error:
        failure = error
    return StagedStep(step, staged, extra, started, time.monotonic() - started, failure, finite, validation_loss)


def _check_pieces(pieces: Iterable[TensorShard]) -> Iterable[TensorShard]:
    """Return the pieces unchanged. Raises CheckpointError for objects that are often given instead of pieces."""
    if isinstance(pieces, Mapping):
        raise CheckpointError("it was given a state dict; give one api.Piece a tensor, which tells where it belongs")
    for piece in pieces:
        if not isinstance(piece, TensorShard):
            raise CheckpointError(f"it was given a {type(piece).__name__} in place of an api.Piece")
        yield piece


def write_and_commit(
    directory: Path,
    taken: StagedStep,
    world: World | None,
    group: dist.ProcessGroup | None = None,
    place: CheckpointDirectory | None = None,
    lock: Lock | None = None,
    crew: WriterGroup | None = None,
    described: LayoutCache | None = None,
) -> SaveResult:
    """Write and commit what every rank took. group: see agreement; for calls beside others of the same ranks.

    place: what was found out about the directory; rank 0's counts. lock: rank 0's, without which nothing is committed.
    crew: what ranks share, None for nothing; with shared files it is sections that they took. described: of the save
    before.
    A rank that is lost fails the save as any other error does, with `lost` set.
    """
    path = step_path(directory, taken.step)
    watch, taken, temporary = SaveTimer(taken.started), complete_copy(taken), None
    known, rank = described or LayoutCache(), world.rank if world is not None else 0
    watch.lap("copy")
    try:
        token, how = gather_and_decide(
            world,
            lambda: _count_needed_bytes(taken),
            lambda needs: prepare_directory(
                path, crew.of_files(needs) if crew else needs, place or CheckpointDirectory(), lock
            ),
            group,
        )
        temporary = uncommitted_path(path, "tmp", token)
        watch.lap("prepare")
        written = gather_and_decide(
            world,
            lambda: _write_and_describe(temporary, rank, taken, how, crew, known),
            lambda it: _commit(temporary, path, _make_manifest(directory, taken, it, watch, known), lock, it, known),
            group,
        )
        known.settle()
    except (CheckpointError, LostRanksError) as error:
        if temporary is not None and rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        failed = CheckpointError(f"checkpoint step {taken.step} was not saved in {directory}: {error}")
        lost = isinstance(error, LostRanksError)
        return SaveResult(taken.step, path, 0, time.monotonic() - taken.started, taken.stalled, failed, lost)
    times, seconds = watch.committed(), time.monotonic() - taken.started
    size, shared, warning = written
    return SaveResult(taken.step, path, size, seconds, taken.stalled, shared=shared, warning=warning, times=times)


def complete_copy(taken: StagedStep) -> StagedStep:
    """The same when all of it is copied, in the thread of the save; a failure is told to the others when they meet."""
    try:
        if taken.staged is not None and taken.staged.copying is not None:
            taken.staged.copying.complete()
    except Exception as error:
        return replace(taken, failure=error)
    return taken


def _count_needed_bytes(taken: StagedStep) -> int:
    """Bytes that this rank will write."""
    if taken.failure is not None:
        raise taken.failure
    if taken.changes is not None:
        return taken.changes.size
    return taken.staged.size if taken.staged is not None else 0


def prepare_directory(
    path: Path, needs: list[int], place: CheckpointDirectory, lock: Lock | None = None
) -> tuple[str, WritePolicy]:
    """Make the temporary directory and its folders, once for all ranks; returns its token, and how to write there.

    needs: bytes of every file. Without room for them CheckpointError is raised, and nothing is made.
    """
    directory, token = path.parent, make_token()
    make_directory(directory)
    if lock is not None:
        lock.check()
    sweep_leftovers(directory, sole=lock is not None)
    system = place.check(directory, needs)
    temporary = uncommitted_path(path, "tmp", token)
    try:
        how = place.make(temporary, temporary / SHARDS_FOLDER, system, needs)
        for folder in list_shard_folders(len(needs)):
            (temporary / folder).mkdir(mode=0o700)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return token, how


def _write(temporary: Path, rank: int, taken: StagedStep, how: WritePolicy, crew: WriterGroup | None) -> WrittenShard:
    """This rank's part of what is to be written, when it is its turn."""
    if crew is None:
        return _write_own(temporary, rank, taken, how)
    if crew.team is None:
        return crew.turns.run(lambda: _write_own(temporary, rank, taken, how), crew.group)
    with ThreadPoolExecutor(1) as pool:
        finite = pool.submit(lambda: taken.staged is None or taken.staged.is_finite())
        files = crew.team.write(temporary, crew.name, taken.staged, how, crew.turns)
        return WrittenShard(files, finite.result())


def _write_own(temporary: Path, rank: int, taken: StagedStep, how: WritePolicy) -> WrittenShard:
    """This rank's file, if it has anything to write; several where it shares some with earlier steps."""
    staged = taken.staged
    if staged is None:
        return WrittenShard()
    if staged.looking is not None and taken.changes is None:
        file = write_shard(temporary, shard_file_name(rank), staged, how)
        if staged.filling is not None:
            staged.filling.confirm()
        return WrittenShard((file,), staged.is_finite())
    changes = taken.changes
    with ThreadPoolExecutor(1) as pool:
        finite = pool.submit(staged.is_finite) if changes is None else pool.submit(changes.is_finite, staged)
        if staged.level:
            finite.result()  # what is compressed can no longer be looked at
        if changes is None:
            return WrittenShard((write_shard(temporary, shard_file_name(rank), staged, how),), finite.result())
        files = changes.write(temporary, shard_file_name(rank), staged, how)
        return WrittenShard(files, finite.result(), changes.warning)


def _write_and_describe(
    temporary: Path, rank: int, taken: StagedStep, how: WritePolicy, crew: WriterGroup | None, known: LayoutCache
) -> WrittenShard:
    """What this rank has written, once it is known that nothing changed under the copy of it."""
    started = time.monotonic()
    written = _write(temporary, rank, taken, how, crew)
    seconds = time.monotonic() - started
    if taken.staged is not None and taken.staged.copying is not None:
        taken.staged.copying.confirm()
    return written._replace(files=known.tell(written.files), seconds=seconds)


def _make_manifest(
    directory: Path, taken: StagedStep, ranks: list[WrittenShard], watch: SaveTimer, known: LayoutCache
) -> Manifest:
    files = known.hear([written.files for written in ranks])
    holdings = known.holdings([held for _, held in files])
    finite = taken.finite and all(written.finite for written in ranks)
    score = taken.validation_loss if taken.validation_loss is not None and isfinite(taken.validation_loss) else None
    names = tuple(file for file, _ in files)
    about = (taken.extra, finite, score, taken.origin)
    times = watch.all_written(taken.stalled, [it.seconds for it in ranks])
    return Manifest(taken.step, next_sequence_number(directory), len(ranks), holdings, names, *about, times)


def _commit(
    temporary: Path, path: Path, manifest: Manifest, lock: Lock | None, ranks: list[WrittenShard], known: LayoutCache
) -> tuple[int, int, str | None]:
    """(bytes, shared, warning) of Saved."""
    warning = next((written.warning for written in ranks if written.warning), None)
    size = commit_step(temporary, path, manifest, lock, known)
    known.keep()
    return size, manifest.shared, warning


def commit_step(
    temporary: Path, path: Path, manifest: Manifest, lock: Lock | None = None, known: LayoutCache | None = None
) -> int:
    """On rank 0, when every file is on the disk. Returns the bytes of all files."""
    known = known or LayoutCache()
    texts = {MANIFEST_FILE: known.text(manifest), INDEX_FILE: known.index(manifest)}
    calls = [partial(write_durable_file, temporary / name, text) for name, text in texts.items()]
    folders = sorted({temporary / SHARDS_FOLDER, *((temporary / file.name).parent for file in manifest.files)})
    run_concurrently(calls + [partial(sync_directory, folder) for folder in folders])
    sync_directory(temporary)
    if lock is not None:
        lock.check()
    replaced = (
        uncommitted_path(path, "old", make_token()) if os.path.lexists(path) else None
    )  # lexists: also for a dangling link
    ours = _inode(temporary)
    try:
        if replaced:
            path.rename(replaced)
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError:
        _undo(temporary, path, replaced, ours)
        raise
    if replaced:
        discard_step(replaced)
    return manifest.size


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _undo(temporary: Path, path: Path, replaced: Path | None, ours: tuple[int, int]) -> None:
    """Rename everything back, so that an error means that nothing was committed.

    ours: inode of what was to be committed. Another inode of that name was committed by whoever took the lock over.
    """
    with suppress(OSError):
        if path.exists() and not temporary.exists() and _inode(path) == ours:
            path.rename(temporary)
        if replaced and replaced.exists():
            replaced.rename(path)
