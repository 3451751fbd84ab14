"""One share of the model in the memory of its servers, which every rank reads and writes by one-sided communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpc_train.parallel.server.layout import MakeOptimizer, Share
from hpc_train.parallel.server.ranks import Ranks, spread

if TYPE_CHECKING:
    from mpi4py import MPI


def hosts(index: int, servers: int, replicas: int, ranks: int) -> list[int]:
    """The ranks that hold share `index` of `servers`: the one that updates it, then those with copies."""
    first = spread(index, servers, ranks)
    return [(first + spread(copy, replicas, ranks)) % ranks for copy in range(replicas)]


class ShareWindow:
    """Memory of one share on each of its hosts, and of the gradient that is added up on the first of them."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        make_optimizer: MakeOptimizer,
        ranks: Ranks,
        held_by: list[int],
    ) -> None:
        """A collective: every rank calls it, with the same parameters."""
        from mpi4py import MPI

        self._mpi, self._ranks, self.hosts = MPI, ranks, held_by
        self.parameters = [parameter for _, parameter in parameters]
        me, like = ranks.every.rank, self.parameters[0]
        share = Share(parameters, make_optimizer)
        self.bytes, self._parameter_bytes = share.bytes, share.parameter_bytes
        self._window = MPI.Win.Allocate(self.bytes if me in held_by else 0, 1, comm=ranks.every)
        self._gradients = MPI.Win.Allocate(self._parameter_bytes if me == held_by[0] else 0, 1, comm=ranks.every)
        self._type = MPI.DOUBLE if like.dtype == torch.float64 else MPI.FLOAT
        self._flat = torch.empty(self._parameter_bytes // like.element_size(), dtype=like.dtype)
        self.share: Share | None = None
        """On the hosts, in the window's own memory."""
        if me in held_by:
            share.bind(_memory(self._window), keep=False)
            self.share = share
        if me == held_by[0]:
            _memory(self._gradients).zero_()

    @property
    def nearest(self) -> int:
        """The host to read from: on this rank's node if there is one there; else the ranks take turns."""
        nodes, me = self._ranks.nodes, self._ranks.every.rank
        near = [host for host in self.hosts if nodes[host] == nodes[me]] or self.hosts
        return me if me in near else near[me % len(near)]

    def pull(self) -> None:
        """Read the parameters from the nearest host into the model; the leader of a group for all of it."""
        if self._ranks.leads:
            with self._held(self._window, self.nearest, self._mpi.LOCK_SHARED):
                self._window.Get([self._flat.numpy(), self._type], self.nearest, (0, self._flat.numel(), self._type))
        if self._ranks.group.size > 1:
            with self._ranks.calling:
                self._ranks.group.Bcast(self._flat.numpy(), 0)
        with torch.no_grad():
            for parameter, part in zip(self.parameters, self._split(self._flat), strict=True):
                parameter.copy_(part.view_as(parameter))

    def gradient(self) -> Tensor:
        """The model's gradient of this share, flat, the mean over the ranks of a group; only on its leader."""
        flat = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in self.parameters]
        torch.cat(flat, out=self._flat)
        if (group := self._ranks.group).size > 1:
            with self._ranks.calling:
                group.Allreduce(self._mpi.IN_PLACE, self._flat.numpy())
            self._flat /= group.size
        return self._flat

    def push(self, gradient: Tensor) -> None:
        """Add a gradient to what others have pushed."""
        target = (0, gradient.numel(), self._type)
        with self._held(self._gradients, self.hosts[0], self._mpi.LOCK_SHARED):
            self._gradients.Accumulate([gradient.numpy(), self._type], self.hosts[0], target, self._mpi.SUM)

    def pushed(self) -> Tensor | None:
        """The sum of what was pushed, in the window's own memory; None but on the host that updates the share."""
        if self._ranks.every.rank != self.hosts[0]:
            return None
        return _memory(self._gradients).view(self._flat.dtype)

    def apply(self, gradient: Tensor, lr: float) -> None:
        """On the host that updates the share: one step with this gradient; then bring the copies up to date."""
        assert self.share is not None
        with self._held(self._window, self.hosts[0], self._mpi.LOCK_EXCLUSIVE):
            self.share.step(gradient, lr)
            self._copy_to_replicas(_memory(self._window))

    def update_from_afar(self, share: Share, scratch: Tensor, gradient: Tensor, lr: float) -> None:
        """One step of a share that another rank holds: fetch it into `scratch`, update it there, put it back."""
        share.bind(scratch[: self.bytes], keep=True)
        mine = scratch[: self.bytes]
        with self._held(self._window, self.hosts[0], self._mpi.LOCK_EXCLUSIVE):
            self._window.Get([mine.numpy(), self._mpi.BYTE], self.hosts[0], (0, self.bytes, self._mpi.BYTE))
            self._window.Flush(self.hosts[0])
            share.step(gradient, lr)
            self._window.Put([mine.numpy(), self._mpi.BYTE], self.hosts[0], (0, self.bytes, self._mpi.BYTE))
            self._window.Flush(self.hosts[0])
            self._copy_to_replicas(mine)

    def _copy_to_replicas(self, data: Tensor) -> None:
        """While the first host is locked, so that copies never go back to an older version."""
        for host in self.hosts[1:]:
            self._window.Lock(host, self._mpi.LOCK_EXCLUSIVE)
            self._window.Put([data.numpy(), self._mpi.BYTE], host, (0, self.bytes, self._mpi.BYTE))
            self._window.Unlock(host)

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return torch.split(flat, [p.numel() for p in self.parameters])

    @contextmanager
    def _held(self, window: MPI.Win, rank: int, how: int) -> Iterator[None]:
        with self._ranks.calling:
            window.Lock(rank, how)
            try:
                yield
            finally:
                window.Unlock(rank)


def _memory(window: Any) -> Tensor:
    return torch.frombuffer(window.tomemory(), dtype=torch.uint8)
