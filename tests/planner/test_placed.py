"""What the real switches of cluster.topology make of a candidate, beyond how many nodes a middle one has."""

from __future__ import annotations

from pathlib import Path

import pytest
from planner_runs import asked, run

from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.fabric import estimate_placed, first_nodes
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import Estimate, estimate_jobs

RUN = (
    "cluster=dgx_h100",
    "cluster.nodes=8",
    "cluster.fabric.oversubscription=16",
    "model=llama_70b",
    "precision=bf16",
    "train.global_batch=512",
    "train.sequence_length=4096",
)
STAGES = {pp: (f"parallel.pp={pp}", f"parallel.dp_shard={16 // pp}", "parallel.cp=4") for pp in (2, 4)}
FREE = ("parallel=auto", "parallel.cp=4", "parallel.tp=1")


def leaves(folder: Path, *sizes: int) -> str:
    """topology.conf of leaves of so many nodes, n000 on; returns the override."""
    lines, first = [], 0
    for number, size in enumerate(sizes):
        lines.append(f"SwitchName=leaf{number} Nodes=n[{first:03d}-{first + size - 1:03d}]")
        first += size
    lines.append(f"SwitchName=core Switches=leaf[0-{len(sizes) - 1}]")
    path = folder / f"{'-'.join(map(str, sizes))}.conf"
    path.write_text("\n".join(lines) + "\n")
    return f"cluster.topology={path}"


def both(stages: int, topology: str) -> tuple[Estimate, Estimate]:
    """Of one job: by the closed form, and placed."""
    config = run(*RUN, "parallel=fsdp", *STAGES[stages], "parallel.pipeline.schedule=1f1b", topology)
    found = estimate_jobs(jobs_from_config(config), default_constants())
    return found, estimate_placed(config, 64, found)


def test_switches_that_are_alike_and_filled_change_nothing(tmp_path: Path) -> None:
    for stages in STAGES:
        found, there = both(stages, leaves(tmp_path, 4, 4, 4))
        assert float(there.time.step) == pytest.approx(float(found.time.step), rel=1e-12)
        assert float(there.mfu) == pytest.approx(float(found.mfu), rel=1e-12)


def test_a_group_that_straddles_two_leaves_pays_for_it(tmp_path: Path) -> None:
    """Leaves of five and three nodes: of eight, four cannot lie on each."""
    topology = leaves(tmp_path, 5, 4, 3, 4)
    for stages in STAGES:
        found, there = both(stages, topology)
        assert float(there.time.data) > 1.5 * float(found.time.data)
        assert float(there.time.compute) == float(found.time.compute)
        slower = float(there.time.step) / float(found.time.step)
        assert float(there.mfu) == pytest.approx(float(found.mfu) / slower)
        assert float(there.tokens_per_second) == pytest.approx(float(found.tokens_per_second) / slower)


def test_the_search_pays_for_straddling(tmp_path: Path) -> None:
    """To the closed form the two files are the same: a middle leaf has four nodes."""
    for stages in STAGES:
        fixed = ("parallel=fsdp", *STAGES[stages], "parallel.pipeline.schedule=1f1b")
        even, odd = (asked(*RUN, *fixed, leaves(tmp_path, *sizes)).best for sizes in ((4, 4), (5, 4, 3, 4)))
        assert even is not None
        assert odd is not None
        assert odd.step.p50 == pytest.approx(float(both(stages, leaves(tmp_path, 5, 4, 3, 4))[1].time.step))
        assert odd.step.p50 > 1.01 * even.step.p50


def test_the_nodes_are_told_and_too_few_are_left_alone(tmp_path: Path) -> None:
    answer = asked(*RUN, *FREE, leaves(tmp_path, 5, 4))
    assert any("placed on n000 to n007 of" in note for note in answer.notes)
    few = run(*RUN, "parallel=fsdp", leaves(tmp_path, 2, 3))
    assert first_nodes(few, 64) == ()
