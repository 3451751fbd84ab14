"""Find the candidates of a plan: the run as it is given, or the best of the worlds and batches that a request allows.

A search works on columns of numbers and returns the best meshes only. Each of them becomes a run again here, and is
estimated again as a run: on the real switches, with failures, saves and prices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from hpc_train.config.run import RunConfig
from hpc_train.parallel.rules.check import check_support
from hpc_train.placement.described_cluster import count_ranks_per_node
from hpc_train.planner.candidate import Candidate, KnownFigures, make_candidate
from hpc_train.planner.constants import Constants, residual_factor, without_residuals
from hpc_train.planner.evidence import list_unmeasured
from hpc_train.planner.model.fabric import estimate_placed
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import estimate_jobs
from hpc_train.planner.ranking import (
    find_least_seconds_per_token,
    is_within_deadline,
)
from hpc_train.planner.reliability.projection import AssumedFailureRate
from hpc_train.planner.request import PlanRequest
from hpc_train.planner.search.baseline_layouts import (
    fallback_settings,
)
from hpc_train.planner.search.degree_limits import find_degree_limits
from hpc_train.planner.search.search import SearchBase, search_space
from hpc_train.planner.search.space import FixedColumns, SearchSpace
from hpc_train.planner.search.top_candidates import RatedCandidates
from hpc_train.planner.settings import Settings, apply_settings, make_settings, make_single_rank_config
from hpc_train.traffic.stages import ELEMENT_BYTES
from hpc_train.units import GIB

_WORTH_MORE_NODES = 0.95
"""Twice the nodes must reduce the time to less than this share; else more nodes will not meet a deadline either."""
MAX_FRONT_POINTS = 12
"""Number of points of the Pareto front that are estimated for each world and batch, evenly spaced."""


@dataclass(frozen=True)
class EstimateBasis:
    """Inputs that the estimates of all candidates of a plan share."""

    constants: Constants
    figures: KnownFigures
    failure_rate: AssumedFailureRate

    @property
    def searchable(self) -> bool:
        """Whether candidates can be compared at all: by time, and by whether they fit."""
        return self.figures.speed and self.figures.memory


@dataclass(frozen=True)
class FoundCandidates:
    """Candidates of one world, or of several."""

    candidates: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    """Points of the Pareto fronts of all searches."""
    searched: int = 0
    estimated: int = 0
    constants: dict[tuple[int, int], Constants] = field(default_factory=dict)
    """Constants that the candidates of (ranks, global batch) were estimated with."""

    def __add__(self, other: FoundCandidates) -> FoundCandidates:
        return FoundCandidates(
            self.candidates + other.candidates,
            self.front + other.front,
            self.searched + other.searched,
            self.estimated + other.estimated,
            {**self.constants, **other.constants},
        )


def find_candidates(request: PlanRequest, basis: EstimateBasis, keep: int) -> FoundCandidates:
    """Estimate the given run, or search the worlds that the request allows. keep: meshes that a search returns."""
    if request.complete:
        return _count_given([_estimate_run(request.config, {}, ranks, basis) for ranks in request.ranks])
    if not basis.searchable:
        return _count_given(list(_estimate_fallbacks(request, basis)))
    if request.ranks:
        worlds = [_search_world(request, basis, ranks, request.fixed, keep) for ranks in request.ranks]
        return sum(worlds, FoundCandidates())
    # Offloading to the host is slow: it is tried only if nothing fits without it.
    without_offload = _search_fewest_nodes(request, basis, request.fixed.unless("offload", 0.0), keep)
    if without_offload.candidates:
        return without_offload
    return without_offload + _search_fewest_nodes(request, basis, request.fixed, keep)


def _count_given(candidates: list[Candidate]) -> FoundCandidates:
    return FoundCandidates(candidates, searched=len(candidates), estimated=len(candidates))


def _estimate_run(config: RunConfig, settings: Settings, ranks: int, basis: EstimateBasis) -> Candidate:
    """Estimate a run as it is. Raises UserError if it cannot run."""
    check_support(config, ranks)
    return _estimate_candidate(config, settings, ranks, basis.constants, basis)


def _estimate_candidate(
    config: RunConfig, settings: Settings, ranks: int, constants: Constants, basis: EstimateBasis
) -> Candidate:
    jobs = jobs_from_config(config, ranks)
    estimate = estimate_placed(config, ranks, estimate_jobs(jobs, constants))
    unmeasured = list_unmeasured(basis.constants.evidence)
    return make_candidate(config, settings, jobs, estimate, basis.figures, basis.failure_rate, unmeasured)


def _estimate_fallbacks(request: PlanRequest, basis: EstimateBasis) -> Iterator[Candidate]:
    """Estimate the fallback layouts, which need no search: without a known speed there is no time to compare."""
    for ranks in request.ranks or (next(request.growing),):
        for settings in fallback_settings(request.config, ranks):
            yield _estimate_run(apply_settings(request.config, settings), settings, ranks, basis)


def _search_fewest_nodes(request: PlanRequest, basis: EstimateBasis, fixed: FixedColumns, keep: int) -> FoundCandidates:
    """Search worlds of more and more nodes, until the model surely fits and the deadline is met.

    The candidates are those of the last world that had any; the front is that of all worlds.
    """
    searched = FoundCandidates()
    for ranks in request.growing:
        world = _search_world(request, basis, ranks, fixed, keep)
        sure = [candidate for candidate in world.candidates if candidate.fits == "yes"]
        slower = False
        if sure and searched.candidates:
            before = find_least_seconds_per_token(searched.candidates)
            slower = find_least_seconds_per_token(sure) > _WORTH_MORE_NODES * before
        searched = replace(searched + world, candidates=world.candidates or searched.candidates)
        if any(is_within_deadline(candidate) for candidate in sure) or slower:
            break
    return searched


def _search_world(
    request: PlanRequest, basis: EstimateBasis, ranks: int, fixed: FixedColumns, keep: int
) -> FoundCandidates:
    """Search all layouts of `ranks` ranks, for each global batch of the request."""
    searched = FoundCandidates()
    for batch in request.batches:
        space = SearchSpace(find_degree_limits(request.config, batch), ranks, fixed)
        result = search_space(make_search_base(request.config, batch), space, without_residuals(basis.constants), keep)
        rated = result.best if result.best.count else result.doubtful
        constants = _apply_residuals(request, rated, ranks, batch, basis.constants)
        front = _thin_front(result.front)
        searched += FoundCandidates(
            list(estimate_rated(request, rated, ranks, batch, constants, basis)),
            list(estimate_rated(request, front, ranks, batch, constants, basis)),
            result.searched,
            result.estimated,
            {(ranks, batch): constants},
        )
    return searched


def make_search_base(config: RunConfig, batch: int) -> SearchBase:
    """Return the properties that all candidates of a search share."""
    job = jobs_from_config(make_single_rank_config(config, batch), 1)
    return SearchBase(job, ELEMENT_BYTES[config.precision.reduce], config.cluster.node.memory_gib * GIB)


def _apply_residuals(
    request: PlanRequest, rated: RatedCandidates, ranks: int, batch: int, constants: Constants
) -> Constants:
    """Scale the constants by what measured runs say of the best candidate of a search.

    All candidates of the search get its factor, so that it changes times and never their order.
    """
    plain = without_residuals(constants)
    if not (constants.residuals and rated.count):
        return plain
    config, _ = _make_run(request, rated, 0, ranks, batch)
    factor = float(residual_factor(jobs_from_config(config, ranks), constants.residuals))
    return replace(plain, scale=constants.scale * factor)


def estimate_rated(
    request: PlanRequest,
    rated: RatedCandidates,
    ranks: int,
    batch: int,
    constants: Constants,
    basis: EstimateBasis,
) -> Iterator[Candidate]:
    for row in range(rated.count):
        config, settings = _make_run(request, rated, row, ranks, batch)
        yield _estimate_candidate(config, settings, ranks, constants, basis)


def _make_run(
    request: PlanRequest, rated: RatedCandidates, row: int, ranks: int, batch: int
) -> tuple[RunConfig, Settings]:
    """Turn a row of a search back into a run, and return it with the settings that make it."""
    config = request.config
    settings = make_settings({name: float(column[row]) for name, column in rated.columns.items()})
    settings |= {"train.global_batch": batch} if batch != config.train.global_batch else {}
    if request.chooses_nodes:
        settings |= {"cluster.nodes": ranks // count_ranks_per_node(config)}
    return apply_settings(config, settings), settings


def _thin_front(rated: RatedCandidates) -> RatedCandidates:
    """Return at most MAX_FRONT_POINTS of a front's points, its ends among them."""
    if rated.count <= MAX_FRONT_POINTS:
        return rated
    return rated.take(np.unique(np.linspace(0, rated.count - 1, MAX_FRONT_POINTS).round().astype(np.int64)))
