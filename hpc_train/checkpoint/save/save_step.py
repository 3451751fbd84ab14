"""Save a step: every rank writes its shard file into a temporary directory, rank 0 commits them all by one rename.

`stage_step` copies what this rank writes into host memory, a `StepWriter` does the rest; `save_step` does both.
`LayoutCache` (layout_cache.py) spares a save from sending and encoding layouts that have not changed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.manifest import Manifest
from hpc_train.checkpoint.provenance import Origin, SaveTimer, SaveTimes
from hpc_train.checkpoint.rank_consensus import gather_and_decide
from hpc_train.checkpoint.save.commit_step import commit_step, prepare_directory
from hpc_train.checkpoint.save.layout_cache import FileUpdates, LayoutCache
from hpc_train.checkpoint.save.shard_file import ShardStager, StagedShard, write_shard
from hpc_train.checkpoint.save.writer_group import WriterGroup
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.file_system import WritePolicy
from hpc_train.checkpoint.storage.lock import Lock
from hpc_train.checkpoint.storage.step_directory import (
    choose_sequence_number,
    shard_file_name,
    step_path,
    uncommitted_path,
)
from hpc_train.errors import LostRanksError
from hpc_train.garbage_collection import pause_gc
from hpc_train.interfaces import TensorShard, World

if TYPE_CHECKING:
    import torch.distributed as dist

    from hpc_train.checkpoint.save.incremental.incremental_writer import StepChanges


class WrittenShard(NamedTuple):
    """Report of one rank to rank 0: what it has written."""

    files: FileUpdates = ()
    """Its files; the first rank of a shared file reports it."""
    finite: bool = True
    warning: str | None = None
    """Warning for the user (see SaveResult)."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SaveResult:
    """Outcome of a save, committed or not."""

    step: int
    path: Path
    bytes: int
    """Bytes of all shard files; 0 if nothing was committed."""
    seconds: float
    """Seconds from the call to the outcome."""
    stall: float = 0.0
    """Seconds of these for which the training waited."""
    error: CheckpointError | None = None
    lost: bool = False
    """The save failed because a rank is gone or late; the process group of the saves must be made again."""
    shared: int = 0
    """Bytes, of `bytes`, in files that earlier steps wrote (see incremental)."""
    warning: str | None = None
    """Warning for the user although the step was committed; the same on every rank."""
    times: SaveTimes | None = None
    """How long each part took; on rank 0, if the step was committed."""

    def wait(self) -> None:
        """Return if the checkpoint is committed; raise CheckpointError, the same on every rank, if it is not."""
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class StagedStep:
    """A step whose shards are copied to host memory, or are being copied; nothing is written yet."""

    step: int
    shard: StagedShard | None
    """None if this rank has nothing to write."""
    extra: dict[str, Any]
    started: float
    stall: float
    failure: Exception | None = None
    """Why this rank could not copy; raised on all ranks when they meet."""
    finite: bool = True
    """Whether the training saw neither NaN nor infinity; the tensors are checked when they are written."""
    validation_loss: float | None = None
    origin: Origin | None = None
    """Code and config that made the step (see Manifest)."""
    changes: StepChanges | None = None
    """Changes since the step before, for an incremental save; None: everything is written."""

    @property
    def total_stall(self) -> float:
        """Seconds for which the training has waited for the copy so far."""
        if self.shard is not None and self.shard.fused is not None:
            return time.monotonic() - self.started
        copy = self.shard.copy if self.shard is not None else None
        return self.stall + (copy.stall if copy is not None else 0.0)


def save_step(
    directory: Path, step: int, shards: Iterable[TensorShard], extra: dict[str, Any], world: World | None
) -> SaveResult:
    """Write a checkpoint of `step` under `directory`, whole or not at all. A collective of the ranks of `world`.

    Returns when the step is committed; raises CheckpointError, on every rank, if it is not. No world means a single
    process.

    shards: tensor shards of this rank; only those with replica 0 are written. Over all ranks they must cover each
    logical tensor exactly once.
    extra: JSON values; rank 0's are saved. `load_step` returns them.

    The protocol: rank 0 checks that there is room and makes `step-<n>.tmp-<token>`; every rank writes, hashes and
    synchronises its own file; rank 0 gathers sizes and checksums, writes and synchronises the manifest and the
    directories, renames the directory to `step-<n>` and synchronises its parent; all ranks learn the outcome. If any
    rank fails, nothing is committed, the temporary directory is removed, earlier checkpoints are untouched, and every
    rank raises the same CheckpointError. If a process dies, readers ignore what it leaves, and a later save or prune
    removes it.

    A step that is already committed is replaced, because after a rollback the state of the same step may differ. At
    every moment either its old or its new form is readable.
    """
    staged = stage_step(ShardStager(), step, shards, extra, fuse=True)
    saved = StepWriter(directory, world).write_and_commit(staged)
    saved.wait()
    return saved


