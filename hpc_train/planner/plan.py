"""Plan a run: the candidates for a request, best first.

A plan is made in this order: request.py says what is open; find_candidates.py lets search/ find the best meshes, makes
runs of them again (settings.py), and estimates these with the real switches (model/) and with failures, saves and
prices (reliability/); ranking.py sorts them; advice/ lints the best; output/ prints it all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpc_train.config.compose import compose
from hpc_train.config.model import CustomModelConfig, HfModelConfig, TransformerConfig
from hpc_train.config.parallel import Degrees, ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.models.hf.decoder_shape import describe_decoder, list_unsplit
from hpc_train.parallel.rules.adapter import check_adapter_rules
from hpc_train.parallel.rules.check import check_support
from hpc_train.placement.described_cluster import count_ranks_per_node
from hpc_train.planner.advice.facts import Advice, estimate_for_advice
from hpc_train.planner.advice.lints import run_lints
from hpc_train.planner.candidate import Candidate, KnownFigures
from hpc_train.planner.candidate_text import describe_layout
from hpc_train.planner.constants import Constants, cluster_constants, without_residuals
from hpc_train.planner.evidence import NEEDED_RUNS
from hpc_train.planner.find_candidates import (
    EstimateBasis,
    FoundCandidates,
    estimate_rated,
    find_candidates,
    make_search_base,
)
from hpc_train.planner.model.fabric import first_nodes
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.machine_columns import list_assumptions
from hpc_train.planner.ranking import (
    explain_no_candidate,
    find_pareto_front,
    find_quickest,
    is_equally_quick,
    is_within_limits,
    rank_candidates,
)
from hpc_train.planner.reliability.projection import choose_failure_rate
from hpc_train.planner.request import PlanRequest, make_request
from hpc_train.planner.search.baseline_layouts import (
    BaselineLayout,
    baseline_kinds,
    explain_why_not_best,
    find_best_variant,
    restrict_space,
)
from hpc_train.planner.search.degree_limits import find_degree_limits
from hpc_train.planner.search.space import FixedColumns, SearchSpace
from hpc_train.planner.settings import make_single_rank_config

MIN_KEPT_MESHES = 12
"""Minimum number of meshes that a search keeps, so that a short list is the beginning of a longer one."""


@dataclass(frozen=True)
class Plan:
    """The result of planning a request."""

    request: PlanRequest
    candidates: list[Candidate]
    """Best first."""
    front: list[Candidate]
    """Pareto front of time per token, memory and GPU-hours per token."""
    searched: int
    """Number of candidates in all search spaces."""
    estimated: int
    """Number of candidates that no bound ruled out."""
    seconds: float
    """Time that planning took."""
    baselines: list[BaselineLayout] = field(default_factory=list)
    """Baseline layouts, with the world and batch of the best candidate."""
    overrides: tuple[str, ...] = ()
    """Overrides that the request was made from, for a command that runs the best candidate."""
    config_dir: str | None = None
    objective: str = "time"
    quickest: Candidate | None = None
    """Candidate with the smallest objective. The best one is equally good within tolerance, and may be simpler."""
    advice: list[Advice] = field(default_factory=list)
    """Advice on the best candidate."""
    notes: list[str] = field(default_factory=list)
    """What is unknown or not counted, one line each."""
    outside: str | None = None
    """Why the plan's limits leave no candidate; None: they leave some."""

    @property
    def best(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    def equals_best(self, candidate: Candidate) -> bool:
        """Return whether a candidate is as good as the best: both are within tolerance of the quickest one."""
        return self.quickest is not None and is_equally_quick(self.quickest, candidate, self.objective)

    @property
    def ties(self) -> int:
        """Return the number of candidates equal to the best, including itself."""
        return sum(map(self.equals_best, self.candidates))


@dataclass(frozen=True)
class PlanOptions:
    """Options of `hpc-train plan`."""

    json: bool = False
    plot: str | None = None
    top: int = 10
    by: str | None = None
    """Objective; None: plan.objective."""
    show_all: bool = False
    """Print everything, not only the 40 most important lines."""
    baselines: bool = True
    """Also search the baseline layouts."""


def plan_overrides(overrides: Sequence[str], config_dir: str | None = None, options: PlanOptions | None = None) -> Plan:
    """Plan the run that these overrides compose. Raises UserError as `make_plan` does."""
    options = options or PlanOptions()
    request = make_request(compose(overrides, config_dir), overrides)
    plan = make_plan(request, options.top, options.by, baselines=options.baselines)
    return replace(plan, overrides=tuple(overrides), config_dir=config_dir)


def known_figures(config: RunConfig) -> KnownFigures:
    """Return which figures of the accelerator the cluster's description has."""
    missing = list_assumptions(config.cluster, config.precision.name)
    memory = not any("memory_gib" in line for line in missing)
    return KnownFigures(len(missing) == (not memory), memory)


def make_plan(
    request: PlanRequest,
    top: int = 10,
    objective: str | None = None,
    constants: Constants | None = None,
    baselines: bool = False,
) -> Plan:
    """Estimate the run if it is given completely, else search for the best one.

    top: number of candidates to report; the best does not depend on it. baselines: also search the baseline layouts,
    which takes another tenth of the time. Raises UserError for a model that cannot be planned, for a run that cannot
    be, and if no layout has the ranks.
    """
    began = time.perf_counter()
    config = request.config
    objective = objective or config.plan.objective
    if isinstance(config.model, HfModelConfig):
        return _plan_decoder(config.model, request, top, objective, constants, baselines)
    _refuse_unplanned(request)
    basis = EstimateBasis(
        constants or cluster_constants(config.cluster),
        known_figures(config),
        choose_failure_rate(config.plan, config.cluster.ranks_per_node),
    )
    searched = find_candidates(request, basis, max(top, MIN_KEPT_MESHES))
    if not searched.searched:
        raise UserError(_explain_no_layout(request))
    plan = _rank_found(request, searched, basis, top, objective)
    if baselines and not request.complete:
        plan = replace(plan, baselines=_compare_baselines(plan, basis, searched))
    return replace(plan, seconds=time.perf_counter() - began)


def _rank_found(
    request: PlanRequest, searched: FoundCandidates, basis: EstimateBasis, top: int, objective: str
) -> Plan:
    """Rank what the search has found, and advise on the best.

    A run that is given completely is estimated even outside of the plan's limits: it is what the user asked about.
    """
    config, found = request.config, searched.candidates
    allowed = found if request.complete else [candidate for candidate in found if is_within_limits(candidate)]
    ranked = rank_candidates(allowed, objective)
    best = ranked[0] if ranked else None
    outside = explain_no_candidate(config.plan, found) if found and not allowed else None
    return Plan(
        request,
        ranked[:top],
        find_pareto_front(searched.front, best) if best else [],
        searched.searched,
        searched.estimated,
        seconds=0.0,
        objective=objective,
        quickest=find_quickest(ranked, objective),
        advice=_advise(best, basis) if best else [],
        notes=[*_list_notes(config, best, outside), *_note_unmeasured(ranked[:top], objective)],
        outside=outside,
    )


def _refuse_unplanned(request: PlanRequest) -> None:
    """Raise UserError for a run that cannot be planned; checks elsewhere say why not."""
    config = request.config
    if isinstance(config.model, CustomModelConfig):
        jobs_from_config(config, 1)
    if config.parallel.compile and isinstance(config.model, TransformerConfig) and config.model.experts.count:
        check_support(make_single_rank_config(config, config.train.global_batch), 1)  # experts do not compile
    if not request.complete:
        check_adapter_rules(config, Degrees(1, 1, 1, 1, 1))
        _check_layout_is_given(config.parallel)


def _plan_decoder(
    model: HfModelConfig,
    request: PlanRequest,
    top: int,
    objective: str,
    constants: Constants | None,
    baselines: bool,
) -> Plan:
    """Plan a decoder of transformers by its shape, and leave out what its own rules refuse."""
    config = replace(request.config, model=describe_decoder(model))
    check_adapter_rules(request.config, Degrees(1, 1, 1, 1, 1))
    fixed = request.fixed
    if request.complete:
        for ranks in request.ranks:
            check_support(request.config, ranks)
    else:
        fixed = FixedColumns({**list_unsplit(model), **fixed.values})
    plan = make_plan(replace(request, config=config, fixed=fixed), MIN_KEPT_MESHES, objective, constants, baselines)
    runs = [candidate for candidate in plan.candidates if _can_run(candidate, model)]
    if plan.candidates and not runs:
        check_support(replace(plan.candidates[0].config, model=model), plan.candidates[0].ranks)  # says why not
    front = [candidate for candidate in plan.front if _can_run(candidate, model)]
    changed = runs[:1] != plan.candidates[:1]
    return replace(plan, candidates=runs[:top], front=front, advice=[] if changed else plan.advice)


def _can_run(candidate: Candidate, model: HfModelConfig) -> bool:
    try:
        check_support(replace(candidate.config, model=model), candidate.ranks)
    except UserError:
        return False
    return True


def _check_layout_is_given(parallel: ParallelConfig) -> None:
    """Raise UserError for settings that only some layouts can have, as the search would find others."""
    if parallel.cuda_graphs:
        raise UserError(
            "parallel.cuda_graphs=true: is for ddp with one micro-batch a step; give that layout, or leave it out"
        )
    if parallel.tensor.symmetric:
        raise UserError("parallel.tensor.symmetric=true: is for asynchronous tp; give that layout, or leave it out")


def _explain_no_layout(request: PlanRequest) -> str:
    worlds = " or ".join(f"{ranks:,}" for ranks in request.ranks) or "any number of"
    fixed = ", ".join(f"{name} {values[0]:g}" for name, values in request.fixed.values.items() if values)
    return (
        f"plan: no layout has {worlds} ranks{f' with {fixed}' if fixed else ''}; degrees must divide the ranks, heads "
        "and feed-forward width (tp), positions (cp) and batch (dp)"
    )


def _list_notes(config: RunConfig, best: Candidate | None, outside: str | None) -> list[str]:
    """List what the plan does not know or count."""
    missing = [line.partition(" is not known")[0] for line in list_assumptions(config.cluster, config.precision.name)]
    notes = [f"{name} is unknown: nothing that depends on it is estimated" for name in missing]
    if best and (nodes := first_nodes(best.config, best.ranks)):
        where = f"placed on {nodes[0]} to {nodes[-1]} of {config.cluster.topology}"
        notes.append(f"which nodes the job will get is unknown: {where}")
    return [*notes, outside] if outside else notes


def _note_unmeasured(ranked: Sequence[Candidate], objective: str) -> list[str]:
    """Say which candidate is faster by estimate, but lost because too few measured runs had its techniques."""
    if not ranked or ranked[0].unmeasured:
        return []
    best = ranked[0].objective_value(objective)
    same_job = [
        other for other in ranked if (other.ranks, other.global_batch) == (ranked[0].ranks, ranked[0].global_batch)
    ]
    faster = [other for other in same_job if other.unmeasured and other.objective_value(objective) < best]
    if not faster:
        return []
    first = min(faster, key=lambda other: other.objective_value(objective))
    gain, needed = 1 - first.objective_value(objective) / best, first.handicap - 1
    return [
        f"{describe_layout(first)} with {', '.join(first.unmeasured)} is {gain:.1%} faster by estimate, but fewer than "
        f"{NEEDED_RUNS} measured runs had that, so it would have to be {needed:.0%} faster; `plan calibrate` with "
        f"{NEEDED_RUNS} such runs counts"
    ]


def _advise(best: Candidate, basis: EstimateBasis) -> list[Advice]:
    estimate = estimate_for_advice(best.config, best.ranks, basis.constants, basis.failure_rate)
    return run_lints(best.config, estimate, best.ranks)


def _compare_baselines(plan: Plan, basis: EstimateBasis, searched: FoundCandidates) -> list[BaselineLayout]:
    """Compare each baseline with the best candidate, in its world and with its batch.

    If nothing fits, the largest requested world is used.
    """
    request, best = plan.request, plan.best
    if not basis.searchable or not (best or request.ranks):
        return []
    ranks, batch = (best.ranks, best.global_batch) if best else (request.ranks[-1], request.batches[0])
    space = SearchSpace(find_degree_limits(request.config, batch), ranks, request.fixed)
    constants = searched.constants.get((ranks, batch), basis.constants)
    base, plain = make_search_base(request.config, batch), without_residuals(basis.constants)
    rows = []
    for kind in baseline_kinds(space, count_ranks_per_node(request.config)):
        restricted = None if kind.impossible else restrict_space(space, kind)
        if restricted is None:
            rows.append(BaselineLayout(kind.name, None, kind.impossible or "not possible with the given settings"))
            continue
        rated = find_best_variant(base, restricted, plain)
        candidate = next(estimate_rated(request, rated, ranks, batch, constants, basis), None)
        if candidate is None:
            rows.append(BaselineLayout(kind.name, None, "no variant divides the model and the batch"))
        else:
            why = explain_why_not_best(best, candidate, plan.equals_best(candidate))
            rows.append(BaselineLayout(kind.name, candidate, why))
    return rows
