"""What a run cost: node-seconds times prices, without the wait in the queue, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from synthetic import write_run

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.report.run_summary import RunSummary, summarise_run
from hpc_train.report.usage import compute_cost, describe_cost, describe_usage, format_node_time, list_ledger
from hpc_train.resilience.ledger import Ledger

PRICES = (
    "plan.price_per_gpu_hour=2.5",
    "plan.energy.watts_per_gpu=500",
    "plan.energy.pue=1.2",
    "plan.energy.price_per_kwh=0.1",
    "plan.energy.co2_grams_per_kwh=300",
)


def spend(ledger: Ledger, **seconds: float) -> Ledger:
    return replace(ledger, seconds=dict.fromkeys(ledger.seconds, 0.0) | seconds)


def make_summary(tmp_path: Path, config: RunConfig | None = None, **fields: Any) -> RunSummary:
    """Two nodes of four ranks for an hour and a half, an hour of waiting before, and a billion tokens."""
    write_run(tmp_path / "run", 8, range(1, 11), lambda rank, step: fields, ranks_per_node=4)
    summary = summarise_run(RunPoint("run", tmp_path / "run"), run_client)
    nodes = {rank: f"n{rank // 4}" for rank in range(8)}
    return replace(
        summary,
        config=config,
        ledger=spend(summary.ledger, queue=7200.0, start=1800.0, kept=2 * 5400.0 - 1800.0),
        facts=replace(summary.facts, node_of_rank=nodes, accelerator=True),
        steps=[{"step": 1, "tokens": 600_000_000}, {"step": 2, "tokens": 400_000_000}, {"step": 3}],
    )


def test_prices_multiply(tmp_path: Path) -> None:
    cost = compute_cost(make_summary(tmp_path, compose(list(PRICES))))
    assert cost["gpu_hours"] == pytest.approx(8 * 1.5)
    assert cost["kwh"] == pytest.approx(12 * 0.5 * 1.2)
    assert cost["money"] == pytest.approx(12 * 2.5 + 7.2 * 0.1)
    assert cost["co2_kg"] == pytest.approx(7.2 * 0.3)
    assert cost["tokens"] == 1_000_000_000
    assert cost["money_per_billion_tokens"] == pytest.approx(cost["money"])
    line = describe_cost(cost, accelerator=True)
    assert line.startswith("12 GPU-hours (12 for 10⁹ tokens), 30.72 by plan.price_per_gpu_hour (30.72 for 10⁹ tokens)")
    assert line.endswith("7.2 kWh, 2.16 kg of CO₂")


def test_power_that_was_measured_stands_in_for_the_setting(tmp_path: Path) -> None:
    cost = compute_cost(make_summary(tmp_path, compose([]), gpu_watts=250.0))
    assert cost["kwh"] == pytest.approx(12 * 0.25)
    assert cost["money"] is None
    assert describe_cost(cost, accelerator=True) == "12 GPU-hours (12 for 10⁹ tokens), 3 kWh"


def test_without_prices_or_configuration_hours_are_left(tmp_path: Path) -> None:
    summary = make_summary(tmp_path, cpu=0.3)
    cost = compute_cost(summary)
    assert describe_cost(cost, accelerator=False) == "12 rank-hours (12 for 10⁹ tokens)"
    assert {row["what"] for row in describe_usage(summary, cost)} == {"processors", "memory", "cost"}


def test_a_run_of_unknown_size_has_no_cost(tmp_path: Path) -> None:
    summary = make_summary(tmp_path)
    nowhere = replace(summary, facts=replace(summary.facts, node_of_rank={}))
    assert compute_cost(nowhere) == {}
    assert describe_cost({}, accelerator=True) == ""
    waiting = replace(summary, ledger=spend(summary.ledger, queue=60.0))
    assert compute_cost(waiting) == {}
    no_tokens = compute_cost(replace(summary, steps=[]))
    assert no_tokens["gpu_hours_per_billion_tokens"] is None
    assert describe_cost(no_tokens, accelerator=True) == "12 GPU-hours"


@pytest.mark.parametrize(
    ("seconds", "total", "text"),
    [(1.234, 9.0, "1.23 node-seconds"), (90.0, 600.0, "1.50 node-minutes"), (36.0, 7200.0, "0.01 node-hours")],
)
def test_node_time_has_the_unit_of_its_total(seconds: float, total: float, text: str) -> None:
    assert format_node_time(seconds, total) == text


def test_the_ledger_is_listed_by_size(tmp_path: Path) -> None:
    rows = list_ledger(make_summary(tmp_path).ledger)
    assert [row["kind"] for row in rows] == ["kept", "queue", "start"]
    assert sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert list_ledger(Ledger()) == []