@pause_gc()
def stage_step(
    stager: ShardStager,
    step: int,
    shards: Iterable[TensorShard],
    extra: dict[str, Any],
    finite: bool = True,
    validation_loss: float | None = None,
    overlap: bool = False,
    fuse: bool = False,
) -> StagedStep:
    """Copy what this rank writes into host memory. An error is stored in `failure` and raised when the ranks meet.

    overlap: copy shards that the training does not change (TensorShard.still) later, beside it (see start_copy).
    fuse: copy while the file is written, for a caller that waits for the save anyway (see staging.FusedStaging).
    """
    assert step >= 0, step
    started = time.monotonic()
    staged, failure = None, None
    try:
        # An empty rectangle is left out, unless the whole tensor is empty: a file must say that the tensor exists.
        written_shards = [
            shard for shard in _check_shards(shards) if shard.replica == 0 and (shard.local.numel() or 0 in shard.shape)
        ]
        staged = stager.stage(written_shards, overlap, fuse) if written_shards else None
    except Exception as error:
        failure = error
    return StagedStep(
        step=step,
        shard=staged,
        extra=extra,
        started=started,
        stall=time.monotonic() - started,
        failure=failure,
        finite=finite,
        validation_loss=validation_loss,
    )


def _check_shards(shards: Iterable[TensorShard]) -> Iterable[TensorShard]:
    """Yield the shards unchanged. Raises CheckpointError for a state dict and other objects that are no shards."""
    if isinstance(shards, Mapping):
        raise CheckpointError("it was given a state dict; give one TensorShard per tensor, which says where it belongs")
    for shard in shards:
        if not isinstance(shard, TensorShard):
            raise CheckpointError(f"it was given a {type(shard).__name__} instead of a TensorShard")
        yield shard


def complete_copy(staged: StagedStep) -> StagedStep:
    """Complete a copy that overlaps the training, in the thread of the save; returns the step, with any failure."""
    try:
        if staged.shard is not None and staged.shard.copy is not None:
            staged.shard.copy.complete()
    except Exception as error:
        return replace(staged, failure=error)
    return staged


def _count_needed_bytes(staged: StagedStep) -> int:
    """Return the bytes that this rank will write. Raises what its copy raised, which fails the save on all ranks."""
    if staged.failure is not None:
        raise staged.failure
    if staged.changes is not None:
        return staged.changes.size
    return staged.shard.size if staged.shard is not None else 0


def _write_own_files(temporary: Path, rank: int, staged: StagedStep, policy: WritePolicy) -> WrittenShard:
    """Write this rank's file, if it has anything to write; several where it shares some with earlier steps."""
    shard, changes, name = staged.shard, staged.changes, shard_file_name(rank)
    if shard is None:
        return WrittenShard()
    if shard.check is not None and changes is None:  # NaN is looked for while a block is hashed, in the same pass
        file = write_shard(temporary, name, shard, policy)
        if shard.fused is not None:
            shard.fused.confirm()
        return WrittenShard((file,), shard.is_finite())
    with ThreadPoolExecutor(1) as pool:
        finite = pool.submit(shard.is_finite) if changes is None else pool.submit(changes.is_finite, shard)
        if shard.level:
            finite.result()  # compressing overwrites the image
        if changes is None:
            return WrittenShard((write_shard(temporary, name, shard, policy),), finite.result())
        files = changes.write(temporary, name, shard, policy)
        return WrittenShard(files, finite.result(), changes.warning)


