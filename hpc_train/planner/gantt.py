"""Which rank of a pipeline does what when: the schedule of a candidate, simulated with its times."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.degrees import resolve
from hpc_train.parallel.support.pipeline import from_file, micro_batches, read
from hpc_train.planner.candidate import Candidate
from hpc_train.schedules.generate import orders
from hpc_train.schedules.requirements import REQUIREMENTS, Requirements
from hpc_train.schedules.simulate import Simulation, Times, simulate

MOST = 2
"""Micro-batches a rank that are drawn; a step that has more goes on in the same way in between."""
_WORK = ("compute", "launch", "tensor", "context")


@dataclass(frozen=True)
class Gantt:
    """What is drawn."""

    simulation: Simulation
    drawn: int
    """Micro-batches."""
    of: int
    """Those of a step."""


def gantt(it: Candidate) -> Gantt | None:
    """None without a pipeline, and where no time is known.

    Forward, backward for inputs and for weights take a third each of what a rank does for a micro-batch, evenly over
    its stages.
    """
    degrees = resolve(it.config.parallel, it.ranks)
    if degrees.pp == 1 or it.parts is None:
        return None
    pipeline, count = it.config.parallel.pipeline, micro_batches(it.config, degrees)
    seconds = sum(it.parts[name] for name in _WORK) / count
    if from_file(pipeline):
        order = read(pipeline)
        return Gantt(simulate(order, _times(order.stages, degrees.pp, seconds)), count, count)
    needs = REQUIREMENTS[pipeline.schedule]
    drawn = _drawn(needs, degrees.pp, count)
    order = orders(pipeline.schedule, degrees.pp, drawn, pipeline.virtual_stages or needs.virtual_stages)
    return Gantt(simulate(order, _times(order.stages, degrees.pp, seconds)), drawn, count)


def _drawn(needs: Requirements, pp: int, count: int) -> int:
    """Few enough to see, and as many as the schedule can do."""
    most = max(MOST, needs.micro_batches_per_rank) * pp
    return count if count <= most else most


def _times(stages: int, pp: int, seconds: float) -> Times:
    each = seconds / 3 * pp / stages
    return Times.even(stages, each, each, each)
