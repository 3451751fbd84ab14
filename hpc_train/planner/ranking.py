"""Rank candidates by the objective; of candidates too close to tell apart the simplest comes first.

A candidate with a technique that too few measured runs had is compared as if it were slower by the error of estimates
(evidence.py). Candidates that surely fit come before those that may fit, and these before those that do not.
plan.budget and plan.deadline_days exclude candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpc_train.config.run import PlanConfig
from hpc_train.planner.candidate import Candidate
from hpc_train.planner.search.top_candidates import EQUAL_TIME_TOLERANCE

_FIT_ORDER = {"yes": 0, "unknown": 0, "maybe": 1, "no": 2}


def rank_candidates(candidates: Iterable[Candidate], objective: str) -> list[Candidate]:
    """Sort candidates, best first: by fit, then by the objective; those equal to the quickest by simplicity."""
    ordered = sorted(
        candidates, key=lambda candidate: (_FIT_ORDER[candidate.fits], candidate.compared_value(objective))
    )
    if not ordered:
        return ordered
    equal = [candidate for candidate in ordered if is_equally_quick(ordered[0], candidate, objective)]
    equal.sort(key=lambda candidate: (candidate.complexity, candidate.compared_value(objective)))
    equal_ids = set(map(id, equal))
    return equal + [candidate for candidate in ordered if id(candidate) not in equal_ids]


def find_quickest(ordered: Sequence[Candidate], objective: str) -> Candidate | None:
    """Return the smallest objective among candidates with the best's world and batch, and as sure to fit."""
    if not ordered:
        return None
    best = (ordered[0].ranks, ordered[0].global_batch, ordered[0].fits)
    comparable = [
        candidate for candidate in ordered if (candidate.ranks, candidate.global_batch, candidate.fits) == best
    ]
    return min(comparable, key=lambda candidate: candidate.compared_value(objective))


def is_equally_quick(quickest: Candidate, candidate: Candidate, objective: str) -> bool:
    """Whether a candidate is within EQUAL_TIME_TOLERANCE of the quickest one with the same ranks and batch."""
    if candidate is quickest:
        return True
    if candidate.step is None or _make_job_key(candidate) != _make_job_key(quickest):
        return False
    limit = quickest.compared_value(objective) * (1 + EQUAL_TIME_TOLERANCE)
    return candidate.compared_value(objective) <= limit


def _make_job_key(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.ranks, candidate.global_batch, _FIT_ORDER[candidate.fits]


def is_within_limits(candidate: Candidate) -> bool:
    """Return whether a candidate stays within plan.deadline_days and plan.budget; if unknown, it does."""
    return candidate.projection is None or not (candidate.projection.late or candidate.projection.over_budget)


def is_within_deadline(candidate: Candidate) -> bool:
    """Return whether a candidate stays within plan.deadline_days; if its duration is unknown, it does."""
    return candidate.projection is None or not candidate.projection.late


def find_least_seconds_per_token(candidates: Sequence[Candidate]) -> float:
    """Return the smallest seconds per token of any candidate; infinite if no speed is known."""
    return min(
        (candidate.step.p50 / candidate.tokens for candidate in candidates if candidate.step), default=float("inf")
    )


def find_pareto_front(candidates: Iterable[Candidate], best: Candidate) -> list[Candidate]:
    """Return the Pareto front of time, memory and GPU time per token over all worlds and batches.

    The best comes first; candidates as quick as the best that need more memory are left out.
    """
    allowed = [candidate for candidate in candidates if candidate.step is not None and is_within_limits(candidate)]
    points = np.array([_make_front_point(candidate) for candidate in allowed])
    if not len(points) or best.step is None:
        return []
    # [i, j]: point j is at least as good as i in every figure, and better in one.
    better = np.all(points[:, None] >= points, axis=2) & np.any(points[:, None] > points, axis=2)
    front = [candidate for candidate, beaten in zip(allowed, better.any(axis=1).tolist(), strict=True) if not beaten]
    best_job = best.ranks, best.global_batch
    others = [
        candidate
        for candidate in front
        if candidate.settings != best.settings
        and ((candidate.ranks, candidate.global_batch) != best_job or candidate.total < best.total)
    ]
    return [best, *sorted(others, key=lambda candidate: candidate.total, reverse=True)]


def _make_front_point(candidate: Candidate) -> tuple[float, float, float]:
    assert candidate.step is not None
    seconds = candidate.step.p50 / candidate.tokens
    return seconds, candidate.total, seconds * candidate.ranks


def explain_no_candidate(plan: PlanConfig, candidates: Sequence[Candidate]) -> str:
    """Say in one line which limits leave no candidate, and what the cheapest and the quickest take."""
    limits = {"plan.budget": plan.budget, "plan.deadline_days": plan.deadline_days}
    limit_list = " and ".join(f"{name}={value:g}" for name, value in limits.items() if value is not None)
    cheapest, quickest = min(candidates, key=_find_least_money), min(candidates, key=_get_days)
    facts = [f"the fastest takes {_get_days(quickest):.3g} days ({quickest.ranks:,} ranks)"]
    if _find_least_money(cheapest) < float("inf"):
        facts = [f"the cheapest costs {_find_least_money(cheapest):,.4g} ({cheapest.ranks:,} ranks)", *facts]
    return f"{limit_list}: no candidate that fits meets it: {', '.join(facts)}"


def _find_least_money(candidate: Candidate) -> float:
    """Return the cost on demand or on spot, whichever is less; infinite if neither has a price."""
    if candidate.projection is None:
        return float("inf")
    markets = candidate.projection.demand, candidate.projection.spot
    return min((market.money.p50 for market in markets if market and market.money), default=float("inf"))


def _get_days(candidate: Candidate) -> float:
    projection = candidate.projection
    return projection.demand.days.p50 if projection and projection.demand.days else float("inf")
