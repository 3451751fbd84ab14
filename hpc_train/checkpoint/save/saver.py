"""Run the saves of a training run in the background: `Saver.save` returns as soon as the tensors are copied.

A thread writes and commits, one save at a time. Every rank makes the same calls. With checkpoint.parallel_hdf5 the
ranks write through MPI.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import torch
import torch.distributed as dist

from hpc_train._torch.process_groups import make_named_group
from hpc_train.checkpoint.errors import CheckpointError, format_error
from hpc_train.checkpoint.provenance import Origin
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter
from hpc_train.checkpoint.save.layout_cache import LayoutCache
from hpc_train.checkpoint.save.local_stage import LocalFile, LocalStage
from hpc_train.checkpoint.save.save_step import SaveResult, StagedStep, StepWriter, complete_copy, stage_step
from hpc_train.checkpoint.save.shard_file import ShardStager
from hpc_train.checkpoint.save.shared_file import make_section
from hpc_train.checkpoint.save.tensor_copy import TensorCopy
from hpc_train.checkpoint.save.writer_group import WriterGroup, WriterSharing, make_writer_group
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.lock import Lock
from hpc_train.checkpoint.storage.step_directory import step_path
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World
from hpc_train.runtime.mpi import require_mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_ASKED = "checkpoint.parallel_hdf5=true"
_WITHOUT = "or set checkpoint.ranks_per_file=0, which shares files without MPI"


def make_mpi_communicator(world: World) -> Intracomm:
    """Make an MPI communicator for the saves, in the order of our ranks. A collective.

    Raises UserError where h5py is built without MPI, mpi4py is not installed, or MPI did not start the ranks.
    """
    if not h5py.get_config().mpi:
        raise UserError(
            f"{_ASKED}: this h5py is built without MPI; build it over a parallel HDF5 (pip install cython pkgconfig && "
            "CC=mpicc HDF5_MPI=ON pip install --no-binary=h5py --no-build-isolation --force-reinstall --no-deps h5py), "
            f"{_WITHOUT}"
        )
    library = require_mpi(_ASKED, world.size, f", {_WITHOUT}")
    if library.Query_thread() < library.THREAD_SERIALIZED:
        raise UserError(f"{_ASKED}: this MPI library is built without threads, and saves run in one; {_WITHOUT[3:]}")
    # The MPI launcher may have numbered the processes differently.
    ranks: Intracomm = library.Intracomm(library.COMM_WORLD.Split(0, world.rank))
    return ranks


_log = logging.getLogger(__name__)


_WORTH_WARNING_SECONDS, _WORTH_WARNING_SHARE = 1.0, 0.05
"""Warn of a wait for the previous save that exceeds both: seconds, and this share of the time since it began."""


@dataclass
class _PendingSave:
    """The save that was started last."""

    step: int
    thread: threading.Thread
    future: Future[SaveResult]
    since: float = field(default_factory=time.monotonic)

    def join(self, limit: timedelta) -> bool:
        """Wait for its end, at most until `limit` after its start; returns whether it has ended."""
        self.thread.join(max(0.0, self.since + limit.total_seconds() - time.monotonic()))
        return not self.thread.is_alive()


@dataclass
class Saver:
    """Runs the saves of one run, one at a time, and reuses their memory. Every rank makes the same calls."""

    directory: Path
    world: World
    background: bool = True
    """False: `save` returns when the outcome is known."""
    on_commit: Callable[[SaveResult], object] = lambda saved: None
    """Called on rank 0 after a commit, in the thread that wrote it."""
    before_write: Callable[[], object] = lambda: None
    """Called on every rank before its shard is written, in the thread that writes."""
    timeout: timedelta = timedelta(minutes=30)
    """Maximum duration of a save; it is then given up. Ranks wait for each other half as long."""
    storage: CheckpointDirectory = field(default_factory=CheckpointDirectory)
    overlap: bool = False
    """Whether `save` returns before shards marked `still` are copied: call `wait_for_copy` before they change.

    Only with `background`."""
    local_stage: LocalStage | None = None
    """A disk of the node between memory and the shared directory."""
    origin: Origin | None = None
    """The code and config that make these steps; rank 0's is written into them."""
    lock: Lock | None = None
    """Rank 0's lock of the directory; if it is lost nothing is committed."""
    incremental: IncrementalWriter | None = None
    """Writes only what has changed since the save before. A save that shares files does not use `local_stage`."""
    sharing: WriterSharing = field(default_factory=WriterSharing)
    """Which ranks write one file together (not with `incremental`), or take turns on a node's link or disk."""
    level: int = 0
    """zlib level at which tensors are compressed, 1 to 9; 0: not. Neither with shared files nor with `local_stage`."""
    _stager: ShardStager = field(default_factory=ShardStager)
    _layout_cache: LayoutCache = field(default_factory=LayoutCache)
    _pending: _PendingSave | None = None
    _copy: TensorCopy | None = None
    _finished: deque[SaveResult] = field(default_factory=deque)
    """Outcomes not taken yet. The save's thread appends and the training's takes: a deque needs no lock for that."""
    _group: dist.ProcessGroup | None = None
    _writers: WriterGroup | None = None
    _mpi: Intracomm | None = None
    _lost: bool = False
    """The group of the saves has lost a rank, so that the next save needs another one."""
    _groups_made: int = 0

    def __post_init__(self) -> None:
        assert self.incremental is None or not self.sharing.shares_files
        assert not self.level or not (self.sharing.shares_files or self.local_stage)
        self._stager.level = self.level
        if self.sharing.shares_files and self.world.size > 1:
            self._stager.make_layout = make_section
        if self.sharing.parallel_hdf5:
            self._mpi = make_mpi_communicator(self.world)

    def save(
        self,
        step: int,
        shards: Iterable[TensorShard],
        extra: dict[str, Any],
        finite: bool = True,
        validation_loss: float | None = None,
    ) -> Future[SaveResult]:
        """Start a save; returns when the shards may change (see `overlap`). Waits for the previous save to end.

        `take_finished`, `wait` and the future report the outcome; the future's `result` raises CheckpointError if
        nothing was committed. If the previous save has not ended within `timeout`, this one is skipped and reported as
        failed: a disk that hangs must stop neither the training nor later saves. finite, validation_loss: what the
        training knows (see Manifest); rank 0's are saved.
        """
        self.wait_for_copy()
        self._wait_for_previous_save(step)
        if not self._agree_to_start():
            why = "the save before it has not ended, a rank or its disk hangs"
            return self._report(Future(), self._make_failure(step, why))
        overlap = self.overlap and self.background
        # Copying while the file is written saves one pass over memory. It is possible only if the caller waits for the
        # save, and if nothing needs the complete image before the write.
        fuse = not (self.background or self.incremental or self.local_stage or self.sharing.shares_files)
        staged = stage_step(self._stager, step, shards, extra, finite, validation_loss, overlap, fuse)
        staged = replace(staged, origin=self.origin)
        self._copy = staged.shard.copy if staged.shard is not None else None
        future: Future[SaveResult] = Future()
        # daemon: a thread that hangs on a dead file system must not keep the process from ending.
        thread = threading.Thread(target=self._run, args=(staged, future), daemon=True)
        self._pending = _PendingSave(step, thread, future)
        thread.start()
        in_time = self.background or self._pending.join(self.timeout)
        if not in_time and staged.shard is not None and staged.shard.fused is not None:
            staged.shard.fused.give_up()
        return future

    def wait_for_copy(self) -> float:
        """Wait until the shards of the last save may change; returns the seconds waited.

        Call it on the thread, and the CUDA stream, that will change them. Until then nothing is committed.
        """
        # Forgotten first, so that a second call does not wait again.
        copy, self._copy = self._copy, None
        if copy is None:
            return 0.0
        seconds = copy.wait()
        if copy.changed is not None:
            self.overlap = False
            _log.warning(
                "tensor %r is changed by a forward or a backward: the save that was copying it meanwhile is given up, "
                "and later ones copy first (checkpoint.overlap=never)",
                copy.changed,
            )
        return seconds

    def take_finished(self) -> list[SaveResult]:
        """Return the saves that have ended since the last call."""
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def wait(self) -> list[SaveResult]:
        """Wait for the pending save; returns those that have ended since the last call.

        A save that does not end within `timeout` is reported as failed.
        """
        self.wait_for_copy()
        if self._pending is not None and not self._pending.join(self.timeout):
            why = "it has not ended in time, a rank or its disk hangs"
            self._report(self._pending.future, self._make_failure(self._pending.step, why))
        return self.take_finished()

    def _run(self, staged: StagedStep, future: Future[SaveResult]) -> None:
        """Write, commit and report one save; the body of its thread."""
        try:
            saved = self._write(staged)
        except Exception as error:
            _log.exception("checkpoint step %d: unexpected error", staged.step)
            saved = self._make_failure(staged.step, format_error(error))
        # A process group that lost a rank stays broken in gloo: every later collective would wait for its timeout.
        self._lost |= saved.lost
        if saved.warning is not None and self.world.rank == 0:
            _log.warning("checkpoint step %d: %s", saved.step, saved.warning)
        if saved.error is None and self.world.rank == 0:
            try:
                self.on_commit(saved)
            except Exception as error:  # the checkpoint is committed all the same
                _log.warning("checkpoint step %d: after the commit: %s", staged.step, format_error(error))
        self._report(future, saved)

    def _report(self, future: Future[SaveResult], saved: SaveResult) -> Future[SaveResult]:
        """Report an outcome. A save that ends after its timeout was reported keeps that failure in its future."""
        self._finished.append(saved)
        with suppress(InvalidStateError):
            if saved.error is not None:
                future.set_exception(saved.error)
            else:
                future.set_result(saved)
        return future

    def _write(self, staged: StagedStep) -> SaveResult:
        """Write and commit a staged step, in the thread of the saves. A failed save is returned, not raised."""
        staged = self._compare_with_base(complete_copy(staged))
        shares = staged.changes is not None and not staged.changes.delta.is_whole
        self.before_write()
        if self.local_stage is not None and staged.shard is not None and not shares:
            try:
                staged = replace(staged, shard=self._stager.move_to_local_disk(staged.shard, self.local_stage))
            except Exception as error:  # raised on all ranks when they meet
                staged = replace(staged, failure=error)
        try:
            saved = StepWriter(
                directory=self.directory,
                world=self.world,
                group=self._group,
                storage=self.storage,
                lock=self.lock,
                writers=self._writers,
                cache=self._layout_cache,
            ).write_and_commit(staged)
        finally:
            if staged.shard is not None and isinstance(staged.shard.image, LocalFile):
                staged.shard.image.close()
        if self.incremental is not None and staged.changes is not None and saved.error is None:
            self.incremental.adopt(staged.changes, saved.path)
        return saved

    def _compare_with_base(self, staged: StagedStep) -> StagedStep:
        """Compare the shard with the previous save, if saves are incremental."""
        if self.incremental is None or staged.shard is None or staged.failure is not None:
            return staged
        try:
            return replace(staged, changes=self.incremental.compare(staged.shard, staged.step))
        except Exception as error:  # raised on all ranks when they meet
            return replace(staged, failure=error)

    def _wait_for_previous_save(self, step: int) -> None:
        """Wait until the previous save has ended or is given up; warn if the training waited long."""
        if self._pending is None:
            return
        started = time.monotonic()
        self._pending.join(self.timeout)
        waited, interval = time.monotonic() - started, time.monotonic() - self._pending.since
        if self.world.rank == 0 and waited > max(_WORTH_WARNING_SECONDS, _WORTH_WARNING_SHARE * interval):
            _log.warning(
                "checkpoint step %d: waited %.1f s for the save before it, %.0f %% of the time since then; save less "
                "often (checkpoint.every), or to a faster disk",
                step,
                waited,
                100 * waited / interval,
            )

    def _agree_to_start(self) -> bool:
        """Return whether the previous save has ended on all ranks; if so, all have a working process group.

        Called in the training's thread. The saves have a group of their own, because their collectives run beside those
        of the training. A group that lost a rank is replaced, even if the rank comes back.
        """
        busy = self._pending is not None and self._pending.thread.is_alive()
        if self.world.size == 1:
            return not busy
        # One MAX of two flags: does any rank still write, and does any rank need a new process group?
        flags = torch.tensor([busy, self._lost or self._group is None], dtype=torch.uint8)
        # On the job's own group, in the training's thread: the ranks are at the same point of the loop here, which is
        # not true of their save threads.
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.world.group)
        someone_busy, remake = flags.tolist()
        if someone_busy:
            return False
        if remake:
            self._group, self._lost = self._make_group(), False
            self._writers = make_writer_group(self.world, self.sharing, self._group, self._mpi)
        return True

    def _make_group(self) -> dist.ProcessGroup:
        # half the timeout: ranks that wait for a hanging one give up before `timeout` ends the save from outside
        timeout = self.timeout / 2
        if self.world.group is None:
            group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
            return group
        assert self.world.store is not None
        self._groups_made += 1
        name = f"saves-{self.world.group.group_name}-{self.directory.name}-{self._groups_made}"
        return make_named_group(dist.get_process_group_ranks(self.world.group), name, self.world.store, timeout)

    def change_world(self, world: World) -> None:
        """Save from other ranks from now on, since some are lost. A save that is under way fails."""
        self.world, self._lost, self._layout_cache = world, True, LayoutCache()
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)  # ends the waits of a save that a lost rank was part of

    def _make_failure(self, step: int, why: str) -> SaveResult:
        error = CheckpointError(f"checkpoint step {step} was not saved in {self.directory}: {why}")
        return SaveResult(step, step_path(self.directory, step), 0, 0.0, error=error)
