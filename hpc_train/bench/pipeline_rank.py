"""One rank of `bench bubble`: runs the schedules over stages that sleep, and compares them with their orders."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.api import World
from hpc_train.bench.pipeline import Options, ScheduleResult
from hpc_train.bench.sleeping import FEATURES, SleepingStage, times
from hpc_train.collectives import all_gather_values
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.messages import Codec
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.pipeline.schedule import Pipeline, Schedule
from hpc_train.parallel.pipeline.timeline import Event, Timeline, bubble
from hpc_train.runtime.start import identity_map, join, shut_down, start
from hpc_train.schedules.actions import Order
from hpc_train.schedules.simulate import Simulation, Times, simulate

_TIMEOUT = timedelta(minutes=5)
Steps = list[list[list[Event]]]
"""Events by step and rank."""


class _Running:
    """A schedule of this rank, ready to be stepped."""

    def __init__(self, name: str, order: Order, options: Options, world: World) -> None:
        self.name, self.order = name, order
        self.times = times(order, options.milliseconds / 1000)
        self.timeline = Timeline(world.device, on=True)
        self._rank, self._micro_batches = world.rank, options.micro_batches
        mine = [stage for stage, rank in enumerate(order.placement) if rank == world.rank]
        self._parts = {stage: _stage(self.times, stage) for stage in mine}
        self._schedule = self._make(world)

    def _make(self, world: World) -> Schedule:
        pipeline = Pipeline(
            self.name,
            self.order if self.name.endswith(".csv") else None,
            self.order.placement,
            self._parts,
            world.mesh["pp"].get_group(),
            world.device,
            self.timeline,
            StepMasks((), RunConfig(), world),
        )
        inputs = torch.empty(1, FEATURES, device="meta")
        return pipeline.training(self._micro_batches, inputs, inputs.clone().requires_grad_(), _loss)

    def step(self, sleeps: bool) -> None:
        """One step of all ranks, on the timeline; without sleep it only opens connections."""
        for part in self._parts.values():
            part.sleeps = sleeps
        batch = torch.zeros(self._micro_batches, FEATURES)
        first, last = self.order.placement[0] == self._rank, self.order.placement[-1] == self._rank
        keywords: dict[str, Any] = {"target": batch} if last else {}
        dist.barrier()
        self._schedule.step(*([batch] if first else []), **keywords, return_outputs=False)
        self.timeline.step += 1

    def events(self) -> Steps:
        """Of all steps and ranks; every rank calls it."""
        ranks = all_gather_values(self.timeline.events, codec=Codec((Event,)))
        return [[[e for e in events if e.step == step] for events in ranks] for step in range(self.timeline.step)]


def measure(options: Options, orders: dict[str, Order]) -> list[ScheduleResult]:
    """Run every order on all ranks of this job; every rank gets the results."""
    torch.set_num_threads(1)
    task = join(timeout=_TIMEOUT)
    world = start(task, identity_map(task), RunConfig(parallel=ParallelConfig(pp=options.ranks)))
    try:
        running = [_Running(name, order, options, world) for name, order in orders.items()]
        for number in range(1 + options.rounds):
            for schedule in running:
                schedule.step(sleeps=number > 0)
        return [_summary(schedule.name, schedule.order, schedule.times, schedule.events()[1:]) for schedule in running]
    finally:
        shut_down()


def _stage(times: Times, stage: int) -> SleepingStage:
    return SleepingStage(times.forward[stage], times.inputs[stage], times.weights[stage])


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).sum()


def _summary(name: str, order: Order, times: Times, steps: Steps) -> ScheduleResult:
    for ranks in steps:
        _check_done(name, order, ranks)
    simulated = simulate(order, times)
    shares = np.array([bubble(ranks) for ranks in steps])
    low, median, high = (float(value) for value in np.quantile(shares.mean(axis=1), (0.25, 0.5, 0.75)))
    return ScheduleResult(
        name=name,
        stages=order.stages,
        simulated_bubble=simulated.mean_bubble,
        measured_bubble=median,
        quartiles=(low, high),
        difference=_difference(median, simulated),
        simulated_seconds=simulated.makespan,
        measured_seconds=float(np.median([_seconds(ranks) for ranks in steps])),
        simulated_ranks=simulated.bubble,
        measured_ranks=tuple(float(share) for share in np.median(shares, axis=0)),
        live=simulated.live,
    )


def _check_done(name: str, order: Order, ranks: list[list[Event]]) -> None:
    """What was measured is what is simulated."""
    for rank, events in enumerate(ranks):
        done = [(event.stage, event.kind, event.micro) for event in events]
        said = [(action.stage, str(action.kind), action.micro_batch) for action in order.actions(rank)]
        assert done == said, f"{name}: rank {rank} has done {done}, not {said}"


def _difference(measured: float, simulated: Simulation) -> float:
    return measured / simulated.mean_bubble - 1 if simulated.mean_bubble else float(measured > 0)


def _seconds(ranks: list[list[Event]]) -> float:
    events = [event for events in ranks for event in events]
    return max(event.end for event in events) - min(event.start for event in events)
