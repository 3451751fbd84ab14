"""From a run to what lints need of the planner's own estimate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hpc_train.config.run import RunConfig
from hpc_train.models.shape import parameter_count
from hpc_train.planner.advice.facts import Figures
from hpc_train.planner.band import Band
from hpc_train.planner.constants import Constants
from hpc_train.planner.estimate import Time, estimate
from hpc_train.planner.from_config import assumptions, jobs_of
from hpc_train.planner.jobs import OFFLOAD, RECOMPUTE, Column, Jobs, with_columns
from hpc_train.planner.memory import memory
from hpc_train.planner.outlook import Job, Rate


def figures_of(config: RunConfig, world: int, constants: Constants, rate: Rate | None = None) -> Figures:
    """Of a run on so many ranks; rate: of outlook.rate_of, where it is there already.

    What rests on a figure of the machine that is not known is left out. Raises UserError as `jobs_of` does.
    """
    jobs, missing = jobs_of(config, world), assumptions(config.cluster, config.precision.name)
    figures = Figures(rate=rate)
    if not any("memory_gib" in line for line in missing):
        figures = replace(
            figures,
            memory_without_recompute=_memory(jobs, constants, "recompute", RECOMPUTE.index("none")),
            memory_without_offload=_memory(jobs, constants, "offload", OFFLOAD.index("none")),
            memory_margin=_one(memory(jobs, constants).margin),
        )
    if missing:
        return figures
    found = estimate(jobs, constants)
    nodes = max(1, -(-world // round(_one(jobs.gpus_per_node))))
    parameters = parameter_count(config.model) or _one(jobs.parameters)
    job = Job(world, nodes, _step(found.time), _one(jobs.tokens), parameters)
    return replace(figures, job=job, bubble=_one(found.time.bubble / found.time.step))


def _memory(jobs: Jobs, constants: Constants, name: str, off: int) -> float | None:
    """Bytes of the rank that needs most with a technique off; None where it is off already."""
    if _one(getattr(jobs, name)) == off:
        return None
    return _one(memory(with_columns(jobs, **{name: off}), constants).total)


def _step(time: Time) -> Band:
    """Without the part of a step that saving takes: an outlook adds that."""
    share = _one(1 - time.checkpoint / time.step)
    return Band(*(_one(time.quantile(p)) * share for p in (0.1, 0.5, 0.9)))


def _one(value: Column | float) -> float:
    return float(np.asarray(value, np.float64).reshape(-1)[0])
