"""Candidate: one way of running a model, and all that is estimated of it; how candidates are ranked and described.

Ranking: those that surely fit come first, then those that may; of candidates equal within the tolerance the simplest is
best. plan.budget and plan.deadline_days leave out what costs or takes too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import PlanConfig, RunConfig
from hpc_train.models.shape import count_parameters
from hpc_train.planner.model import batch_laws as batches
from hpc_train.planner.model.jobs import Column, Jobs, job_columns
from hpc_train.planner.model.memory import FITS, Memory
from hpc_train.planner.model.step_time import Estimate, StepTime
from hpc_train.planner.reliability.failure_rate import Percentiles
from hpc_train.planner.reliability.projection import (
    AssumedFailureRate,
    ProjectedJob,
    Projection,
    planned_steps,
    project_run,
)
from hpc_train.planner.search.top_candidates import EQUAL_TIME_TOLERANCE, layout_complexity
from hpc_train.planner.settings import Settings

STAGES = ("first", "middle", "last")
MEMORY_PARTS = tuple(it.name for it in fields(Memory) if it.name not in ("capacity", "host", "margin", "headroom"))
TIME_PARTS = tuple(it.name for it in fields(StepTime) if it.name not in ("spread", "hardware_flops"))


@dataclass(frozen=True)
class Candidate:
    """Numbers are those of one step, of one rank; None: not known, because the accelerator is not."""

    config: RunConfig
    settings: Settings
    """What differs from the configuration: keys and values."""
    ranks: int
    nodes: int
    fits: str
    """yes, maybe or no; unknown where the device's memory is."""
    memory: dict[str, tuple[float, float, float]]
    """Part -> bytes on a rank of the first stage, a middle one and the last."""
    capacity: float | None
    step: Percentiles | None
    parts: dict[str, float] | None
    """Part of the step -> seconds; they add up to the middle of `step`."""
    mfu: float | None
    hfu: float | None
    tokens_per_second: float | None
    """Of a GPU, at the middle."""
    outlook: Projection | None
    complexity: float = 0.0
    """Points of planner.simplicity: fewer is simpler."""

    @property
    def stages(self) -> tuple[float, ...]:
        """Bytes of each of STAGES."""
        return tuple(sum(part[number] for part in self.memory.values()) for number in range(len(STAGES)))

    @property
    def total(self) -> float:
        """Bytes of the stage that needs most."""
        return max(self.stages)

    @property
    def global_batch(self) -> int:
        return self.config.train.global_batch

    @property
    def tokens(self) -> float:
        """Of a step."""
        return float(self.global_batch * self.config.train.sequence_length)

    def worth(self, objective: str) -> float:
        """What a candidate has least of that is best: comparable between worlds and batches; infinite if not known."""
        if self.step is None or self.outlook is None:
            return float("inf")
        market = self.outlook.demand
        seconds = market.days.p50 if market.days else self.step.p50 / self.tokens
        if objective == "cost":
            return market.money.p50 if market.money else seconds * self.ranks
        if objective == "loss":
            return batches.time_to_loss(seconds, self.tokens, self.critical_batch)
        return seconds

    @property
    def critical_batch(self) -> float:
        """Tokens of the batch beyond which a larger one costs more than it gains."""
        plan = self.config.plan
        steps = planned_steps(self.config, self.tokens)
        trained = plan.tokens or (steps * self.tokens if steps else self.tokens)
        return plan.critical_batch_tokens or batches.critical_batch(trained)


@dataclass(frozen=True)
class KnownFigures:
    """What is known of the device."""

    speed: bool
    memory: bool


