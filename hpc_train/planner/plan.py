"""make_plan: the candidates for a request, the best first.

The way of a plan: request.py says what is open; search/ finds the best meshes without estimating most of them; each of
these becomes a run again (settings.py) and is estimated with the real switches (model/), with failures, saves and
prices (reliability/); candidate.py ranks them; advice/ lints the best; output/ prints it all.
"""

from __future__ import annotations

import time as clock
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from hpc_train.config.model import CustomModelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.parallel.rules.check import check_support
from hpc_train.placement.fabric_from_config import count_ranks_per_node
from hpc_train.planner import constants
from hpc_train.planner.advice.facts import Advice, estimate_for_advice
from hpc_train.planner.advice.lints import run_lints
from hpc_train.planner.candidate import (
    Candidate,
    KnownFigures,
    explain_no_candidate,
    find_quickest,
    is_equally_quick,
    is_within_deadline,
    is_within_limits,
    make_candidate,
    quickest_seconds_per_token,
    rank_candidates,
)
from hpc_train.planner.constants import Constants, residual_factor, without_residuals
from hpc_train.planner.model.fabric import estimate_placed, first_nodes
from hpc_train.planner.model.from_config import jobs_from_config, list_assumptions
from hpc_train.planner.model.step_time import estimate_jobs
from hpc_train.planner.reliability.projection import AssumedFailureRate, choose_failure_rate
from hpc_train.planner.request import PlanRequest
from hpc_train.planner.search.baseline_layouts import (
    FamiliarLayout,
    explain_why_not_best,
    fallback_settings,
    familiar_kinds,
    find_best_variant,
    restrict_space,
)
from hpc_train.planner.search.search import SearchBase, SearchResult, search_space
from hpc_train.planner.search.space import FixedColumns, SearchSpace, degree_limits
from hpc_train.planner.search.top_candidates import RatedCandidates
from hpc_train.planner.settings import Settings, apply_settings, settings_from_columns, single_rank_config
from hpc_train.traffic.stages import ELEMENT_BYTES
from hpc_train.units import GIB

MIN_KEPT_MESHES = 12
"""Minimum number of meshes that a search keeps, so that a short list is the start of a long one."""
_WORTH_MORE_NODES = 0.95
"""Twice the nodes must take less than this share of the time, or no number of them will meet a deadline."""
MAX_FRONT_POINTS = 12
"""Points of the Pareto front that are told of each world, evenly over it."""


@dataclass(frozen=True)
class Plan:
    """What `hpc-train plan` says."""

    question: PlanRequest
    candidates: list[Candidate]
    """The best first."""
    front: list[Candidate]
    """Of step time a token, memory and GPU-hours a token: nothing is better in one and as good in the others."""
    searched: int
    """Candidates of all spaces."""
    estimated: int
    """Of which no bound said that they cannot be among these."""
    seconds: float
    familiar: list[FamiliarLayout] = field(default_factory=list)
    """Familiar layouts, with the world and batch of the best candidate."""
    overrides: tuple[str, ...] = ()
    """Overrides of the question, for a command that runs the best candidate."""
    config_dir: str | None = None
    objective: str = "time"
    quickest: Candidate | None = None
    """Candidate with the smallest objective of all; the best is equal to it and may be simpler."""
    advice: list[Advice] = field(default_factory=list)
    """What could be better about the best."""
    notes: list[str] = field(default_factory=list)
    """What is not known, one line each."""

    outside: str | None = None
    """Why nothing that fits is among the candidates: the limits of the plan; None: they leave something."""

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    def alike(self, it: Candidate) -> bool:
        """Whether a candidate is equal to the best: both are within tolerance of the quickest one."""
        return self.quickest is not None and is_equally_quick(self.quickest, it, self.objective)

    @property
    def ties(self) -> int:
        """Return the candidates equal to the best, including itself."""
        return sum(map(self.alike, self.candidates))


def known_figures(config: RunConfig) -> KnownFigures:
    """Which figures of the accelerator are there."""
    missing = list_assumptions(config.cluster, config.precision.name)
    memory = not any("memory_gib" in line for line in missing)
    return KnownFigures(len(missing) == (not memory), memory)


