"""Synchronous parameter servers: push gradients, one update on the servers, pull parameters.

After the backward of a step, in order of time:

    push      every worker adds its gradients to the sums on the servers; with `hybrid` a group of ranks is one worker,
              which reduces them first; a barrier
    norm      each server adds up the squares of its share; one all-reduce of a number
    update    each server steps its share, and writes it to its replicas; a barrier
    pull      every worker reads the parameters of all shares, from the nearest host

A worker sends P bytes of gradients and receives P of parameters, whatever the number of servers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from hpc_train.interfaces import TensorShard, World
from hpc_train.parallel.parameter_server.mpi_ranks import MpiRanks
from hpc_train.parallel.parameter_server.shared_parameters import ShareWindow, list_server_shards


class SynchronousUpdates:
    """Updates parameters on the servers, with the numbers that an all-reduce gives (optimizer_step.GradientUpdate)."""

    loss_scale = 1.0

    def __init__(self, model: nn.Module, windows: list[ShareWindow], ranks: MpiRanks, world: World) -> None:
        self._model, self._windows, self._ranks, self._world = model, windows, ranks, world
        self._factor: float | None = None
        """Factor for the pushed gradients; None: nothing is pushed yet."""

    def refresh(self) -> None:
        """Pull the parameters as all ranks have them now. A collective."""
        self._ranks.barrier()
        for window in self._windows:
            window.pull()

    def norm(self) -> Tensor:
        """Return the norm of the mean of all pushed gradients; see optimizer_step.GradientUpdate."""
        if self._factor is None:
            self._push()
        pushed = [window.view_pushed() for window in self._windows]
        square = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in pushed if g is not None)
        with self._ranks.lock:
            total = self._ranks.comm.allreduce(square)
        return torch.tensor(total, dtype=torch.float64).sqrt() / self._ranks.groups

    def clip(self, max_norm: float | None) -> Tensor:
        """See interfaces.Engine."""
        norm = self.norm()
        if max_norm is not None:
            self._factor = min(1.0, max_norm / (float(norm) + 1e-6)) / self._ranks.groups
        return norm

    def update(self, lr: float) -> bool:
        """See interfaces.Engine."""
        if self._factor is None:
            self._push()
        assert self._factor is not None
        for window in self._windows:
            gradient = window.view_pushed()
            if gradient is not None:
                window.apply(gradient * self._factor, lr)
                gradient.zero_()
        self.clear_gradients()
        self.refresh()
        return True

    def clear_gradients(self) -> None:
        """See optimizer_step.GradientUpdate."""
        self._factor = None
        self._model.zero_grad(set_to_none=True)

    def shards(self) -> Iterator[TensorShard]:
        """See interfaces.Engine."""
        return list_server_shards(self._model, self._windows, self._world)

    def _push(self) -> None:
        for window in self._windows:
            gradient = window.reduce_gradient()
            if self._ranks.leads:
                window.push(gradient)
        self._ranks.barrier()  # all gradients are in the sums
        self._factor = 1.0 / self._ranks.groups
