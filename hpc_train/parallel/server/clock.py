"""Bounded staleness: no worker gets far ahead of the slowest (stale synchronous parallel, Ho et al. 2013)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from hpc_train.parallel.server.ranks import Ranks

if TYPE_CHECKING:
    from mpi4py import MPI

_NEVER = np.iinfo(np.int64).max
_POLL_SECONDS = 0.0005


class Clock:
    """How many updates each group of ranks has made, in a window of rank 0; nobody waits but who is too far ahead."""

    def __init__(self, ranks: Ranks, staleness: int, timeout: float) -> None:
        """A collective. timeout: seconds to wait for the slowest group."""
        from mpi4py import MPI

        self._mpi, self._ranks, self._staleness, self._timeout = MPI, ranks, staleness, timeout
        host = ranks.every.rank == 0
        self._window = MPI.Win.Allocate(8 * (ranks.groups + 1) if host else 0, 8, comm=ranks.every)
        if host:
            values = torch.frombuffer(self._window.tomemory(), dtype=torch.int64)
            values[:-1], values[-1] = 0, _NEVER
        ranks.barrier()
        self.updates = 0
        """Of this group."""

    def wait(self) -> None:
        """Until the slowest group is at most `staleness` updates behind this one."""
        deadline = time.monotonic() + self._timeout
        while self.updates - int((done := self._read()[:-1]).min()) > self._staleness:
            if time.monotonic() > deadline:
                raise RuntimeError(f"group {int(done.argmin())} of ranks made no update for {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def tick(self) -> None:
        """This group has made an update."""
        self.updates += 1
        self._combine(self._ranks.group_index, self.updates, self._mpi.REPLACE)

    def last(self, stop: bool) -> bool:
        """Whether the next update is the last one of every group, because one of them was asked to stop.

        To be asked after `wait`: the update that all end with is one that no group can have begun before it is known.
        """
        if stop:
            self._combine(self._ranks.groups, self.updates + self._staleness + 2, self._mpi.MIN)
        return self.updates + 1 >= int(self._read()[-1])

    def restart(self) -> None:
        """Forget an agreement to stop and count from 0. A collective."""
        self._ranks.barrier()
        self.updates = 0
        if self._ranks.leads:
            self._combine(self._ranks.group_index, 0, self._mpi.REPLACE)
        if self._ranks.every.rank == 0:
            self._combine(self._ranks.groups, _NEVER, self._mpi.REPLACE)
        self._ranks.barrier()

    def _read(self) -> npt.NDArray[np.int64]:
        values, before = np.zeros(self._ranks.groups + 1, dtype=np.int64), np.zeros(self._ranks.groups + 1, np.int64)
        kind = self._mpi.INT64_T
        with self._ranks.calling:
            self._window.Lock(0, self._mpi.LOCK_SHARED)
            self._window.Get_accumulate([before, kind], [values, kind], 0, (0, len(values), kind), self._mpi.NO_OP)
            self._window.Unlock(0)
        return values

    def _combine(self, place: int, value: int, how: MPI.Op) -> None:
        mine = np.array([value], dtype=np.int64)
        with self._ranks.calling:
            self._window.Lock(0, self._mpi.LOCK_SHARED)
            self._window.Accumulate([mine, self._mpi.INT64_T], 0, (place, 1, self._mpi.INT64_T), how)
            self._window.Unlock(0)
