"""Candidate: one way of running a model, with all that is estimated of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from hpc_train.config.run import RunConfig
from hpc_train.models.shape import parameter_count
from hpc_train.planner import batch as batches
from hpc_train.planner.band import Band
from hpc_train.planner.estimate import FITS, Estimate, Memory, Time
from hpc_train.planner.jobs import Column, Jobs, columns_of
from hpc_train.planner.kept import ALIKE
from hpc_train.planner.outlook import Job, Outlook, Rate, outlook, steps_of
from hpc_train.planner.settings import Settings
from hpc_train.planner.simplicity import complexity

GIB = float(1 << 30)
STAGES = ("first", "middle", "last")
MEMORY_PARTS = tuple(it.name for it in fields(Memory) if it.name not in ("capacity", "host", "margin", "headroom"))
TIME_PARTS = tuple(it.name for it in fields(Time) if it.name not in ("spread", "hardware_flops"))


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
    step: Band | None
    parts: dict[str, float] | None
    """Part of the step -> seconds; they add up to the middle of `step`."""
    mfu: float | None
    hfu: float | None
    tokens_per_second: float | None
    """Of a GPU, at the middle."""
    outlook: Outlook | None
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
        steps = steps_of(self.config, self.tokens)
        trained = plan.tokens or (steps * self.tokens if steps else self.tokens)
        return plan.critical_batch_tokens or batches.critical_batch(trained)


@dataclass(frozen=True)
class Known:
    """What is known of the device."""

    speed: bool
    memory: bool


def candidate(
    config: RunConfig, settings: Settings, jobs: Jobs, estimated: Estimate, known: Known, rate: Rate | None
) -> Candidate:
    """From one job. config: with the settings in it."""
    memory = {name: _three(getattr(estimated.memory, name)) for name in MEMORY_PARTS}
    ranks = round(_one(jobs.world))
    nodes = max(1, -(-ranks // round(_one(jobs.gpus_per_node))))
    step = _band(estimated.time) if known.speed else None
    return Candidate(
        config=config,
        settings=settings,
        ranks=ranks,
        nodes=nodes,
        fits=FITS[round(_one(estimated.memory.fits))] if known.memory else "unknown",
        memory=memory,
        capacity=_one(estimated.memory.capacity) if known.memory else None,
        step=step,
        parts={name: _one(getattr(estimated.time, name)) for name in TIME_PARTS} if known.speed else None,
        mfu=_one(estimated.mfu) if known.speed else None,
        hfu=_one(estimated.hfu) if known.speed else None,
        tokens_per_second=_one(estimated.tokens_per_second) if known.speed else None,
        outlook=_outlook(config, jobs, ranks, nodes, _unsaved(estimated.time), rate) if known.speed else None,
        complexity=_complexity(config, jobs),
    )


def _complexity(config: RunConfig, jobs: Jobs) -> float:
    own = {name: np.atleast_1d(it) for name, it in columns_of(jobs).items()}
    every = np.atleast_1d(np.float64(config.parallel.recompute.every))
    return _one(complexity({**own, "recompute_every": every}))


def _outlook(config: RunConfig, jobs: Jobs, ranks: int, nodes: int, step: Band, rate: Rate | None) -> Outlook:
    parameters = parameter_count(config.model) or _one(jobs.parameters)
    return outlook(config, Job(ranks, nodes, step, _one(jobs.tokens), parameters), rate)


def _unsaved(time: Time) -> Band:
    """Without what saving takes of a step: an outlook adds that itself."""
    share = 1 - _one(time.checkpoint) / _one(time.step)
    return _band(time).through(lambda it: it * share)


def _band(time: Time) -> Band:
    return Band(*(_one(time.quantile(p)) for p in (0.1, 0.5, 0.9)))


def _one(column: Column | float) -> float:
    values = np.asarray(column, np.float64)
    assert values.size == 1
    return float(values.reshape(-1)[0])


def _three(part: Column) -> tuple[float, float, float]:
    first, middle, last = np.asarray(part, np.float64).reshape(len(STAGES), -1)[:, 0].tolist()
    return first, middle, last


_SURE = {"yes": 0, "unknown": 0, "maybe": 1, "no": 2}


def ordered(candidates: Iterable[Candidate], objective: str) -> list[Candidate]:
    """Sort, best first: those that surely fit, then those that may; candidates equal to the best by simplicity."""
    found = sorted(candidates, key=lambda it: (_SURE[it.fits], it.worth(objective)))
    if not found:
        return found
    alike = [it for it in found if equal(found[0], it, objective)]
    alike.sort(key=lambda it: (it.complexity, it.worth(objective)))
    same = set(map(id, alike))
    return alike + [it for it in found if id(it) not in same]


def first(ordered: Sequence[Candidate], objective: str) -> Candidate | None:
    """Return the smallest objective among candidates with the best's world and as sure to fit."""
    if not ordered:
        return None
    best = ordered[0]
    same = [it for it in ordered if (it.ranks, it.global_batch, it.fits) == (best.ranks, best.global_batch, best.fits)]
    return min(same, key=lambda it: it.worth(objective))


def equal(quickest: Candidate, it: Candidate, objective: str) -> bool:
    """Whether a candidate is within ALIKE of the quickest one with the same ranks and batch."""
    same = (it.ranks, it.global_batch, _SURE[it.fits]) == (
        quickest.ranks,
        quickest.global_batch,
        _SURE[quickest.fits],
    )
    return it is quickest or (
        same and it.step is not None and it.worth(objective) <= quickest.worth(objective) * (1 + ALIKE)
    )
