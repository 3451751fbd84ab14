"""The verdict on recorded times that were made up: class, rank, share, abstention, order of two causes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from synthetic import EVEN, make_table, waits, write_run

from hpc_train.report.efficiency import Pipeline
from hpc_train.report.findings import Facts
from hpc_train.report.step_table import read_step_table
from hpc_train.report.verdict import Verdict, judge_run
from hpc_train.schedules.generate import generate_order

NODES = {rank: f"node{rank // 2 + 1}" for rank in range(4)}


def judge(tmp_path: Path, change: Callable[[int, int], Mapping[str, Any]], **facts: Any) -> Verdict:
    return judge_run(make_table(tmp_path, 4, change), Facts(**{"node_of_rank": NODES, **facts}))[0]


def test_nothing(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"waits": waits(0.002)})
    assert (verdict.name, verdict.severity, verdict.share_lost) == ("compute", "ok", None)


def test_slow_data_of_all_ranks(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"data": 0.05})
    assert (verdict.name, verdict.ranks) == ("input", ())
    assert verdict.share_lost == pytest.approx(0.05 / 0.145, rel=1e-2)


def test_slow_data_of_one_rank(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"data": 0.05} if rank == 3 else {"waits": waits(0.05), "data": 0.0})
    assert (verdict.name, verdict.ranks, verdict.nodes) == ("input", (3,), ("node2",))


def test_a_delay_in_one_ranks_backward(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"backward": 0.12} if rank == 1 else {"waits": waits(0.06)})
    assert (verdict.name, verdict.ranks, verdict.nodes) == ("straggler", (1,), ("node1",))
    assert verdict.advice[0].override == "launch.exclude=node1"


def test_nodes_that_a_run_leaves_out_stay_out(tmp_path: Path) -> None:
    nodes = {rank: f"node{rank}" for rank in range(4)}
    table = make_table(tmp_path, 4, lambda rank, step: {"backward": 0.12} if rank == 1 else {"waits": waits(0.06)})
    verdict, _ = judge_run(table, Facts(node_of_rank=nodes, excluded_nodes="old[1-3]"))
    assert verdict.advice[0].override == 'launch.exclude="old[1-3],node1"'


def test_a_trace_is_of_the_run_while_that_goes_on_else_of_the_next(tmp_path: Path) -> None:
    table = make_table(tmp_path, 4, lambda rank, step: {"backward": 0.12} if rank == 1 else {"waits": waits(0.06)})
    verdict, _ = judge_run(table, Facts(live="'a run'"))
    assert verdict.advice[-1].why.startswith("hpc-train profile 'a run' --ranks 1: ")
    verdict, _ = judge_run(table, Facts())
    assert verdict.advice[-1].words == "profile.steps=10:14 'profile.ranks=[1]'"


def test_a_job_does_not_leave_out_its_only_node(tmp_path: Path) -> None:
    table = make_table(tmp_path, 4, lambda rank, step: {"backward": 0.12} if rank == 1 else {"waits": waits(0.06)})
    verdict, _ = judge_run(table, Facts(node_of_rank=dict.fromkeys(range(4), "node1")))
    assert (verdict.name, verdict.nodes) == ("straggler", ("node1",))
    assert not [setting for setting in verdict.advice if "exclude" in setting.override]


def test_a_slow_node(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"forward": 0.09} if rank >= 2 else {"waits": waits(0.06)})
    assert (verdict.name, verdict.ranks, verdict.nodes) == ("straggler", (2, 3), ("node2",))


def test_a_delay_between_the_parts_of_a_step(tmp_path: Path) -> None:
    late = sum(EVEN.values()) + 0.05
    verdict = judge(tmp_path, lambda rank, step: {"total": late} if rank == 3 else {"waits": waits(0.05)})
    assert (verdict.name, verdict.ranks) == ("straggler", (3,))
    assert verdict.evidence[0].startswith("rank 3 spends 50 ms longer than the others outside of forward, backward")


def test_ranks_that_are_slow_in_turn_are_no_stragglers(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"backward": 0.1} if step % 4 == rank else {"waits": waits(0.04)})
    assert (verdict.name, verdict.ranks) == ("imbalance", ())
    assert verdict.share_lost == pytest.approx(0.04 / 0.136, rel=1e-2)
    assert verdict.evidence[0].startswith("in 100% of the steps one rank takes longer than it usually does, another")


def test_a_rank_that_is_slow_in_some_steps(tmp_path: Path) -> None:
    """In two of five steps, so that most steps are as they should be."""

    def change(rank: int, step: int) -> Mapping[str, Any]:
        late = step % 5 < 2
        return {"backward": 0.18} if late and rank == 2 else {"waits": waits(0.12 * late)}

    verdict = judge(tmp_path, change)
    assert (verdict.name, verdict.ranks, verdict.nodes) == ("straggler", (2,), ("node2",))
    assert verdict.share_lost == pytest.approx(0.4 * 0.12 / (0.096 + 0.4 * 0.12), rel=1e-2)
    assert "% of the steps this rank takes longer than usual, and the others wait" in verdict.evidence[0]


def test_one_long_pause_is_nobodys_habit(tmp_path: Path) -> None:
    pause = {"backward": 5.0}
    verdict = judge(tmp_path, lambda rank, step: (pause if rank == 1 else {"waits": waits(5.0)}) if step == 20 else {})
    assert verdict.name == "balanced"


def test_stages_that_are_late_in_turn_wait_for_no_link(tmp_path: Path) -> None:
    """Two stages on one rank each: each waits for the other in half of the steps, and never both."""

    def change(rank: int, step: int) -> Mapping[str, Any]:
        return {"backward": 0.12} if step % 2 == rank else {"waits": waits(0.06)}

    order = generate_order("gpipe", 2, 64)
    pipeline = Pipeline(order, stage_of_rank=(0, 1), costs=(1.0, 1.0), micro_batches=64)
    table = make_table(tmp_path, 2, change)
    verdict, losses = judge_run(table, Facts(node_of_rank=NODES, pipeline=pipeline))
    assert (verdict.name, verdict.ranks) == ("imbalance", ())
    assert losses is not None
    assert losses.compute_share("transfer") < 0.02


def test_slow_links(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"waits": waits(0.03, 0.03)})
    assert verdict.name == "network"
    assert verdict.severity == "critical"


def test_a_rank_that_recorded_nothing_may_be_what_the_others_wait_for(tmp_path: Path) -> None:
    nodes = dict.fromkeys(range(5), "node1")
    verdict = judge(tmp_path, lambda rank, step: {"waits": waits(0.03, 0.03)}, node_of_rank=nodes)
    assert verdict.name == "not enough data"
    assert verdict.evidence[0].startswith("rank 4 recorded nothing")


def test_small_operations(tmp_path: Path) -> None:
    assert judge(tmp_path, lambda rank, step: {"launch": 0.07}).name == "launch"


def test_collectives_of_a_small_model_are_not_the_networks_fault(tmp_path: Path) -> None:
    def change(rank: int, step: int) -> Mapping[str, Any]:
        return {"waits": waits(0.02, 0.02), "collectives": 30}

    facts = {"strategy": "zero3", "micro_batch": 2}
    small = judge(tmp_path / "small", change, collective_kib=700.0, **facts)
    assert (small.name, small.advice[0].override) == ("launch", "parallel.strategy=ddp")
    assert small.advice[1].override == "train.global_batch=2 train.micro_batch=4"
    assert small.evidence[0].startswith(
        "30 collectives per step carry 700 KiB each and take 1.33 ms each, 40 ms togeth"
    )
    assert judge(tmp_path / "large", change, collective_kib=3000.0, **facts).name == "network"
    slow = judge(tmp_path / "slow", lambda rank, step: {**change(rank, step), "collectives": 10}, collective_kib=700.0)
    assert slow.name == "network"
    # 4 ms for a few KiB: no link is so thin; 20 ms: something is wrong between the nodes.
    for collectives, name in ((10, "launch"), (2, "network")):
        tiny = judge(
            tmp_path / name,
            lambda rank, step, count=collectives: {**change(rank, step), "collectives": count},
            collective_kib=11.0,
        )
        assert tiny.name == name


def test_half_of_the_ranks_are_slow(tmp_path: Path) -> None:
    """Two ranks on one busy core: 20 ms of a step of 122 ms, which is 10 ms from the mean of the middle two."""
    verdict = judge(
        tmp_path, lambda rank, step: {"forward": 0.05} if rank % 2 else {"waits": waits(0.01, 0.01)}, node_of_rank={}
    )
    assert (verdict.name, verdict.ranks) == ("straggler", (1, 3))


@pytest.mark.parametrize(("blocked", "name"), [(0.04, "straggler"), (0.06, "network")])
def test_a_slow_rank_is_late_inside_collectives_too(tmp_path: Path, blocked: float, name: str) -> None:
    """What blocks even the slow rank is the network only if that costs clearly more than the rank itself does."""

    def change(rank: int, step: int) -> Mapping[str, Any]:
        return {"forward": 0.06, "waits": waits(blocked)} if rank == 2 else {"waits": waits(blocked + 0.03)}

    assert judge(tmp_path, change).name == name


def test_slow_saves(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"save": 0.5 if step % 10 == 0 else 0.0}, checkpoint_every=10)
    assert verdict.name == "checkpoint"
    assert "checkpoint.every=40" in [setting.override for setting in verdict.advice]


def test_memory_that_grows(tmp_path: Path) -> None:
    verdict = judge(tmp_path, lambda rank, step: {"resident": 500.0 + (10 * step if rank == 2 else 0)}, steps_left=100)
    assert (verdict.name, verdict.ranks) == ("memory", (2,))


def test_memory_that_grows_unevenly(tmp_path: Path) -> None:
    """13 steps of a real rank that gained 16 MiB in each, while its allocator took and gave back others."""
    resident = [439.0, 447.0, 455.2, 469.2, 485.3, 514.0, 517.3, 546.0, 568.4, 578.0, 594.9, 610.9, 613.3]

    def change(rank: int, step: int) -> Mapping[str, Any]:
        return {"resident": resident[step - 1]} if rank == 0 else {}

    table = make_table(tmp_path, 4, change, steps=len(resident))
    verdict = judge_run(table, Facts(node_of_rank=NODES))[0]
    assert (verdict.name, verdict.ranks) == ("memory", (0,))


@pytest.mark.parametrize("jump", [24, 28, 33])
def test_memory_that_grows_once_does_not_grow(tmp_path: Path, jump: int) -> None:
    assert judge(tmp_path, lambda rank, step: {"resident": 500.0 + (step > jump) * 300}).name == "compute"


def test_memory_that_settles_does_not_grow(tmp_path: Path) -> None:
    assert judge(tmp_path, lambda rank, step: {"resident": 500.0 + min(step, 12) * 40}).name == "compute"


@pytest.mark.parametrize(("data", "late", "name"), [(0.08, 0.05, "input"), (0.05, 0.08, "straggler")])
def test_the_larger_of_two_is_first(tmp_path: Path, data: float, late: float, name: str) -> None:
    def change(rank: int, step: int) -> dict[str, Any]:
        return {"data": data, **({"backward": EVEN["backward"] + late} if rank == 1 else {"waits": waits(late)})}

    verdict = judge(tmp_path, change)
    assert verdict.name == name
    assert [finding.name for finding in verdict.further] == ["straggler" if name == "input" else "input"]


def test_too_few_steps(tmp_path: Path) -> None:
    write_run(tmp_path, 2, range(1, 6))
    assert judge_run(read_step_table(tmp_path), Facts())[0].name == "not enough data"
    assert judge_run(None, Facts())[0].name == "not enough data"


def test_what_a_gpu_leaves_open_is_said(tmp_path: Path) -> None:
    """Parts of steps are not measured there; data, saves and memory are."""
    nothing = {name: float("nan") for name in ("forward", "backward", "clip", "update", "blocked_backward")}
    facts = {"accelerator": True}
    verdict = judge(tmp_path, lambda rank, step: {**nothing, "total": 0.1}, **facts)
    assert verdict.name == "not enough data"
    assert "ranks on processors" in verdict.evidence[0]


def test_slow_data_is_named_on_a_gpu_too(tmp_path: Path) -> None:
    nothing = {name: float("nan") for name in ("forward", "backward", "clip", "update", "blocked_backward")}
    verdict = judge(tmp_path, lambda rank, step: {**nothing, "total": 0.1, "data": 0.04}, accelerator=True)
    assert verdict.name == "input"
