"""Saves that return as soon as the pieces are copied: disk and commit are seen to beside the training."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_train.api import Piece, World
from hpc_train.checkpoint.saving import Saved, Taken, finish, take
from hpc_train.checkpoint.shard import Stage

_log = logging.getLogger(__name__)


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
    """A rank that does not come to the commit for so long fails the save."""
    _stage: Stage = field(default_factory=Stage)
    _thread: threading.Thread | None = None
    _ended: list[Saved] = field(default_factory=list)
    _group: dist.ProcessGroup | None = None
    _joined: bool = False

    def save(self, step: int, pieces: Iterable[Piece], extra: dict[str, Any]) -> None:
        """Begin a save; the pieces may change when this returns. Waits for the one before, with a warning if it must.

        What becomes of it is told by `ended`, or by `wait`.
        """
        self._wait_for_the_one_before(step)
        self._join()
        taken = take(self._stage, step, pieces, extra)
        if not self.background:
            self._finish(taken)
            return
        self._thread = threading.Thread(target=self._finish, args=(taken,), name=f"checkpoint-{step}", daemon=True)
        self._thread.start()

    def ended(self) -> list[Saved]:
        """The saves that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> list[Saved]:
        """What `ended` gives, once no save is under way."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.ended()

    def _finish(self, taken: Taken) -> None:
        saved = finish(self.directory, taken, self.world, self._group)
        if saved.error is None and self.world.rank == 0:
            self.after(saved)
        self._ended.append(saved)

    def _wait_for_the_one_before(self, step: int) -> None:
        if self._thread is None:
            return
        started = time.monotonic()
        late = self._thread.is_alive()
        self._thread.join()
        if late and self.world.rank == 0:
            _log.warning(
                "checkpoint step %d: waited %.1f s for the save before it; save less often (checkpoint.every), or to a "
                "faster disk",
                step,
                time.monotonic() - started,
            )

    def _join(self) -> None:
        """A group of its own for the thread: its collectives must not mix with those of the training."""
        if not self._joined and self.background and self.world.size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        self._joined = True
