"""Saves that return as soon as the pieces are copied: disk and commit are seen to beside the training."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_train.api import Piece, World
from hpc_train.checkpoint.catalogue import step_path
from hpc_train.checkpoint.errors import CheckpointError, one_line
from hpc_train.checkpoint.lock import Lock
from hpc_train.checkpoint.saving import Saved, Taken, finish, take
from hpc_train.checkpoint.shard import Stage
from hpc_train.checkpoint.storage.place import Place
from hpc_train.checkpoint.storage.staging import LocalFile, LocalStage

_log = logging.getLogger(__name__)


@dataclass
class _UnderWay:
    """The save that was begun last."""

    step: int
    thread: threading.Thread
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
    after: Callable[[Saved], object] = lambda saved: None
    """Called on rank 0 after a commit, in the thread that wrote it."""
    timeout: timedelta = timedelta(minutes=30)
    """A save that takes so long is given up. One whose ranks come to the commit with half of it between them fails."""
    place: Place = field(default_factory=Place)
    local: LocalStage | None = None
    """A disk of the node in between."""
    lock: Lock | None = None
    """Rank 0's, of the directory: without it nothing is committed."""
    _stage: Stage = field(default_factory=Stage)
    _under_way: _UnderWay | None = None
    _ended: deque[Saved] = field(default_factory=deque)
    _group: dist.ProcessGroup | None = None
    _lost: bool = False

    def save(
        self,
        step: int,
        pieces: Iterable[Piece],
        extra: dict[str, Any],
        finite: bool = True,
        validation_loss: float | None = None,
    ) -> None:
        """Begin a save; the pieces may change when this returns. Waits for the one before, with a warning if it must.

        What becomes of it is told by `ended`, or by `wait`. It is left out, and told as failed, where the one before
        has not ended within `timeout`: a disk that hangs must stop neither the training nor the saves that come later.
        finite, validation_loss: see Manifest, as far as the training knows; rank 0's count.
        """
        self._wait_for_the_one_before(step)
        if not self._agree():
            self._ended.append(self._failed(step, "the save before it has not ended, a rank or its disk hangs"))
            return
        taken = take(self._stage, step, pieces, extra, finite, validation_loss)
        self._under_way = _UnderWay(step, threading.Thread(target=self._finish, args=(taken,), daemon=True))
        self._under_way.thread.start()
        if not self.background:
            self._under_way.join(self.timeout)

    def ended(self) -> list[Saved]:
        """The saves that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def wait(self) -> list[Saved]:
        """What `ended` gives, once no save is under way; one that does not end within `timeout` is told as failed."""
        late = self._under_way is not None and not self._under_way.join(self.timeout)
        if self._under_way is not None and late:
            self._ended.append(self._failed(self._under_way.step, "it has not ended in time, a rank or its disk hangs"))
        return self.ended()

    def _finish(self, taken: Taken) -> None:
        try:
            saved = self._finished(taken)
        except Exception as error:
            _log.exception("checkpoint step %d: unexpected error", taken.step)
            saved = self._failed(taken.step, one_line(error))
        self._lost |= saved.lost
        if saved.error is None and self.world.rank == 0:
            try:
                self.after(saved)
            except Exception as error:  # the checkpoint is committed whatever became of this
                _log.warning("checkpoint step %d: after the commit: %s", taken.step, one_line(error))
        self._ended.append(saved)

    def _finished(self, taken: Taken) -> Saved:
        if self.local is not None and taken.staged is not None:
            try:
                taken = replace(taken, staged=self._stage.put_aside(taken.staged, self.local))
            except Exception as error:  # told to the others when they meet
                taken = replace(taken, failure=error)
        try:
            return finish(self.directory, taken, self.world, self._group, self.place, self.lock)
        finally:
            if taken.staged is not None and isinstance(taken.staged.image, LocalFile):
                taken.staged.image.close()

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
        return True

    def _failed(self, step: int, why: str) -> Saved:
        error = CheckpointError(f"checkpoint step {step} was not saved in {self.directory}: {why}")
        return Saved(step, step_path(self.directory, step), 0, 0.0, error=error)
