"""Run the saves of a training beside it: `Saver.save` returns as soon as the tensors are copied.

A thread writes and commits; one save at a time. Every rank makes the same calls. With checkpoint.parallel_hdf5 the
ranks write through MPI, as MPI knows them.
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

from hpc_train.checkpoint.errors import CheckpointError, format_error
from hpc_train.checkpoint.provenance import Origin
from hpc_train.checkpoint.save.file_writer import LocalFile, LocalStage
from hpc_train.checkpoint.save.incremental import IncrementalWriter
from hpc_train.checkpoint.save.save_step import (
    LayoutCache,
    SaveResult,
    StagedStep,
    complete_copy,
    stage_step,
    write_and_commit,
)
from hpc_train.checkpoint.save.shard_file import ShardStager
from hpc_train.checkpoint.save.shared_file import WriterGroup, WriterSharing, make_section, make_writer_group
from hpc_train.checkpoint.save.staging import TensorCopy
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.lock import Lock
from hpc_train.checkpoint.storage.step_directory import step_path
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard, World
from hpc_train.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_ASKED = "checkpoint.parallel_hdf5=true"
_WITHOUT = "or set checkpoint.ranks_per_file=0, which shares files without MPI"


def make_mpi_communicator(world: World) -> Intracomm:
    """A communicator of the saves' own, in the order of our ranks. A collective: every rank calls it.

    Raises UserError where h5py is built without MPI, mpi4py is not installed, or MPI did not start the ranks.
    """
    if not h5py.get_config().mpi:
        raise UserError(
            f"{_ASKED}: this h5py is built without MPI; build it over a parallel HDF5 (pip install cython pkgconfig && "
            "CC=mpicc HDF5_MPI=ON pip install --no-binary=h5py --no-build-isolation --force-reinstall --no-deps h5py), "
            f"{_WITHOUT}"
        )
    try:
        library = load_mpi()
    except ImportError:
        raise UserError(f"{_ASKED}: install mpi4py (pip install 'hpc_train[mpi]'), {_WITHOUT}") from None
    if library.COMM_WORLD.size != world.size:
        raise UserError(
            f"{_ASKED}: MPI knows of {library.COMM_WORLD.size} processes, the job has {world.size} ranks; start the "
            f"ranks with mpirun, or srun --mpi=pmix, {_WITHOUT}"
        )
    if library.Query_thread() < library.THREAD_SERIALIZED:
        raise UserError(f"{_ASKED}: this MPI library is built without threads, and saves are one; {_WITHOUT[3:]}")
    # In the order of our ranks, which the launcher of the MPI processes need not have.
    ranks: Intracomm = library.Intracomm(library.COMM_WORLD.Split(0, world.rank))
    return ranks


_log = logging.getLogger(__name__)


@dataclass
class _PendingSave:
    """The save that was begun last."""

    step: int
    thread: threading.Thread
    future: Future[SaveResult]
    since: float = field(default_factory=time.monotonic)

    def join(self, limit: timedelta) -> bool:
        """Wait for its end until `limit` after its beginning; whether it has ended."""
        self.thread.join(max(0.0, self.since + limit.total_seconds() - time.monotonic()))
        return not self.thread.is_alive()


@dataclass
class Saver:
    """The saves of one run, one at a time, over memory that is kept between them. Every rank makes the same calls."""

    directory: Path
    world: World
    background: bool = True
    """False: `save` returns when the outcome is known."""
    after: Callable[[SaveResult], object] = lambda saved: None
    """Called on rank 0 after a commit, in the thread that wrote it."""
    timeout: timedelta = timedelta(minutes=30)
    """A save that takes so long is given up. One whose ranks come to the commit with half of it between them fails."""
    place: CheckpointDirectory = field(default_factory=CheckpointDirectory)
    overlap: bool = False
    """`save` returns before pieces that are still are copied: `copied` is to be called before they change. Only with
    `background`."""
    local: LocalStage | None = None
    """A disk of the node in between."""
    origin: Origin | None = None
    """What makes these steps; rank 0's is written into them."""
    lock: Lock | None = None
    """Rank 0's, of the directory: without it nothing is committed."""
    incremental: IncrementalWriter | None = None
    """Only what has changed since the save before is written. Such a save has no use for `local`."""
    sharing: WriterSharing = field(default_factory=WriterSharing)
    """Of files, which `incremental` has no use for, and of a node's link or disk."""
    level: int = 0
    """At which zlib compresses the tensors, 1 to 9; 0: not. With neither shared files nor `local`."""
    _stage: ShardStager = field(default_factory=ShardStager)
    _described: LayoutCache = field(default_factory=LayoutCache)
    _under_way: _PendingSave | None = None
    _copying: TensorCopy | None = None
    _ended: deque[SaveResult] = field(default_factory=deque)
    _group: dist.ProcessGroup | None = None
    _crew: WriterGroup | None = None
    _mpi: Intracomm | None = None
    _lost: bool = False

    def __post_init__(self) -> None:
        assert self.incremental is None or not self.sharing.files
        assert not self.level or not (self.sharing.files or self.local)
        self._stage.level = self.level
        if self.sharing.files and self.world.size > 1:
            self._stage.make = make_section
        if self.sharing.parallel_hdf5:
            self._mpi = make_mpi_communicator(self.world)

    def save(
        self,
        step: int,
        pieces: Iterable[TensorShard],
        extra: dict[str, Any],
        finite: bool = True,
        validation_loss: float | None = None,
    ) -> Future[SaveResult]:
        """Begin a save; the pieces may change when this returns, but for `overlap`. Waits for the one before, with a
        warning if it must.

        `ended`, `wait` and the future report the outcome; the future's `result` raises CheckpointError if nothing was
        committed. The save is skipped, and reported as failed, if the one before
        has not ended within `timeout`: a disk that hangs must stop neither the training nor the saves that come later.
        finite, validation_loss: see Manifest, as far as the training knows; rank 0's count.
        """
        self.copied()
        self._wait_for_the_one_before(step)
        if not self._agree():
            return self._told(
                Future(), self._failed(step, "the save before it has not ended, a rank or its disk hangs")
            )
        overlap = self.overlap and self.background
        late = not (self.background or self.incremental or self.local or self.sharing.files)
        taken = stage_step(self._stage, step, pieces, extra, finite, validation_loss, overlap, late)
        taken = replace(taken, origin=self.origin)
        self._copying = taken.staged.copying if taken.staged is not None else None
        future: Future[SaveResult] = Future()
        thread = threading.Thread(target=self._finish, args=(taken, future), daemon=True)
        self._under_way = _PendingSave(step, thread, future)
        self._under_way.thread.start()
        in_time = self.background or self._under_way.join(self.timeout)
        if not in_time and taken.staged is not None and taken.staged.filling is not None:
            taken.staged.filling.give_up()
        return future

    def copied(self) -> float:
        """Return when the pieces of the last save may change; the seconds that this took.

        On the thread, and the CUDA stream, that will change them. Before it, nothing is committed.
        """
        copying, self._copying = self._copying, None
        if copying is None:
            return 0.0
        seconds = copying.wait()
        if copying.changed is not None:
            self.overlap = False
            _log.warning(
                "tensor %r is changed by a forward or a backward: the save that was copying it meanwhile is given up, "
                "and later ones copy first (checkpoint.overlap=never)",
                copying.changed,
            )
        return seconds

    def ended(self) -> list[SaveResult]:
        """The saves that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self) -> list[SaveResult]:
        """What `ended` gives, once no save is under way; one that does not end within `timeout` is told as failed."""
        self.copied()
        late = self._under_way is not None and not self._under_way.join(self.timeout)
        if self._under_way is not None and late:
            why = "it has not ended in time, a rank or its disk hangs"
            self._told(self._under_way.future, self._failed(self._under_way.step, why))
        return self.ended()

    def _finish(self, taken: StagedStep, future: Future[SaveResult]) -> None:
        try:
            saved = self._finished(taken)
        except Exception as error:
            _log.exception("checkpoint step %d: unexpected error", taken.step)
            saved = self._failed(taken.step, format_error(error))
        self._lost |= saved.lost
        if saved.warning is not None and self.world.rank == 0:
            _log.warning("checkpoint step %d: %s", saved.step, saved.warning)
        if saved.error is None and self.world.rank == 0:
            try:
                self.after(saved)
            except Exception as error:  # the checkpoint is committed whatever became of this
                _log.warning("checkpoint step %d: after the commit: %s", taken.step, format_error(error))
        self._told(future, saved)

    def _told(self, future: Future[SaveResult], saved: SaveResult) -> Future[SaveResult]:
        """Report the outcome to `ended` and to the future. A save that ends too late keeps the first one reported."""
        self._ended.append(saved)
        with suppress(InvalidStateError):
            if saved.error is not None:
                future.set_exception(saved.error)
            else:
                future.set_result(saved)
        return future

    def _finished(self, taken: StagedStep) -> SaveResult:
        taken = self._compared(complete_copy(taken))
        shares = taken.changes is not None and not taken.changes.delta.is_whole
        if self.local is not None and taken.staged is not None and not shares:
            try:
                taken = replace(taken, staged=self._stage.put_aside(taken.staged, self.local))
            except Exception as error:  # told to the others when they meet
                taken = replace(taken, failure=error)
        try:
            how = (self._group, self.place, self.lock, self._crew, self._described)
            saved = write_and_commit(self.directory, taken, self.world, *how)
        finally:
            if taken.staged is not None and isinstance(taken.staged.image, LocalFile):
                taken.staged.image.close()
        if self.incremental is not None and taken.changes is not None and saved.error is None:
            self.incremental.adopt(taken.changes, saved.path)
        return saved

    def _compared(self, taken: StagedStep) -> StagedStep:
        """The same with what of it is new, where that is asked for."""
        if self.incremental is None or taken.staged is None or taken.failure is not None:
            return taken
        try:
            return replace(taken, changes=self.incremental.compare(taken.staged, taken.step))
        except Exception as error:  # told to the others when they meet
            return replace(taken, failure=error)

    def _wait_for_the_one_before(self, step: int) -> None:
        if self._under_way is None:
            return
        started = time.monotonic()
        late = self._under_way.thread.is_alive()
        self._under_way.join(self.timeout)
        if late and self.world.rank == 0:
            _log.warning(
                "checkpoint step %d: waited %.1f s for the save before it; save less often (checkpoint.every), or to a "
                "faster disk",
                step,
                time.monotonic() - started,
            )

    def _agree(self) -> bool:
        """Whether no rank is still in the save before; then they have a group that works. In the training's thread.

        The group is the saves' own: their collectives must not mix with those of the training. One that has lost a rank
        is of no use any more, even if the rank comes after all: all make a new one.
        """
        busy = self._under_way is not None and self._under_way.thread.is_alive()
        if self.world.size == 1:
            return not busy
        seen = torch.tensor([busy, self._lost or self._group is None], dtype=torch.uint8)
        dist.all_reduce(seen, dist.ReduceOp.MAX)
        someone_busy, remake = seen.tolist()
        if someone_busy:
            return False
        if remake:
            self._group, self._lost = dist.new_group(backend="gloo", timeout=self.timeout / 2), False
            self._crew = make_writer_group(self.world, self.sharing, self._group, self._mpi)
        return True

    def _failed(self, step: int, why: str) -> SaveResult:
        error = CheckpointError(f"checkpoint step {step} was not saved in {self.directory}: {why}")
        return SaveResult(step, step_path(self.directory, step), 0, 0.0, error=error)