def make_plan(
    question: PlanRequest,
    top: int = 10,
    objective: str | None = None,
    told: Constants | None = None,
    familiar: bool = False,
) -> Plan:
    """Estimate the run that is given, or search. top: number of candidates to report; the best does not depend on it.

    familiar: also search the familiar layouts, which takes a tenth of the time again.

    Raises UserError for a model that cannot be planned, for a run that cannot be, and if no layout has the ranks.
    """
    began = clock.perf_counter()
    config = question.config
    if isinstance(config.model, CustomModelConfig):
        jobs_from_config(config, 1)  # says why not
    keep = max(top, MIN_KEPT_MESHES)
    asker = _Planner(question, told or constants.cluster_constants(config.cluster), known_figures(config), keep)
    candidates = asker.candidates()
    if not asker.searched:
        raise UserError(_no_layout(question))
    objective = objective or config.plan.objective
    kept = candidates if question.whole else [it for it in candidates if is_within_limits(it)]
    ranked = rank_candidates(kept, objective)
    best, quickest = ranked[:top], find_quickest(ranked, objective)
    usual = asker.familiar(best[0] if best else None) if familiar and not question.whole else []
    more = asker.advice(best[0]) if best else []
    notes = [_describe_missing(line) for line in list_assumptions(config.cluster, config.precision.name)]
    if best and (nodes := first_nodes(best[0].config, best[0].ranks)):
        where = f"placed on {nodes[0]} to {nodes[-1]} of {config.cluster.topology}"
        notes.append(f"which nodes it gets is not known: {where}")
    outside = explain_no_candidate(config.plan, candidates) if candidates and not kept else None
    notes += [outside] if outside else []
    front, seconds = asker.front(best[0]) if best else [], clock.perf_counter() - began
    found = Plan(
        question,
        best,
        front,
        asker.searched,
        asker.estimated,
        seconds,
        objective=objective,
        quickest=quickest,
        advice=more,
        notes=notes,
        outside=outside,
    )
    rows = [
        FamiliarLayout(name, it, why or explain_why_not_best(found.best, it, found.alike(it)) if it else why)
        for name, it, why in usual
    ]
    return replace(found, familiar=rows)


def _no_layout(question: PlanRequest) -> str:
    worlds = " or ".join(f"{ranks:,}" for ranks in question.ranks) or "any number of"
    fixed = ", ".join(f"{name} {values[0]:g}" for name, values in question.fixed.values.items() if values)
    return (
        f"plan: no layout has {worlds} ranks{f' with {fixed}' if fixed else ''}; degrees must divide the ranks, heads "
        "and feed-forward width (tp), positions (cp) and batch (dp)"
    )


def _describe_missing(assumption: str) -> str:
    """Nothing that rests on it is told, so only that it is missing."""
    return f"{assumption.partition(' is not known')[0]} is not known: what depends on it is not told"


