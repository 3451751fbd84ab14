"""Candidate: one way to run a model, with its estimated memory, step time, speed and cost.

Candidates are compared by ranking.py and described by candidate_text.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from hpc_train.config.run import RunConfig
from hpc_train.models.counts import count_parameters
from hpc_train.planner import batch_laws
from hpc_train.planner.evidence import handicap, unmeasured_techniques
from hpc_train.planner.model.inputs import Column
from hpc_train.planner.model.jobs import Jobs, job_columns, take_single
from hpc_train.planner.model.memory import FITS, Memory
from hpc_train.planner.model.step_time import Estimate, StepTime
from hpc_train.planner.reliability.failure_rate import Percentiles
from hpc_train.planner.reliability.projection import (
    AssumedFailureRate,
    ProjectedJob,
    Projection,
    count_planned_steps,
    project_run,
)
from hpc_train.planner.search.top_candidates import layout_complexity
from hpc_train.planner.settings import Settings

STAGES = ("first", "middle", "last")
MEMORY_PARTS = tuple(
    field.name for field in fields(Memory) if field.name not in ("capacity", "host", "margin", "headroom")
)
TIME_PARTS = tuple(field.name for field in fields(StepTime) if field.name not in ("spread", "hardware_flops"))


@dataclass(frozen=True)
class Candidate:
    """One way to run a model. Figures are per rank and step; None if the accelerator's speed or memory is unknown."""

    config: RunConfig
    settings: Settings
    """Settings that the planner chose; `config` has them already."""
    ranks: int
    nodes: int
    fits: str
    """yes, maybe or no; unknown if the device's memory is unknown."""
    memory: dict[str, tuple[float, float, float]]
    """Bytes by part, each for the first stage, a middle one and the last."""
    capacity: float | None
    """Memory of the device, in bytes."""
    step: Percentiles | None
    parts: dict[str, float] | None
    """Seconds by part of the step; they add up to the median of `step`."""
    mfu: float | None
    hfu: float | None
    tokens_per_second: float | None
    """Per GPU, at the median step time."""
    projection: Projection | None
    """Duration, cost and goodput of the whole run."""
    complexity: float = 0.0
    """Points of layout_complexity: fewer is simpler."""
    unmeasured: tuple[str, ...] = ()
    """Techniques in use that fewer than evidence.NEEDED_RUNS measured runs had."""
    handicap: float = 1.0
    """Factor on its objective when it is compared with others (evidence.handicap)."""

    @property
    def stages(self) -> tuple[float, ...]:
        """Total bytes on each of STAGES."""
        return tuple(sum(part[number] for part in self.memory.values()) for number in range(len(STAGES)))

    @property
    def total(self) -> float:
        """Total bytes on the stage that needs most."""
        return max(self.stages)

    @property
    def global_batch(self) -> int:
        return self.config.train.global_batch

    @property
    def tokens(self) -> float:
        """Tokens in a step."""
        return float(self.global_batch * self.config.train.sequence_length)

    def objective_value(self, objective: str) -> float:
        """Return the value to minimise, comparable between worlds and batches; infinite if the speed is unknown."""
        if self.step is None or self.projection is None:
            return float("inf")
        market = self.projection.demand
        seconds = market.days.p50 if market.days else self.step.p50 / self.tokens
        if objective == "cost":
            return market.money.p50 if market.money else seconds * self.ranks
        if objective == "loss":
            return batch_laws.time_to_loss(seconds, self.tokens, self.critical_batch)
        return seconds

    def compared_value(self, objective: str) -> float:
        """Return the objective as it is compared: with the handicap of techniques that no measured run had."""
        return self.objective_value(objective) * self.handicap

    @property
    def critical_batch(self) -> float:
        """Return the tokens of a step beyond which a larger batch costs more than it gains."""
        plan = self.config.plan
        steps = count_planned_steps(self.config, self.tokens)
        trained = plan.tokens or (steps * self.tokens if steps else self.tokens)
        return plan.critical_batch_tokens or batch_laws.critical_batch(trained)


@dataclass(frozen=True)
class KnownFigures:
    """Which figures of the accelerator the cluster's description has."""

    speed: bool
    memory: bool


def make_candidate(
    config: RunConfig,
    settings: Settings,
    jobs: Jobs,
    estimated: Estimate,
    figures: KnownFigures,
    rate: AssumedFailureRate | None,
    unmeasured: frozenset[str],
) -> Candidate:
    """Build a candidate from the estimate of one job.

    config: the run with `settings` applied. jobs, estimated: one row each. unmeasured: techniques that too few measured
    runs had.
    """
    memory = {name: _split_by_stage(getattr(estimated.memory, name)) for name in MEMORY_PARTS}
    job, columns = make_projected_job(config, jobs, estimated.time), job_columns(jobs)
    return Candidate(
        config=config,
        settings=settings,
        ranks=job.ranks,
        nodes=job.nodes,
        fits=FITS[round(take_single(estimated.memory.fits))] if figures.memory else "unknown",
        memory=memory,
        capacity=take_single(estimated.memory.capacity) if figures.memory else None,
        step=_make_step_percentiles(estimated.time) if figures.speed else None,
        parts={name: take_single(getattr(estimated.time, name)) for name in TIME_PARTS} if figures.speed else None,
        mfu=take_single(estimated.mfu) if figures.speed else None,
        hfu=take_single(estimated.hfu) if figures.speed else None,
        tokens_per_second=take_single(estimated.tokens_per_second) if figures.speed else None,
        projection=project_run(config, job, rate) if figures.speed else None,
        complexity=_compute_complexity(config, jobs),
        unmeasured=unmeasured_techniques(columns, unmeasured),
        handicap=take_single(handicap(columns, unmeasured, estimated.time.spread)),
    )


def _compute_complexity(config: RunConfig, jobs: Jobs) -> float:
    columns = {name: np.atleast_1d(column) for name, column in job_columns(jobs).items()}
    every = np.atleast_1d(np.float64(config.parallel.recompute.every))
    return take_single(layout_complexity({**columns, "recompute_every": every}))


def make_projected_job(config: RunConfig, jobs: Jobs, time: StepTime) -> ProjectedJob:
    """Describe one job to the projection: its size, and its step without saves, whose cost the projection adds."""
    ranks = round(take_single(jobs.world))
    nodes = max(1, -(-ranks // round(take_single(jobs.gpus_per_node))))
    share = 1 - take_single(time.checkpoint) / take_single(time.step)
    step = _make_step_percentiles(time).through(lambda seconds: seconds * share)
    return ProjectedJob(
        ranks, nodes, step, take_single(jobs.tokens), count_parameters(config.model) or take_single(jobs.parameters)
    )


def _make_step_percentiles(time: StepTime) -> Percentiles:
    return Percentiles(*(take_single(time.quantile(p)) for p in (0.1, 0.5, 0.9)))


def _split_by_stage(part: Column) -> tuple[float, float, float]:
    first, middle, last = np.asarray(part, np.float64).reshape(len(STAGES), -1)[:, 0].tolist()
    return first, middle, last
