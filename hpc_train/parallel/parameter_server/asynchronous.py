"""Asynchronous parameter servers: workers update the parameters independently, none too far ahead of the slowest.

Bounded staleness (stale synchronous parallel, Ho et al. 2013): a clock in a window of rank 0 counts the updates of each
worker, and only a worker that is too far ahead waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpc_train.interfaces import TensorShard, World
from hpc_train.parallel.optimizer_step import OptimizerFactory
from hpc_train.parallel.parameter_server.mpi_ranks import MpiRanks
from hpc_train.parallel.parameter_server.shared_parameters import (
    ParameterShare,
    ShareWindow,
    list_server_shards,
)

if TYPE_CHECKING:
    from mpi4py import MPI

_NEVER = np.iinfo(np.int64).max
"""Value of the element after the clocks as long as no worker has asked to stop."""
_POLL_SECONDS = 0.0005
"""Pause between two looks at the clocks of a group that is too far ahead."""


class StalenessClock:
    """Counts the updates of each group of ranks, in a window of rank 0; only a group too far ahead waits."""

    def __init__(self, ranks: MpiRanks, staleness: int, timeout: float) -> None:
        """A collective. timeout: seconds to wait for the slowest group."""
        from mpi4py import MPI

        self._mpi, self._ranks, self._staleness, self._timeout = MPI, ranks, staleness, timeout
        host = ranks.comm.rank == 0
        self._window = MPI.Win.Allocate(8 * (ranks.groups + 1) if host else 0, 8, comm=ranks.comm)
        if host:
            values = torch.frombuffer(self._window.tomemory(), dtype=torch.int64)
            values[:-1], values[-1] = 0, _NEVER
        ranks.barrier()
        self.updates = 0
        """Updates of this group."""

    def wait(self) -> None:
        """Wait until the slowest group is at most `staleness` updates behind. Raises RuntimeError after `timeout`."""
        deadline = time.monotonic() + self._timeout
        while self.updates - int((updates_of_groups := self._read()[:-1]).min()) > self._staleness:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"group {int(updates_of_groups.argmin())} of ranks made no update for {self._timeout:g} s"
                )
            time.sleep(_POLL_SECONDS)

    def tick(self) -> None:
        """Count an update of this group."""
        self.updates += 1
        self._combine(self._ranks.group_index, self.updates, self._mpi.REPLACE)

    def last(self, stop: bool) -> bool:
        """Return whether the next update is the last of every group, because one of them was asked to stop.

        Call it after `wait`: all groups end with an update so late that none can have begun it before learning of it.
        """
        if stop:
            # Other groups may have begun their update number updates + staleness + 1 by now, so the next one is the
            # first that all can end with. Atomic MIN: of several groups that want to stop, the earliest end counts.
            self._combine(self._ranks.groups, self.updates + self._staleness + 2, self._mpi.MIN)
        return self.updates + 1 >= int(self._read()[-1])

    def restart(self) -> None:
        """Forget an agreement to stop and count from 0. A collective."""
        self._ranks.barrier()  # nobody waits for the old counts any more
        self.updates = 0
        if self._ranks.leads:
            self._combine(self._ranks.group_index, 0, self._mpi.REPLACE)
        if self._ranks.comm.rank == 0:
            self._combine(self._ranks.groups, _NEVER, self._mpi.REPLACE)
        self._ranks.barrier()  # and nobody sees them again

    def _read(self) -> npt.NDArray[np.int64]:
        values, before = np.zeros(self._ranks.groups + 1, dtype=np.int64), np.zeros(self._ranks.groups + 1, np.int64)
        kind = self._mpi.INT64_T
        with self._ranks.lock:
            self._window.Lock(0, self._mpi.LOCK_SHARED)
            # Get_accumulate with NO_OP is an atomic read; a plain Get may see half a number that another rank writes.
            self._window.Get_accumulate([before, kind], [values, kind], 0, (0, len(values), kind), self._mpi.NO_OP)
            self._window.Unlock(0)
        return values

    def _combine(self, place: int, value: int, operation: MPI.Op) -> None:
        buffer = np.array([value], dtype=np.int64)
        with self._ranks.lock:
            self._window.Lock(0, self._mpi.LOCK_SHARED)
            self._window.Accumulate([buffer, self._mpi.INT64_T], 0, (place, 1, self._mpi.INT64_T), operation)
            self._window.Unlock(0)


class AsynchronousUpdates:
    """GradientUpdate of one worker (with `hybrid`, of one group): applies its own gradient at once.

    A server does nothing: the worker fetches a share under its lock, updates it and puts it back.
    """

    loss_scale = 1.0

    def __init__(
        self,
        model: nn.Module,
        windows: list[ShareWindow],
        make_optimizer: OptimizerFactory,
        clock: StalenessClock,
        ranks: MpiRanks,
        world: World,
    ) -> None:
        self._model, self._windows, self._clock, self._ranks, self._world = model, windows, clock, ranks, world
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._shares = [
            ParameterShare([(names[p], p) for p in window.parameters], make_optimizer) for window in windows
        ]
        self._scratch = torch.empty(max(window.bytes for window in windows), dtype=torch.uint8)
        self._gradients: list[Tensor] | None = None

    def begin(self, stop: bool) -> bool:
        """Wait for the slowest worker and pull the parameters; returns whether this step is the last of all workers."""
        last, stop = False, self._agree(stop)
        if self._ranks.leads:
            self._clock.wait()
            last = self._clock.last(stop)
        last = self._agree(last)
        for window in self._windows:
            window.pull()
        return last

    def _agree(self, local_answer: bool) -> bool:
        """Return whether `local_answer` is true on any rank of the group. A collective of the group."""
        with self._ranks.lock:
            return bool(self._ranks.group.allreduce(int(local_answer)))

    def refresh(self) -> None:
        """Wait for all workers, then pull the parameters. A collective."""
        self._ranks.barrier()
        for window in self._windows:
            window.pull()

    def restart(self) -> None:
        """Restart the clock on all workers. A collective."""
        self._clock.restart()

    def norm(self) -> Tensor:
        """Return the norm of this worker's (or group's) own gradient; see optimizer_step.GradientUpdate."""
        if self._gradients is None:
            self._gradients = [window.reduce_gradient().clone() for window in self._windows]
        return nn.utils.get_total_norm(self._gradients)

    def clip(self, max_norm: float | None) -> Tensor:
        """See interfaces.Engine."""
        norm = self.norm()
        assert self._gradients is not None
        if max_norm is not None:
            for gradient in self._gradients:
                gradient.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def update(self, lr: float) -> bool:
        """See interfaces.Engine."""
        self.norm()
        assert self._gradients is not None
        if self._ranks.leads:
            for window, share, gradient in zip(self._windows, self._shares, self._gradients, strict=True):
                window.update_remotely(share, self._scratch, gradient, lr)
            self._clock.tick()
        self.clear_gradients()
        return True

    def clear_gradients(self) -> None:
        """See optimizer_step.GradientUpdate."""
        self._gradients = None
        self._model.zero_grad(set_to_none=True)

    def shards(self) -> Iterator[TensorShard]:
        """See interfaces.Engine."""
        self._ranks.barrier()
        return list_server_shards(self._model, self._windows, self._world)