class _Planner:
    """The state of one answer."""

    def __init__(self, question: PlanRequest, told: Constants, known: KnownFigures, top: int) -> None:
        self._question, self._constants, self._known, self._top = question, told, known, top
        self._rate: AssumedFailureRate | None = None
        self._fronts: list[Candidate] = []
        self._told: dict[tuple[int, int], Constants] = {}
        """Constants by ranks and batch."""
        self.searched = self.estimated = 0

    def candidates(self) -> list[Candidate]:
        question = self._question
        if question.whole:
            return [self._whole(question.config, {}, ranks) for ranks in question.ranks]
        if not (self._known.speed and self._known.memory):
            return self._plain()
        if question.ranks:
            return [it for ranks in question.ranks for it in self._world(ranks, question.fixed)]
        return self._fewest(question.fixed.unless("offload", 0.0)) or self._fewest(question.fixed)

    def _fewest(self, fixed: FixedColumns) -> list[Candidate]:
        """On the fewest nodes that the model fits on for sure, or may fit on, and that end before the deadline."""
        found: list[Candidate] = []
        for ranks in self._question.growing:
            more = self._world(ranks, fixed)
            sure = [it for it in more if it.fits == "yes"]
            slower = (
                sure
                and found
                and quickest_seconds_per_token(sure) > _WORTH_MORE_NODES * quickest_seconds_per_token(found)
            )
            found = more or found
            if any(is_within_deadline(it) for it in sure) or slower:
                break
        return found

    def _whole(self, config: RunConfig, settings: Settings, ranks: int) -> Candidate:
        """A run as it is."""
        check_support(config, ranks)
        self.searched, self.estimated = self.searched + 1, self.estimated + 1
        return self._candidate(config, settings, ranks, self._constants)

    def _candidate(self, config: RunConfig, settings: Settings, ranks: int, told: Constants) -> Candidate:
        jobs = jobs_from_config(config, ranks)
        if self._rate is None:
            self._rate = choose_failure_rate(config.plan, config.cluster.ranks_per_node)
        found = estimate_placed(config, ranks, estimate_jobs(jobs, told))
        return make_candidate(config, settings, jobs, found, self._known, self._rate)

    def _plain(self) -> list[Candidate]:
        """Where no speed is known, nothing can be searched for: data parallelism, and what saves memory in it."""
        ranks = self._question.ranks or (next(self._question.growing),)
        return [
            self._whole(apply_settings(self._question.config, settings), settings, world)
            for world in ranks
            for settings in fallback_settings(self._question.config, world)
        ]

    def _world(self, ranks: int, fixed: FixedColumns) -> list[Candidate]:
        found: list[Candidate] = []
        for batch in self._question.batches:
            result = self._search(ranks, batch, fixed)
            self.searched, self.estimated = self.searched + result.searched, self.estimated + result.estimated
            rated = result.best if result.best.count else result.doubtful
            told = self._told[ranks, batch] = self._of_the_best(rated, ranks, batch)
            found += self._candidates(rated, ranks, batch, told)
            self._fronts += self._candidates(_thin_front(result.front), ranks, batch, told)
        return found

    def _of_the_best(self, rated: RatedCandidates, ranks: int, batch: int) -> Constants:
        """What measured runs tell of the best of a search beyond all constants counts for all of it, so that it changes
        times and no order."""
        known, order = self._constants, without_residuals(self._constants)
        if not (known.residuals and rated.count):
            return order
        best = jobs_from_config(self._as_run(rated, 0, ranks, batch)[0], ranks)
        return replace(order, scale=known.scale * float(residual_factor(best, known.residuals)))

    def _search(self, ranks: int, batch: int, fixed: FixedColumns) -> SearchResult:
        space = SearchSpace(degree_limits(self._question.config, batch), ranks, fixed)
        return search_space(self._rest(batch), space, without_residuals(self._constants), self._top)

    def _rest(self, batch: int) -> SearchBase:
        config = self._question.config
        host = config.cluster.node.memory_gib * GIB
        return SearchBase(
            jobs_from_config(single_rank_config(config, batch), 1), ELEMENT_BYTES[config.precision.reduce], host
        )

    def _candidates(self, rated: RatedCandidates, ranks: int, batch: int, told: Constants) -> Iterator[Candidate]:
        for number in range(rated.count):
            yield self._candidate(*self._as_run(rated, number, ranks, batch), ranks, told)

    def _as_run(self, rated: RatedCandidates, number: int, ranks: int, batch: int) -> tuple[RunConfig, Settings]:
        config = self._question.config
        settings = settings_from_columns({name: float(it[number]) for name, it in rated.columns.items()})
        settings |= {"train.global_batch": batch} if batch != config.train.global_batch else {}
        if self._question.chooses_nodes:
            settings |= {"cluster.nodes": ranks // count_ranks_per_node(config)}
        return apply_settings(config, settings), settings

    def advice(self, best: Candidate) -> list[Advice]:
        """Of all lints."""
        return run_lints(
            best.config, estimate_for_advice(best.config, best.ranks, self._constants, self._rate), best.ranks
        )

    def front(self, best: Candidate) -> list[Candidate]:
        """Return the Pareto front of time, memory and GPU time per token over all worlds and batches.

        The best comes first; candidates as quick as the best that need more memory are left out.
        """
        kept = [it for it in self._fronts if it.step is not None and is_within_limits(it)]
        points = np.array([_front_point(it) for it in kept])
        if not len(points) or best.step is None:
            return []
        better = np.all(points[:, None] <= points, axis=2) & np.any(points[:, None] < points, axis=2)
        free = [it for it, beaten in zip(kept, better.any(axis=0).tolist(), strict=True) if not beaten]
        here = best.ranks, best.global_batch
        more = [it for it in free if (it.ranks, it.global_batch) != here or it.total < best.total]
        more = [it for it in more if it.settings != best.settings]
        return [best, *sorted(more, key=lambda it: it.total, reverse=True)]

    def familiar(self, best: Candidate | None) -> list[tuple[str, Candidate | None, str]]:
        """Return (name, its best variant, why there is none) for each familiar layout.

        They use the best candidate's world, or the largest world asked for if nothing fits.
        """
        question = self._question
        if not (self._known.speed and self._known.memory) or not (best or question.ranks):
            return []
        ranks, batch = (best.ranks, best.global_batch) if best else (question.ranks[-1], question.batches[0])
        space = SearchSpace(degree_limits(self._question.config, batch), ranks, self._question.fixed)
        found: list[tuple[str, Candidate | None, str]] = []
        for kind in familiar_kinds(space, count_ranks_per_node(self._question.config)):
            part = None if kind.impossible else restrict_space(space, kind)
            if part is None:
                found.append((kind.name, None, kind.impossible or "not with what was given"))
                continue
            rated = find_best_variant(self._rest(batch), part, without_residuals(self._constants))
            told = self._told.get((ranks, batch), self._constants)
            way = next(self._candidates(rated, ranks, batch, told), None)
            found.append((kind.name, way, "" if way else "no way of it divides the model and the batch"))
        return found


def _front_point(it: Candidate) -> tuple[float, float, float]:
    assert it.step is not None
    seconds = it.step.p50 / it.tokens
    return seconds, it.total, seconds * it.ranks


def _thin_front(rated: RatedCandidates) -> RatedCandidates:
    """At most FRONT of them."""
    if rated.count <= MAX_FRONT_POINTS:
        return rated
    return rated.take(np.unique(np.linspace(0, rated.count - 1, MAX_FRONT_POINTS).round().astype(np.int64)))
