"""plan.budget and plan.deadline_days as constraints: what a run may cost and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.config.plan import PlanConfig
from hpc_train.planner.candidate import Candidate


def within(it: Candidate) -> bool:
    """Whether a candidate keeps to both, as far as it is known what it costs and takes."""
    return it.outlook is None or not (it.outlook.late or it.outlook.over_budget)


def within_deadline(it: Candidate) -> bool:
    return it.outlook is None or not it.outlook.late


def quickest(candidates: Sequence[Candidate]) -> float:
    """Seconds a token of the quickest; infinite where no speed is known."""
    return min((it.step.p50 / it.tokens for it in candidates if it.step), default=float("inf"))


def none_within(plan: PlanConfig, candidates: Sequence[Candidate]) -> str:
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
