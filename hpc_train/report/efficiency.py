"""Split the time of a step into useful work and losses, and name each loss.

The useful time C of a rank is its own forward, backward, norm and update, without what blocked it. T is the time from
one step to the next, evaluations left out. What lies between mean C and T is lost, and is taken off in this order:

    checkpoint      T minus the stall of saves
    input           minus the longest mean wait for data of any rank: the others wait for that rank
    bubble          minus what the schedule of the pipeline leaves idle, simulated with the measured times of the stages
    load balance    minus max C - mean C
    transfer        minus the time in which collectives blocked every rank, the last to arrive too: the shortest
                    blocking among the ranks, by collective
    serialisation   the rest: ranks that are late in turn, records, the interpreter between the parts

Each efficiency is (time left after) / (time left before); their product is mean C / T (POP Centre of Excellence uses
the same kind of product for MPI codes).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hpc_train.report.step_table import Array, StepTable
from hpc_train.schedules.order import Order
from hpc_train.schedules.simulate import ActionTimes, simulate_order

LOSSES = ("checkpoint", "input", "bubble", "load_balance", "transfer", "serialisation")


@dataclass(frozen=True)
class Pipeline:
    """The schedule of a pipeline, and what each of its stages should take."""

    order: Order
    stage_of_rank: tuple[int, ...]
    """The pp rank of each rank of the table."""
    costs: tuple[float, ...]
    """Relative time of what each pp rank computes, from FLOPs."""
    micro_batches: int


@dataclass(frozen=True)
class StepLosses:
    """Where the time of a step goes, in seconds; means over steps and ranks."""

    total: float
    """Length of a step, T."""
    useful: float
    """Mean computation of the ranks, C."""
    losses: dict[str, float]
    """Seconds by name of LOSSES; they add up to T - C."""
    work: Array
    """Mean computation of each rank."""
    data: Array
    """Mean wait for data of each rank."""
    bubble_share: float | None
    """Share of the simulated pipeline that is idle; None without a pipeline."""

    @property
    def efficiencies(self) -> dict[str, float]:
        """Return the factors, whose product is mean C / T."""
        remaining = [self.total]
        for name in LOSSES:
            remaining.append(remaining[-1] - self.losses[name])
        return {
            name: after / before if before > 0 else 1.0
            for name, (before, after) in zip(LOSSES, pairwise(remaining), strict=True)
        }

    def compute_share(self, name: str) -> float:
        """Return a loss as a share of T."""
        return self.losses[name] / self.total if self.total > 0 else 0.0


def measure_work(table: StepTable) -> Array:
    """Return C of each rank and bin, in seconds per step."""
    parts = table["forward"] + table["backward"] + table["clip"] + table["update"]
    blocked = table["blocked_forward"] + table["blocked_backward"] + table["blocked_clip"]
    return np.asarray(np.maximum(parts - blocked, 0.0))


def measure_blocked(table: StepTable) -> Array:
    """Return the time in which collectives blocked each rank, by bin, in seconds per step."""
    return np.asarray(sum(table[f"blocked_{name}"] for name in ("forward", "backward", "clip", "rest")))


def measure_unblocked_time(table: StepTable) -> Array:
    """Return the seconds per step that each rank spent on its own account, by bin.

    That is a step without waits for data, saves, evaluations and collectives: C, and what lies between the parts of a
    step, such as a hook or a slow line of output.
    """
    waits = table["data"] + table["save"] + np.nan_to_num(table["evaluate"]) + measure_blocked(table)
    return np.asarray(np.maximum(table["total"] - waits, 0.0))


def measure_lateness(table: StepTable) -> Array:
    """Return the seconds by which each rank takes longer in a bin than it usually does, beyond what most ranks do.

    The lower quartile of a rank is what it usually takes, so that one that is slow in half of the steps is late in
    them. A rank that is always slow is never late.
    """
    seconds = measure_unblocked_time(table)
    late = seconds - np.nanquantile(seconds, 0.25, axis=1, keepdims=True)
    return np.asarray(late - np.nanquantile(late, 0.5, axis=0, method="lower"))


def split_step(table: StepTable, pipeline: Pipeline | None = None) -> StepLosses | None:
    """Split the mean step; None if the parts of steps were not measured, as on a GPU."""
    work = measure_work(table)
    # Steps that some rank lacks, at the end of a file or after a kill, would count one side of a wait only.
    complete = np.asarray(np.isfinite(work).all(axis=0))
    if not complete.any():
        return None
    work = work[:, complete]
    weights = table["steps"][0, complete]  # a bin of many steps counts for as many

    def mean(values: Array) -> Array:
        return np.asarray(
            np.average(
                values[..., complete] if values.shape[-1] != work.shape[-1] else values, axis=-1, weights=weights
            )
        )

    total = float(mean(table["total"] - np.nan_to_num(table["evaluate"])).mean())
    by_rank, data = mean(work), mean(table["data"])
    useful = float(by_rank.mean())
    remaining, losses = total - useful, dict.fromkeys(LOSSES, 0.0)

    def take(name: str, seconds: float) -> None:
        nonlocal remaining
        # Losses are measured one by one and may overlap: none takes more than is left, so that all of them add up to T.
        losses[name] = min(max(seconds, 0.0), remaining)
        remaining -= losses[name]

    take("checkpoint", float(mean(table["save"]).mean()))
    take("input", float(data.max()))
    bubble_share = None
    if pipeline is not None:
        idle, bubble_share = simulate_bubble(by_rank, pipeline)
        take("bubble", idle)
    take("load_balance", float(by_rank.max()) - useful)
    take("transfer", float(mean(_find_transfer(table, complete, pipeline)[None])[0]))
    take("serialisation", remaining)
    return StepLosses(total, useful, losses, by_rank, data, bubble_share)


def _find_transfer(table: StepTable, complete: NDArray[np.bool_], pipeline: Pipeline | None) -> Array:
    """Return the seconds per step in which collectives blocked all ranks alike, by bin.

    Stages run different collectives, so that with a pipeline only ranks of one stage are compared. What the schedule
    leaves idle is no transfer, nor what they wait for a rank of another stage that is late.
    """
    waits = table.waits[:, complete]
    if pipeline is None:
        # The last rank to arrive waits for nobody, so what even it waits is the transfer itself.
        return np.asarray(waits.min(axis=0).sum(axis=-1))
    stages = np.asarray(pipeline.stage_of_rank)
    work = measure_work(table)[:, complete].mean(axis=1)
    simulated = simulate_order(pipeline.order, time_stages(work, pipeline))
    late = np.maximum(np.nan_to_num(measure_lateness(table)[:, complete]), 0.0)
    behind = late.max(axis=0) - late  # how far each rank is behind the latest one
    exposed = [
        waits[stages == stage].min(axis=0).sum(axis=-1)
        - behind[stages == stage].min(axis=0)
        - (simulated.makespan - simulated.busy[stage])
        for stage in sorted(set(pipeline.stage_of_rank))
    ]
    return np.asarray(np.mean(exposed, axis=0))


def time_stages(work: Array, pipeline: Pipeline) -> ActionTimes:
    """Return the time of each computation. work: C of each rank.

    A stage takes as long as its median rank, so that a straggler is no bubble, and backward twice as long as forward:
    half of it for inputs and half for weights, but on the first stage, which needs no gradient of its inputs.
    """
    busy = find_stage_work(work, pipeline)
    placement = pipeline.order.placement
    first, *later_stages = (busy[rank] / placement.count(rank) / pipeline.micro_batches / 3 for rank in placement)
    return ActionTimes((first, *later_stages), (0.0, *later_stages), (2 * first, *later_stages))


def find_stage_work(work: Array, pipeline: Pipeline) -> list[float]:
    """Return C of the median rank of each stage."""
    stages = np.asarray(pipeline.stage_of_rank)
    return [float(np.median(work[stages == stage])) for stage in sorted(set(pipeline.stage_of_rank))]


def simulate_bubble(work: Array, pipeline: Pipeline) -> tuple[float, float]:
    """Return what the schedule leaves idle on the busiest rank (seconds), and the idle share of all ranks."""
    simulated = simulate_order(pipeline.order, time_stages(work, pipeline))
    return max(0.0, simulated.makespan - max(simulated.busy)), simulated.mean_bubble
