"""Run one rank of `bench bubble`: step the schedules over sleeping stages, and compare them with the simulation.

Stages sleep for known times, so that a few cores can stand for many ranks that compute at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_train.bench.bubble import BubbleOptions, ScheduleResult
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.messages import Codec, all_gather_values
from hpc_train.parallel.dropout import StepMasks
from hpc_train.parallel.pipeline.measurement import Timeline, TimelineEvent, measure_bubble
from hpc_train.parallel.pipeline.schedule import Pipeline, Schedule
from hpc_train.runtime.start import join, leave_process_group, make_identity_map, start
from hpc_train.schedules.order import Order
from hpc_train.schedules.simulate import ActionTimes, Simulation, simulate_order

_TIMEOUT = timedelta(minutes=5)
Steps = list[list[list[TimelineEvent]]]
"""Events by step and rank."""


class _RunningSchedule:
    """This rank's part of a schedule, ready to run steps."""

    def __init__(self, name: str, order: Order, options: BubbleOptions, world: World) -> None:
        self.name, self.order = name, order
        self.times = make_sleep_times(order, options.milliseconds / 1000, options.costs.get(name))
        self.timeline = Timeline(world.device, enabled=True)
        self._rank, self._micro_batches = world.rank, options.micro_batches
        own_stages = [stage for stage, rank in enumerate(order.placement) if rank == world.rank]
        self._parts = {stage: _make_stage(self.times, stage) for stage in own_stages}
        self._schedule = self._make(world)

    def _make(self, world: World) -> Schedule:
        pipeline = Pipeline(
            name=self.name,
            order=self.order if self.name.endswith(".csv") else None,
            ranks=self.order.placement,
            parts=self._parts,
            group=world.mesh["pp"].get_group(),
            device=world.device,
            timeline=self.timeline,
            masks=StepMasks((), RunConfig(), world),
        )
        inputs = torch.empty(1, FEATURES, device="meta")
        return pipeline.make_training_schedule(
            self._micro_batches, inputs, inputs.clone().requires_grad_(), _compute_loss
        )

    def step(self, sleeps: bool) -> None:
        """Run and record one step on all ranks; without sleep it only opens connections."""
        for part in self._parts.values():
            part.sleeps = sleeps
        batch = torch.zeros(self._micro_batches, FEATURES)
        first, last = self.order.placement[0] == self._rank, self.order.placement[-1] == self._rank
        keywords: dict[str, Any] = {"target": batch} if last else {}
        dist.barrier()
        self._schedule.step(*([batch] if first else []), **keywords, return_outputs=False)
        self.timeline.step += 1

    def events(self) -> Steps:
        """Gather the events of all steps from all ranks. A collective."""
        ranks = all_gather_values(self.timeline.events, codec=Codec((TimelineEvent,)))
        return [[[e for e in events if e.step == step] for events in ranks] for step in range(self.timeline.step)]


def measure_schedules(options: BubbleOptions, orders: dict[str, Order]) -> list[ScheduleResult]:
    """Run every order on all ranks of this job; every rank gets the results."""
    torch.set_num_threads(1)
    task = join(timeout=_TIMEOUT)
    world = start(task, make_identity_map(task), RunConfig(parallel=ParallelConfig(pp=options.ranks)))
    try:
        running = [_RunningSchedule(name, order, options, world) for name, order in orders.items()]
        for number in range(1 + options.rounds):
            for schedule in running:
                schedule.step(sleeps=number > 0)
        return [
            _summarise_schedule(schedule.name, schedule.order, schedule.times, schedule.events()[1:])
            for schedule in running
        ]
    finally:
        leave_process_group()


def _make_stage(times: ActionTimes, stage: int) -> SleepingStage:
    return SleepingStage(times.forward[stage], times.inputs[stage], times.weights[stage])


def _compute_loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).sum()


def _summarise_schedule(name: str, order: Order, times: ActionTimes, steps: Steps) -> ScheduleResult:
    for ranks in steps:
        _check_done(name, order, ranks)
    simulated = simulate_order(order, times)
    shares = np.array([measure_bubble(ranks) for ranks in steps])
    low, median, high = (float(value) for value in np.quantile(shares.mean(axis=1), (0.25, 0.5, 0.75)))
    return ScheduleResult(
        name=name,
        stages=order.stages,
        simulated_bubble=simulated.mean_bubble,
        measured_bubble=median,
        quartiles=(low, high),
        difference=_compute_difference(median, simulated),
        simulated_seconds=simulated.makespan,
        measured_seconds=float(np.median([_step_seconds(ranks) for ranks in steps])),
        simulated_ranks=simulated.bubble,
        measured_ranks=tuple(float(share) for share in np.median(shares, axis=0)),
        live=simulated.live,
    )


def _check_done(name: str, order: Order, ranks: list[list[TimelineEvent]]) -> None:
    """Check that the measured order is the simulated one."""
    for rank, events in enumerate(ranks):
        done = [(event.stage, event.kind, event.micro) for event in events]
        expected = [(action.stage, str(action.kind), action.micro_batch) for action in order.actions(rank)]
        assert done == expected, f"{name}: rank {rank} ran {done}, not {expected}"


def _compute_difference(measured: float, simulated: Simulation) -> float:
    return measured / simulated.mean_bubble - 1 if simulated.mean_bubble else float(measured > 0)


def _step_seconds(ranks: list[list[TimelineEvent]]) -> float:
    events = [event for events in ranks for event in events]
    return max(event.end for event in events) - min(event.start for event in events)


FEATURES = 8


def make_sleep_times(order: Order, seconds: float, costs: Sequence[float] | None = None) -> ActionTimes:
    """Return action times in which F, I and W of all stages of a rank take `seconds` each, as a mean over ranks.

    costs: relative times of the stages; None: all alike. The first stage needs no gradient of its inputs: all of its
    backward is W, as in torch.
    """
    shares = costs or (1.0,) * order.stages
    first, *rest = (seconds * order.ranks * share / sum(shares) for share in shares)
    return ActionTimes((first, *rest), (0.0, *rest), (2 * first, *rest))


class SleepingStage(nn.Module):
    """Maps (rows, FEATURES) to the same shape; sleeps in forward and in the backward of inputs and of weights."""

    def __init__(self, forward: float, inputs: float, weights: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self._seconds = (forward, inputs, weights)
        self.sleeps = True

    def forward(self, x: Tensor) -> Tensor:
        """Add two branches, of inputs and weights: torch can run the backward of each by itself."""
        forward, inputs, weights = self._seconds if self.sleeps else (0.0, 0.0, 0.0)
        return sleep_through(x, forward, inputs) + sleep_through(self.weight, 0.0, weights)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return grads[0].contiguous(), None, None  # the gradient of a sum is expanded, and cannot be sent as it is


def set_realtime_priority() -> bool:
    """Give this process and its threads real-time priority, so that other load does not delay their waking.

    Returns False if that is not permitted (it needs CAP_SYS_NICE).
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


def sleep_through(x: Tensor, forward: float, backward: float) -> Tensor:
    """Return a copy of x after sleeping `forward` seconds; its gradient sleeps `backward` seconds."""
    out: Tensor = _Sleep.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out