@dataclass
class StepWriter:
    """Writes and commits what the ranks have staged, one step after the other. Every rank makes the same calls."""

    directory: Path
    world: World | None
    group: dist.ProcessGroup | None = None
    """Process group of the saves, if other collectives of the same ranks may run at the same time."""
    storage: CheckpointDirectory = field(default_factory=CheckpointDirectory)
    """Checks and prepares the directory; only rank 0's is used."""
    lock: Lock | None = None
    """Rank 0's lock; if it was lost, nothing is committed."""
    writers: WriterGroup | None = None
    """Which ranks share files or take turns; with shared files the ranks have staged sections."""
    cache: LayoutCache = field(default_factory=LayoutCache)
    """Layouts of the save before."""

    def write_and_commit(self, staged: StagedStep) -> SaveResult:
        """Write and commit a step. A collective. A failed save is returned, not raised.

        A lost rank fails the save like any other error, and sets `lost`.
        """
        path = step_path(self.directory, staged.step)
        timer, staged, temporary = SaveTimer(staged.started), complete_copy(staged), None
        timer.lap("copy")
        try:
            # Two meetings of all ranks, no more: one before the first byte is written, one after the last. In each,
            # rank 0 either decides for all or all get the same error.
            token, policy = gather_and_decide(
                self.world,
                lambda: _count_needed_bytes(staged),
                lambda needs: prepare_directory(
                    path, self.writers.sum_by_file(needs) if self.writers else needs, self.storage, self.lock
                ),
                self.group,
            )
            temporary = uncommitted_path(path, "tmp", token)
            timer.lap("prepare")
            size, shared, warning = gather_and_decide(
                self.world,
                lambda: self._write_and_report(temporary, staged, policy),
                lambda ranks: self._commit(temporary, path, self._make_manifest(staged, ranks, timer), ranks),
                self.group,
            )
            self.cache.confirm_sent()
        except (CheckpointError, LostRanksError) as error:
            if temporary is not None and self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            # Returned, not raised: a training goes on without this checkpoint, and its next save may succeed.
            failed = CheckpointError(f"checkpoint step {staged.step} was not saved in {self.directory}: {error}")
            lost, seconds = isinstance(error, LostRanksError), time.monotonic() - staged.started
            return SaveResult(
                step=staged.step, path=path, bytes=0, seconds=seconds, stall=staged.total_stall, error=failed, lost=lost
            )
        times, seconds, stall = timer.committed(), time.monotonic() - staged.started, staged.total_stall
        return SaveResult(staged.step, path, size, seconds, stall, shared=shared, warning=warning, times=times)

    @property
    def _rank(self) -> int:
        return self.world.rank if self.world is not None else 0

    def _write_and_report(self, temporary: Path, staged: StagedStep, policy: WritePolicy) -> WrittenShard:
        """Write this rank's files; returns its report when it is certain that no tensor changed during the copy."""
        started = time.monotonic()
        # An error here is an exception of this rank only; gather_and_decide brings it to all others.
        written = self._write_in_turn(temporary, staged, policy)
        seconds = time.monotonic() - started
        if staged.shard is not None and staged.shard.copy is not None:
            staged.shard.copy.confirm()
        return written._replace(files=self.cache.omit_unchanged(written.files), seconds=seconds)

    def _write_in_turn(self, temporary: Path, staged: StagedStep, policy: WritePolicy) -> WrittenShard:
        """Write this rank's files, or its section of a shared file, when it is its turn."""
        writers, rank = self.writers, self._rank
        if writers is None:
            return _write_own_files(temporary, rank, staged, policy)
        if writers.shared_file is None:
            return writers.write_turns.run(lambda: _write_own_files(temporary, rank, staged, policy), writers.group)
        # The search for NaN runs in a thread beside the write, since both only read the image.
        with ThreadPoolExecutor(1) as pool:
            finite = pool.submit(lambda: staged.shard is None or staged.shard.is_finite())
            files = writers.shared_file.write(temporary, writers.file_name, staged.shard, policy, writers.write_turns)
            return WrittenShard(files, finite.result())

    def _make_manifest(self, staged: StagedStep, ranks: list[WrittenShard], timer: SaveTimer) -> Manifest:
        """On rank 0, describe the step from what all ranks have written."""
        files = self.cache.restore_unchanged([written.files for written in ranks])
        loss = staged.validation_loss
        return Manifest(
            step=staged.step,
            sequence=choose_sequence_number(self.directory),
            world_size=len(ranks),
            step_layout=self.cache.build_step_layout([layout for _, layout in files]),
            files=tuple(file for file, _ in files),
            extra=staged.extra,
            finite=staged.finite and all(written.finite for written in ranks),
            validation_loss=loss if loss is not None and isfinite(loss) else None,
            origin=staged.origin,
            times=timer.all_written(staged.total_stall, [written.seconds for written in ranks]),
        )

    def _commit(
        self, temporary: Path, path: Path, manifest: Manifest, ranks: list[WrittenShard]
    ) -> tuple[int, int, str | None]:
        """Commit the step on rank 0; returns (bytes, bytes of shared files, warning) for SaveResult."""
        size = commit_step(temporary, path, manifest, self.lock, self.cache)
        self.cache.confirm_received()
        return size, manifest.shared, next((written.warning for written in ranks if written.warning), None)
