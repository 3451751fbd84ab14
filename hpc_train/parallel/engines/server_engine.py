"""The engines of parameter servers and of neighbour averaging: plain gradients, and updates by one-sided messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, StepBatch, Sums, TensorShard, World
from hpc_train.parallel.engines.plain_engine import PlainEngine
from hpc_train.parallel.optimizer_step import OptimizerUpdates
from hpc_train.parallel.parameter_server.asynchronous import AsynchronousUpdates, StalenessClock
from hpc_train.parallel.parameter_server.mpi_ranks import MpiRanks, connect_ranks
from hpc_train.parallel.parameter_server.neighbour_averaging import NeighbourUpdates
from hpc_train.parallel.parameter_server.shared_parameters import (
    OptimizerFactory,
    ShareWindow,
    deal_parameters,
    find_hosts,
)
from hpc_train.parallel.parameter_server.synchronous import SynchronousUpdates

_Served = SynchronousUpdates | AsynchronousUpdates


class ServerEngine:
    """api.Engine over parameters that live on servers."""

    def __init__(self, model: nn.Module, updates: _Served, config: RunConfig, world: World) -> None:
        self.parts = [model]
        self._updates = updates
        self._together = PlainEngine(model, model, updates, config, world)
        self._alone = PlainEngine(model, model, updates, config, replace(world, size=1, rank=0, dp_index=0, dp_size=1))
        self._stale = True
        """The servers' memory may have been loaded from a checkpoint since the parameters were pulled."""

    def forward_backward(self, batch: StepBatch) -> Sums:
        """See api.Engine. Asynchronous: the sums of this rank's own tokens, because nobody waits for the others."""
        batch = replace(batch, measure=False)
        if isinstance(self._updates, SynchronousUpdates):
            self._refresh()
            return self._together.forward_backward(batch)
        if self._stale:
            self._refresh()
            self._updates.restart()
        stop = self._updates.begin(batch.stop)
        return replace(self._alone.forward_backward(replace(batch, stop=False)), stop=stop)

    def evaluate(self, batch: StepBatch) -> Sums:
        """See api.Engine: of the parameters on the servers when all workers have come here."""
        self._updates.refresh()
        return self._together.evaluate(batch)

    def clip(self, max_norm: float | None) -> Tensor:
        """See api.Engine; asynchronous: of this worker's own gradient."""
        return self._updates.clip(max_norm)

    def update(self, lr: float) -> bool:
        """See api.Engine."""
        return self._updates.update(lr)

    def shards(self) -> Iterator[TensorShard]:
        """See api.Engine."""
        self._stale = True
        return self._updates.shards()

    def _refresh(self) -> None:
        if self._stale:
            self._updates.refresh()
        self._stale = False


def build_server_engine(
    model: nn.Module, make_optimizer: OptimizerFactory, config: RunConfig, world: World
) -> tuple[Engine, str]:
    """The engine for parallel.server.mode, and what was done. A collective.

    Raises UserError where MPI did not start the ranks.
    """
    server = config.parallel.server
    ranks = connect_ranks(world, server.hybrid)
    if server.mode == "peer":
        optimizer = make_optimizer(model)
        updates = NeighbourUpdates(OptimizerUpdates([model], optimizer, world), model, optimizer, ranks)
        return _Unmeasured(
            PlainEngine(model, model, updates, config, world)
        ), f"neighbour averaging: {world.size} ranks"
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if server.servers > len(trained):
        raise UserError(
            f"parallel.server.servers={server.servers}: the model has {len(trained)} parameters, each on one server"
        )
    windows = [
        ShareWindow(share, make_optimizer, ranks, find_hosts(index, server.servers, server.replicas, world.size))
        for index, share in enumerate(deal_parameters(trained, server.servers))
    ]
    ranks.barrier()
    held = f"{server.servers} servers of {server.replicas} copies each, {ranks.groups} workers"
    return ServerEngine(model, _updates(model, windows, make_optimizer, config, ranks, world), config, world), (
        f"{server.mode} parameter servers over MPI windows: {held}"
    )


def _updates(
    model: nn.Module,
    windows: list[ShareWindow],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    config: RunConfig,
    ranks: MpiRanks,
    world: World,
) -> _Served:
    if config.parallel.server.mode == "synchronous":
        return SynchronousUpdates(model, windows, ranks, world)
    clock = StalenessClock(ranks, config.parallel.server.staleness, config.launch.timeout_seconds)
    return AsynchronousUpdates(model, windows, make_optimizer, clock, ranks, world)


class _Unmeasured:
    """A plain engine whose gradients nobody sees but their rank: there is no sample of a part of the batch."""

    def __init__(self, engine: PlainEngine) -> None:
        self.parts = engine.parts
        self.evaluate, self.clip, self.update, self.shards = engine.evaluate, engine.clip, engine.update, engine.shards
        self._engine = engine

    def forward_backward(self, batch: StepBatch) -> Sums:
        """See api.Engine."""
        return self._engine.forward_backward(replace(batch, measure=False))
