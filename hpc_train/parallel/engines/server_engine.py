"""The engines of parameter servers and of neighbour averaging: plain gradients, updates by one-sided messages.

A synchronous server engine is a plain engine whose updates go through servers. An asynchronous worker computes the sums
of its own tokens only, so it also has a plain engine over a world of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from torch import nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, StepBatch, Sums, TensorShard, World
from hpc_train.parallel.engines.plain_engine import PlainEngine, UnwrappedModel
from hpc_train.parallel.engines.updating_engine import UpdatingEngine
from hpc_train.parallel.optimizer_step import GradientUpdate, OptimizerFactory, OptimizerUpdates
from hpc_train.parallel.parameter_server.mpi_ranks import MpiRanks, connect_ranks


class ServerUpdate(GradientUpdate, Protocol):
    """A GradientUpdate whose parameters live on servers."""

    def refresh(self) -> None:
        """Wait for all workers, then pull the parameters. A collective."""


class AsynchronousUpdate(ServerUpdate, Protocol):
    """A ServerUpdate that workers make at different times."""

    def restart(self) -> None:
        """Restart the clock that keeps workers close to each other. A collective."""

    def begin(self, stop: bool) -> bool:
        """Begin a step of this worker. stop: it was asked to stop; returns whether this step is the last of all."""


class ServerEngine(UpdatingEngine):
    """interfaces.Engine over parameters that live on servers, updated by all workers together."""

    _updates: ServerUpdate

    def __init__(self, model: nn.Module, updates: ServerUpdate, config: RunConfig, world: World) -> None:
        self.parts = [model]
        self._updates = updates
        self._engine = PlainEngine(model, UnwrappedModel(model), updates, config, world)
        self._stale = True
        """Whether a checkpoint may have been loaded into the servers' memory since the last pull."""

    def forward_backward(self, batch: StepBatch) -> Sums:
        """Pull the parameters if a checkpoint was loaded, then accumulate this worker's gradient."""
        self._refresh_if_stale()
        return self._engine.forward_backward(replace(batch, measure=False))

    def evaluate(self, batch: StepBatch) -> Sums:
        """Wait for all workers, then evaluate the servers' parameters. A collective."""
        self._updates.refresh()
        return self._engine.evaluate(batch)

    def shards(self) -> Iterator[TensorShard]:
        """List what this rank saves and loads; a load writes into the servers' memory."""
        self._stale = True
        return self._updates.shards()

    def _refresh_if_stale(self) -> bool:
        was_stale, self._stale = self._stale, False
        if was_stale:
            self._updates.refresh()
        return was_stale


class AsynchronousServerEngine(ServerEngine):
    """A worker that updates the servers' parameters by itself."""

    def __init__(self, model: nn.Module, updates: AsynchronousUpdate, config: RunConfig, world: World) -> None:
        super().__init__(model, updates, config, world)
        single_world = replace(world, size=1, rank=0, dp_index=0, dp_size=1)
        self._local_updates = updates
        self._local_engine = PlainEngine(model, UnwrappedModel(model), updates, config, single_world)

    def forward_backward(self, batch: StepBatch) -> Sums:
        """Accumulate this rank's gradient; the sums are of its own tokens, because no worker waits for the others."""
        if self._refresh_if_stale():
            self._local_updates.restart()
        stop = self._local_updates.begin(batch.stop)
        return replace(self._local_engine.forward_backward(replace(batch, measure=False, stop=False)), stop=stop)


class NeighbourAveragingEngine(PlainEngine):
    """A plain engine whose gradients only their own rank sees, so a part of the batch cannot be measured."""

    def forward_backward(self, batch: StepBatch) -> Sums:
        """Accumulate the gradient of one step, without a gradient sample."""
        return super().forward_backward(replace(batch, measure=False))


def build_server_engine(
    model: nn.Module, make_optimizer: OptimizerFactory, config: RunConfig, world: World
) -> tuple[Engine, str]:
    """Return the engine for parallel.server.mode and a line for the log. A collective.

    Raises UserError where MPI did not start the ranks.
    """
    ranks = connect_ranks(world, config.parallel.server.hybrid)
    if config.parallel.server.mode == "peer":
        return _build_neighbour_engine(model, make_optimizer, ranks, config, world)
    from hpc_train.parallel.parameter_server.shared_parameters import ShareWindow, assign_parameters, find_hosts

    server = config.parallel.server
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if server.servers > len(trained):
        raise UserError(
            f"parallel.server.servers={server.servers}: the model has {len(trained)} parameters, each on one server"
        )
    windows = [
        ShareWindow(share, make_optimizer, ranks, find_hosts(index, server.servers, server.replicas, world.size))
        for index, share in enumerate(assign_parameters(trained, server.servers))
    ]
    ranks.barrier()
    counts = f"{server.servers} servers of {server.replicas} copies each, {ranks.groups} workers"
    line = f"{server.mode} parameter servers over MPI windows: {counts}"
    if server.mode == "synchronous":
        from hpc_train.parallel.parameter_server.synchronous import SynchronousUpdates

        return ServerEngine(model, SynchronousUpdates(model, windows, ranks, world), config, world), line
    from hpc_train.parallel.parameter_server.asynchronous import AsynchronousUpdates, StalenessClock

    clock = StalenessClock(ranks, server.staleness, config.launch.timeout_seconds)
    updates = AsynchronousUpdates(model, windows, make_optimizer, clock, ranks, world)
    return AsynchronousServerEngine(model, updates, config, world), line


def _build_neighbour_engine(
    model: nn.Module, make_optimizer: OptimizerFactory, ranks: MpiRanks, config: RunConfig, world: World
) -> tuple[Engine, str]:
    from hpc_train.parallel.parameter_server.neighbour_averaging import NeighbourUpdates

    optimizer = make_optimizer(model)
    updates = NeighbourUpdates(OptimizerUpdates([model], optimizer, world), model, optimizer, ranks)
    engine = NeighbourAveragingEngine(model, UnwrappedModel(model), updates, config, world)
    return engine, f"neighbour averaging: {world.size} ranks"
