"""Days, money and goodput of a run, from a configuration and an estimated step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from planner_runs import run

from hpc_train.planner.reliability.failure_rate import DAY, Percentiles, make_prior_failure_rate
from hpc_train.planner.reliability.goodput import (
    Interruption,
    Save,
    checkpoint_bytes,
    effective_share,
    estimate_saving,
    stored_bytes,
)
from hpc_train.planner.reliability.projection import ProjectedJob, Projection, choose_failure_rate, project_run

BASE = ["model=llama_70b", "cluster=dgx_h100", "cluster.nodes=128", "precision=bf16", "parallel=zero3"]
BASE += ["train.global_batch=2048", "train.micro_batch=1", "train.sequence_length=4096"]
PARAMETERS = 70.6e9
STEP = Percentiles(4.5, 5.0, 5.6)


@cache
def told(*overrides: str, step: Percentiles = STEP, nodes: int = 128) -> Projection:
    config = run(*BASE, *overrides)
    return project_run(config, ProjectedJob(nodes * 8, nodes, step, 2048 * 4096, PARAMETERS))


def test_days_are_steps_over_the_effective_share_and_the_first_start() -> None:
    it = told("plan.tokens=1e12")
    steps = -(-(10**12) // (2048 * 4096))
    assert it.demand.days is not None
    expected = (steps * 5.0 / it.demand.effective.p50 + 300) / DAY
    assert it.demand.days.p50 == pytest.approx(expected)
    days = it.demand.days
    assert days.p10 < expected * 0.901 < days.p50 < expected * 1.119 < days.p90


def test_the_effective_share_is_that_of_goodput_at_each_rate_of_the_band() -> None:
    it = told("checkpoint.every=200", "plan.checkpoint_seconds=60", "plan.checkpoint_stall_seconds=4")
    band = make_prior_failure_rate().percentiles
    for rate, share in ((band.p10, it.demand.effective.p90), (band.p90, it.demand.effective.p10)):
        failing = Interruption(rate * 128 / DAY, 300.0)
        assert share == pytest.approx(float(effective_share(1000.0, Save(4.0, 60.0), 300.0, [failing])))
    shares = it.demand.waste
    assert sum(map(float, (shares.effective, shares.saving, shares.lost, shares.down))) == pytest.approx(1)


def test_the_best_every_is_better_than_the_one_that_is_set() -> None:
    it = told("checkpoint.every=5000", "plan.tokens=1e12", "plan.checkpoint_seconds=60")
    assert it.demand.best_every is not None
    assert it.demand.best_effective is not None
    assert 12 <= it.demand.best_every < 500
    again = told(f"checkpoint.every={it.demand.best_every}", "plan.tokens=1e12", "plan.checkpoint_seconds=60")
    assert again.demand.effective.p50 == pytest.approx(it.demand.best_effective)
    assert again.demand.effective.p50 > it.demand.effective.p50


def test_a_run_that_never_saves_loses_all_at_every_failure() -> None:
    short, long = (told("checkpoint.every=0", f"plan.tokens={tokens}") for tokens in ("1e10", "15e12"))
    assert short.demand.effective.p50 > 0.8
    assert long.demand.effective.p50 < 1e-3


def test_money_needs_a_price_and_counts_spare_nodes() -> None:
    free, paid = told("plan.tokens=1e12"), told("plan.tokens=1e12", "plan.price_per_gpu_hour=2")
    assert free.demand.money is None
    assert free.demand.gpu_hours == paid.demand.gpu_hours
    assert paid.demand.money is not None
    assert paid.demand.gpu_hours is not None
    assert paid.demand.money.p50 == pytest.approx(2 * paid.demand.gpu_hours)
    spare = told("plan.tokens=1e12", "plan.spare_nodes=8")
    assert spare.demand.gpu_hours == pytest.approx(paid.demand.gpu_hours * 136 / 128)
    assert any("plan.price_per_gpu_hour" in line for line in free.unknown)
    assert not any("plan.price_per_gpu_hour" in line for line in paid.unknown)


def test_spot_nodes_are_cheaper_by_the_hour_and_lose_more() -> None:
    spot = ["plan.tokens=1e12", "plan.price_per_gpu_hour=2", "plan.spot_price_per_gpu_hour=1", "checkpoint.every=50"]
    spot += ["plan.spot_interruptions_per_1000_node_days=50", "plan.checkpoint_seconds=60"]
    lost, warned = told(*spot), told(*spot, "plan.spot_notice_seconds=120")
    assert lost.spot is not None
    assert warned.spot is not None
    assert lost.spot.effective.p50 < warned.spot.effective.p50 < warned.demand.effective.p50
    assert told(*spot[:2]).spot is None
    assert warned.spot.money is not None
    assert warned.demand.money is not None
    assert warned.spot.money.p50 < warned.demand.money.p50


def test_a_notice_is_of_no_use_where_nobody_knows_how_long_a_save_takes() -> None:
    spot = ["plan.spot_price_per_gpu_hour=1", "plan.spot_interruptions_per_1000_node_days=50"]
    plain, warned = told(*spot), told(*spot, "plan.spot_notice_seconds=120")
    assert plain.spot is not None
    assert warned.spot is not None
    assert plain.spot.effective == warned.spot.effective


def test_goals_are_checked_against_the_middle() -> None:
    days = told("plan.tokens=1e12").demand.days
    assert days is not None
    assert told("plan.tokens=1e12", f"plan.deadline_days={days.p50 * 0.99}").late
    assert not told("plan.tokens=1e12", f"plan.deadline_days={days.p50 * 1.01}").late
    priced = ["plan.tokens=1e12", "plan.price_per_gpu_hour=2"]
    money = told(*priced).demand.money
    assert money is not None
    assert told(*priced, f"plan.budget={money.p50 * 0.99}").over_budget
    assert not told(*priced, f"plan.budget={money.p50 * 1.01}").over_budget


def test_the_sites_own_figure_and_its_logs_replace_the_published_ones(tmp_path: Path) -> None:
    log = tmp_path / "history.txt"
    log.write_text("JobID|State|NNodes|ElapsedRaw\n1|NODE_FAIL|1000|8640000\n2|FAILED|1|60\n")
    own = choose_failure_rate(run(f"plan.failure_logs=[{log}]").plan, 8)
    assert own.rate.mean * 1000 < 0.1
    assert "1 node failures in 100000 node-days of 2 jobs; 1 jobs failed for unknown reasons" in own.source
    given = choose_failure_rate(run("plan.failures_per_1000_node_days=9").plan, 8)
    assert given.rate.mean * 1000 == pytest.approx(9)
    assert "arXiv" not in given.source
    published = choose_failure_rate(run().plan, 8)
    assert published.rate == make_prior_failure_rate()
    assert "RSC-1 6.5" in published.source


def test_without_a_number_of_steps_there_are_no_days_and_it_says_so() -> None:
    it = told("train.epochs=1", "train.steps=null", "plan.price_per_gpu_hour=2")
    assert (it.demand.days, it.demand.bill, it.demand.money, it.failures) == (None, None, None, None)
    assert any("train.epochs" in line for line in it.unknown)


def test_repairs_make_a_job_without_spare_nodes_wait() -> None:
    wait, spare = told("plan.repair_hours=24"), told("plan.repair_hours=24", "plan.spare_nodes=8")
    assert wait.demand.effective.p50 < 0.75
    assert spare.demand.effective.p50 > 0.95


def test_what_a_checkpoint_weighs() -> None:
    config = run(*BASE)
    assert checkpoint_bytes(config, PARAMETERS) == 12 * PARAMETERS
    assert checkpoint_bytes(run("precision=fp64"), 10) == 240
    assert stored_bytes(config, PARAMETERS) == 3 * 12 * PARAMETERS
    assert stored_bytes(run("checkpoint=none"), PARAMETERS) == 0


def test_a_save_is_a_copy_to_the_host_and_then_the_file_systems() -> None:
    parts = ["cluster.filesystem.write_gb_s=100", "cluster.node.pcie_gb_s=10"]
    size = 12 * PARAMETERS
    few = estimate_saving(run(*BASE, *parts), PARAMETERS, 16)
    assert few.save.stall_seconds == pytest.approx(size / 16 / 10e9)
    assert few.save.write_seconds == pytest.approx(size / 16 / 10e9 + size / 100e9)
    assert (few.write_known, few.unknown) == (True, ())
    waits = estimate_saving(run(*BASE, *parts, "checkpoint.background=false"), PARAMETERS, 16)
    assert waits.save.stall_seconds == waits.save.write_seconds == pytest.approx(size / 100e9)


def test_what_is_not_known_of_a_save_is_said() -> None:
    nothing = estimate_saving(run(*BASE, "cluster.node.pcie_gb_s=0"), PARAMETERS, 1024)
    assert not nothing.write_known
    assert [line.split(":")[0] for line in nothing.unknown] == [
        "cluster.node.pcie_gb_s",
        "plan.checkpoint_seconds and cluster.filesystem.write_gb_s",
    ]
    measured = ["plan.checkpoint_stall_seconds=2.5", "plan.checkpoint_seconds=40"]
    own = estimate_saving(run(*BASE, *measured), PARAMETERS, 1024)
    assert (own.save, own.write_known, own.unknown) == (Save(2.5, 40), True, ())