def make_candidate(
    config: RunConfig,
    settings: Settings,
    jobs: Jobs,
    estimated: Estimate,
    known: KnownFigures,
    rate: AssumedFailureRate | None,
) -> Candidate:
    """From one job. config: with the settings in it."""
    memory = {name: _per_stage(getattr(estimated.memory, name)) for name in MEMORY_PARTS}
    ranks = round(_single_value(jobs.world))
    nodes = max(1, -(-ranks // round(_single_value(jobs.gpus_per_node))))
    step = _step_percentiles(estimated.time) if known.speed else None
    return Candidate(
        config=config,
        settings=settings,
        ranks=ranks,
        nodes=nodes,
        fits=FITS[round(_single_value(estimated.memory.fits))] if known.memory else "unknown",
        memory=memory,
        capacity=_single_value(estimated.memory.capacity) if known.memory else None,
        step=step,
        parts={name: _single_value(getattr(estimated.time, name)) for name in TIME_PARTS} if known.speed else None,
        mfu=_single_value(estimated.mfu) if known.speed else None,
        hfu=_single_value(estimated.hfu) if known.speed else None,
        tokens_per_second=_single_value(estimated.tokens_per_second) if known.speed else None,
        outlook=_project(config, jobs, ranks, nodes, _without_saves(estimated.time), rate) if known.speed else None,
        complexity=_complexity(config, jobs),
    )


def _complexity(config: RunConfig, jobs: Jobs) -> float:
    own = {name: np.atleast_1d(it) for name, it in job_columns(jobs).items()}
    every = np.atleast_1d(np.float64(config.parallel.recompute.every))
    return _single_value(layout_complexity({**own, "recompute_every": every}))


def _project(
    config: RunConfig, jobs: Jobs, ranks: int, nodes: int, step: Percentiles, rate: AssumedFailureRate | None
) -> Projection:
    parameters = count_parameters(config.model) or _single_value(jobs.parameters)
    return project_run(config, ProjectedJob(ranks, nodes, step, _single_value(jobs.tokens), parameters), rate)


def _without_saves(time: StepTime) -> Percentiles:
    """Without what saving takes of a step: an outlook adds that itself."""
    share = 1 - _single_value(time.checkpoint) / _single_value(time.step)
    return _step_percentiles(time).through(lambda it: it * share)


def _step_percentiles(time: StepTime) -> Percentiles:
    return Percentiles(*(_single_value(time.quantile(p)) for p in (0.1, 0.5, 0.9)))


def _single_value(column: Column | float) -> float:
    values = np.asarray(column, np.float64)
    assert values.size == 1
    return float(values.reshape(-1)[0])


def _per_stage(part: Column) -> tuple[float, float, float]:
    first, middle, last = np.asarray(part, np.float64).reshape(len(STAGES), -1)[:, 0].tolist()
    return first, middle, last


_FIT_ORDER = {"yes": 0, "unknown": 0, "maybe": 1, "no": 2}


def rank_candidates(candidates: Iterable[Candidate], objective: str) -> list[Candidate]:
    """Sort, best first: those that surely fit, then those that may; candidates equal to the best by simplicity."""
    found = sorted(candidates, key=lambda it: (_FIT_ORDER[it.fits], it.worth(objective)))
    if not found:
        return found
    alike = [it for it in found if is_equally_quick(found[0], it, objective)]
    alike.sort(key=lambda it: (it.complexity, it.worth(objective)))
    same = set(map(id, alike))
    return alike + [it for it in found if id(it) not in same]


def find_quickest(ordered: Sequence[Candidate], objective: str) -> Candidate | None:
    """Return the smallest objective among candidates with the best's world and as sure to fit."""
    if not ordered:
        return None
    best = ordered[0]
    same = [it for it in ordered if (it.ranks, it.global_batch, it.fits) == (best.ranks, best.global_batch, best.fits)]
    return min(same, key=lambda it: it.worth(objective))


def is_equally_quick(quickest: Candidate, it: Candidate, objective: str) -> bool:
    """Whether a candidate is within ALIKE of the quickest one with the same ranks and batch."""
    same = (it.ranks, it.global_batch, _FIT_ORDER[it.fits]) == (
        quickest.ranks,
        quickest.global_batch,
        _FIT_ORDER[quickest.fits],
    )
    return it is quickest or (
        same and it.step is not None and it.worth(objective) <= quickest.worth(objective) * (1 + EQUAL_TIME_TOLERANCE)
    )


def is_within_limits(it: Candidate) -> bool:
    """Whether a candidate keeps to both, as far as it is known what it costs and takes."""
    return it.outlook is None or not (it.outlook.late or it.outlook.over_budget)


def is_within_deadline(it: Candidate) -> bool:
    return it.outlook is None or not it.outlook.late


def quickest_seconds_per_token(candidates: Sequence[Candidate]) -> float:
    """Seconds a token of the quickest; infinite where no speed is known."""
    return min((it.step.p50 / it.tokens for it in candidates if it.step), default=float("inf"))


def explain_no_candidate(plan: PlanConfig, candidates: Sequence[Candidate]) -> str:
    """Why nothing is left of some candidates, in one line: the cheapest and the quickest of them."""
    limits = {"plan.budget": plan.budget, "plan.deadline_days": plan.deadline_days}
    asked = " and ".join(f"{name}={value:g}" for name, value in limits.items() if value is not None)
    cheapest, quickest = min(candidates, key=_money), min(candidates, key=_days)
    told = [f"the quickest takes {_days(quickest):.3g} days ({quickest.ranks:,} ranks)"]
    if _money(cheapest) < float("inf"):
        told = [f"the cheapest costs {_money(cheapest):,.4g} ({cheapest.ranks:,} ranks)", *told]
    return f"{asked}: nothing that fits keeps to it: {', '.join(told)}"


def _money(it: Candidate) -> float:
    """Of the cheapest way that is priced; infinite: none is."""
    markets = () if it.outlook is None else (it.outlook.demand, it.outlook.spot)
    return min((market.money.p50 for market in markets if market and market.money), default=float("inf"))


def _days(it: Candidate) -> float:
    return it.outlook.demand.days.p50 if it.outlook and it.outlook.demand.days else float("inf")


PART_WORDS = {
    "tensor": "tp, exposed",
    "context": "cp, exposed",
    "data": "dp, exposed",
    "pipeline": "pp, exposed",
    "launch": "kernel launches",
    "checkpoint": "checkpoint stalls",
    "offload": "activations to host",
}
"""Labels for parts of a step whose field name in estimate.Time is unclear."""
_WHOLE = 1e3
"""From here on no digits after the point, and none as a power of ten."""


def describe_layout(it: Candidate) -> str:
    """`zero3, dp_replicate 2 x dp_shard 8 x tp 4`: the strategy, and the degrees above 1."""
    degrees = resolve_degrees(it.config.parallel, it.ranks)
    sizes = {name: getattr(degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{it.config.parallel.strategy}{', ' if mesh else ''}{mesh}"


def describe_techniques(it: Candidate) -> str:
    """What else is on: schedule, recomputation, offload; empty: nothing."""
    parallel = it.config.parallel
    degrees = resolve_degrees(parallel, it.ranks)
    words = []
    if degrees.pp > 1:
        virtual = parallel.pipeline.virtual_stages
        words.append(f"{parallel.pipeline.schedule}{f' v{virtual}' if virtual and virtual > 1 else ''}")
    if degrees.tp > 1 and not parallel.tensor.sequence:
        words.append("no sp")
    if degrees.tp > 1 and parallel.tensor.asynchronous:
        words.append("async tp")
    if parallel.recompute.mode != "none":
        every = parallel.recompute.every
        words.append(f"recompute {parallel.recompute.mode}{f' every {every}' if every > 1 else ''}")
    if degrees.cp > 1 and parallel.context.method != "ring":
        words.append(parallel.context.method)
    if parallel.recompute.offload:
        words.append("offload activations")
    if not parallel.reshard_after_forward:
        words.append("no reshard")
    words += [f"offload {name}" for name in ("optimizer", "parameters") if getattr(parallel.offload, name) != "none"]
    return ", ".join(words)


def format_range(band: Percentiles, digits: str = ".3g") -> str:
    """p10 - p90."""
    return " - ".join(f"{it:,.0f}" if it >= _WHOLE else f"{it:{digits}}" for it in (band.p10, band.p90))
