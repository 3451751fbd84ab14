"""Neighbour averaging: every rank trains a copy and averages it with its neighbours (D-PSGD, arXiv:1705.09056)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpc_train.interfaces import TensorShard
from hpc_train.parallel.optimizer_step import OptimizerUpdates
from hpc_train.parallel.parameter_server.mpi_ranks import MpiRanks

if TYPE_CHECKING:
    from mpi4py import MPI


class NeighbourUpdates:
    """GradientUpdate of a rank that steps by itself, then averages with the ranks before and after it on a ring."""

    loss_scale = 1.0

    def __init__(
        self, updates: OptimizerUpdates, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: MpiRanks
    ) -> None:
        """A collective. model: the same on every rank."""
        from mpi4py import MPI

        self._mpi, self._updates, self._ranks, self._optimizer = MPI, updates, ranks, optimizer
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        flat = torch.cat([parameter.detach().flatten() for parameter in self._trained])
        self._type = MPI.DOUBLE if flat.dtype == torch.float64 else MPI.FLOAT
        self._window: MPI.Win = MPI.Win.Allocate(flat.numel() * flat.element_size(), 1, comm=ranks.comm)
        self._published = torch.frombuffer(self._window.tomemory(), dtype=flat.dtype)
        """Parameters that the neighbours read."""
        self._read = torch.empty_like(flat)
        rank, count = ranks.comm.rank, ranks.comm.size
        self._neighbours = sorted({(rank - 1) % count, (rank + 1) % count} - {rank})

    def norm(self) -> Tensor:
        """Return the norm of this rank's own gradient; see optimizer_step.GradientUpdate."""
        return self._updates.norm()

    def clip(self, max_norm: float | None) -> Tensor:
        """See interfaces.Engine."""
        return self._updates.clip(max_norm)

    def update(self, lr: float) -> bool:
        """See interfaces.Engine."""
        self._updates.update(lr)
        self._average()
        return True

    def clear_gradients(self) -> None:
        """See optimizer_step.GradientUpdate."""
        self._updates.clear_gradients()

    def shards(self) -> Iterator[TensorShard]:
        """Average the models of all ranks, then list the shards; see interfaces.Engine. A collective."""
        state = [value for p in self._trained for value in self._optimizer.state[p].values()]
        for tensor in [*(p.detach() for p in self._trained), *state]:
            with self._ranks.lock:
                self._ranks.comm.Allreduce(self._mpi.IN_PLACE, tensor.numpy())
            tensor /= self._ranks.comm.size
        return self._updates.shards()

    def _average(self) -> None:
        torch.cat([parameter.detach().flatten() for parameter in self._trained], out=self._published)
        mean = self._published.clone()
        self._ranks.barrier()  # every rank has published
        for rank in self._neighbours:
            with self._ranks.lock:
                self._window.Lock(rank, self._mpi.LOCK_SHARED)
                self._window.Get([self._read.numpy(), self._type], rank, (0, self._read.numel(), self._type))
                self._window.Unlock(rank)
            mean += self._read
        mean /= len(self._neighbours) + 1
        parts = torch.split(mean, [parameter.numel() for parameter in self._trained])
        with torch.no_grad():
            for parameter, part in zip(self._trained, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        self._ranks.barrier()  # no rank may change what a neighbour still reads
