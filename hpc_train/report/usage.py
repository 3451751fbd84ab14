"""Say which resources a run was given, how much of them it used, and what it cost."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from hpc_train.report.run_summary import RunSummary
from hpc_train.report.step_table import StepTable
from hpc_train.resilience.ledger import CLASSES, Ledger


def list_ledger(ledger: Ledger) -> list[dict[str, Any]]:
    """List the classes of node-seconds, the largest first: kind, text, time and share of the whole."""
    rows = sorted(ledger.seconds.items(), key=lambda item: -item[1])
    return [
        {
            "kind": name,
            "text": CLASSES[name],
            "time": format_node_time(seconds, ledger.total),
            "share": seconds / ledger.total,
        }
        for name, seconds in rows
        if ledger.total > 0 and seconds > 5e-4 * ledger.total
    ]


def format_node_time(seconds: float, total: float) -> str:
    """Format node-seconds in the unit that suits their total: node-hours, node-minutes or node-seconds."""
    # The unit of the total, not of each row: rows of one table can then be compared.
    for unit, name in ((3600.0, "node-hours"), (60.0, "node-minutes")):
        if total >= unit:
            return f"{seconds / unit:,.2f} {name}"
    return f"{seconds:.2f} node-seconds"


def compute_cost(summary: RunSummary) -> dict[str, float | None]:
    """Compute what the run has cost so far, with the prices of its plan.* settings; None where a price is not known.

    The wait in the queue is free; starts, lost steps and idle spare nodes are not. Without plan.energy.watts_per_gpu
    the power is the mean that the GPUs reported. Returns {} where it is not known where the ranks were.
    """
    seconds = summary.ledger.total - summary.ledger.seconds["queue"]
    ranks_per_node = _count_ranks_per_node(summary)
    if seconds <= 0 or not ranks_per_node:
        return {}
    tokens = sum(step["tokens"] for step in summary.steps if isinstance(step.get("tokens"), int))
    hours = ranks_per_node * seconds / 3600
    cost: dict[str, float | None] = {"gpu_hours": hours, "money": None, "kwh": None, "co2_kg": None}
    if summary.config is not None:
        from hpc_train.planner.reliability.projection import Prices, compute_bill

        prices = Prices.from_config(summary.config.plan)
        watts = prices.watts_per_gpu or measure_watts(summary.table)
        bill = compute_bill(ranks_per_node, seconds, replace(prices, watts_per_gpu=watts))
        cost |= {"money": bill.money, "kwh": bill.kwh, "co2_kg": bill.co2_kg}
    cost["tokens"] = tokens
    cost["gpu_hours_per_billion_tokens"] = _divide_by_tokens(hours, tokens)
    cost["money_per_billion_tokens"] = _divide_by_tokens(cost["money"], tokens)
    return {name: None if value is None else round(value, 6) for name, value in cost.items()}


def _count_ranks_per_node(summary: RunSummary) -> int:
    """Return the ranks of the fullest node: a node is paid for as a whole."""
    return max(Counter(summary.facts.node_of_rank.values()).values(), default=0)


def _divide_by_tokens(amount: float | None, tokens: float) -> float | None:
    return None if amount is None or not tokens else amount / tokens * 1e9


def measure_watts(table: StepTable | None) -> float | None:
    """Return the mean power of a GPU during training; None if no GPU reported its power."""
    if table is None or not np.isfinite(table["gpu_watts"]).any():
        return None
    return float(np.nanmean(table["gpu_watts"]))


def describe_usage(summary: RunSummary, cost: dict[str, float | None]) -> list[dict[str, str]]:
    """Describe what was asked for, used and paid, with the override to paste where the first two differ much.

    Returns rows of `what`, `used` and `advice`.
    """
    rows = [*_describe_processors(summary), *_describe_memory(summary), *_describe_time(summary)]
    text = describe_cost(cost, summary.facts.accelerator)
    return [*rows, _make_row("cost", text)] if text else rows


def describe_cost(cost: dict[str, float | None], accelerator: bool) -> str:
    """Describe a cost in a line; empty if nothing is known. accelerator: whether ranks have GPUs."""
    hours, money = cost.get("gpu_hours"), cost.get("money")
    if hours is None:
        return ""
    unit = "GPU-hours" if accelerator else "rank-hours"
    parts = [
        _append_rate(f"{hours:,.3g}" if hours < 1000 else f"{hours:,.0f}", unit, cost["gpu_hours_per_billion_tokens"])
    ]
    if money is not None:
        parts.append(_append_rate(f"{money:,.2f}", "by plan.price_per_gpu_hour", cost["money_per_billion_tokens"]))
    if (kwh := cost.get("kwh")) is not None:
        parts.append(f"{kwh:,.3g} kWh")
    if (co2 := cost.get("co2_kg")) is not None:
        parts.append(f"{co2:,.3g} kg of CO₂")
    return ", ".join(parts)


def _append_rate(amount: str, unit: str, per_billion: float | None) -> str:
    return f"{amount} {unit}" + ("" if per_billion is None else f" ({per_billion:,.4g} for 10⁹ tokens)")


def _make_row(what: str, used: str, advice: str = "") -> dict[str, str]:
    return {"what": what, "used": used, "advice": advice}


def _describe_processors(summary: RunSummary) -> list[dict[str, str]]:
    table, rows = summary.table, []
    if table is None:
        return []
    busy = table["cpu"] / table["total"]
    if np.isfinite(busy).any():
        rows.append(_make_row("processors", f"{np.nanmean(busy):.1f} busy a rank, on average"))
    if np.isfinite(table["gpu_busy"]).any():
        rows.append(_make_row("GPUs", f"busy for {np.nanmean(table['gpu_busy']):.0f} % of the time"))
    return rows


def _describe_memory(summary: RunSummary) -> list[dict[str, str]]:
    table, config = summary.table, summary.config
    if table is None or not np.isfinite(table["resident"]).any():
        return []
    peak = float(np.nanmax(table["resident"])) / 1024
    per_node = peak * max(_count_ranks_per_node(summary), 1)
    requested = getattr(config.launch, "memory_gib", None) if config is not None else None
    used = f"{peak:.1f} GiB per rank at most, {per_node:.1f} GiB per node" + (
        f" of {requested:g} GiB" if requested else ""
    )
    return [
        _make_row(
            "memory",
            used,
            f"launch.memory_gib={math.ceil(per_node * 1.25)}" if requested and per_node < 0.5 * requested else "",
        )
    ]


def _describe_time(summary: RunSummary) -> list[dict[str, str]]:
    limit = getattr(summary.config.launch, "time_minutes", None) if summary.config is not None else None
    if not limit or summary.table is None or summary.status.job_id is None or summary.status.state != "DONE":
        return []
    nodes = max(len(set(summary.facts.node_of_rank.values())), 1)
    used = (summary.ledger.total - summary.ledger.seconds["queue"]) / 60 / nodes
    return [
        _make_row(
            "time",
            f"{used:.0f} of {limit} minutes",
            f"launch.time_minutes={math.ceil(used * 1.5)}" if used < 0.5 * limit else "",
        )
    ]
