"""Where groups of ranks cross switches, when a file says how nodes hang together."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from planner_runs import run

from hpc_train.cluster.calibration import Calibration, LevelConstants, write_calibration
from hpc_train.errors import UserError
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import Jobs
from hpc_train.planner.model.step_time import estimate_jobs

RUN = ("cluster=dgx_h100", "model=llama_70b", "precision=bf16", "parallel=fsdp", "train.global_batch=512")
TAPERED = ("cluster.fabric.oversubscription=4", "cluster.fabric.group_oversubscription=8")


def tree(path: Path, nodes_per_leaf: int, leaves: int, spines: int = 1) -> str:
    """topology.conf of leaves under spines under a core; returns the override."""
    lines, each = [], leaves // spines
    for leaf in range(leaves):
        first = leaf * nodes_per_leaf
        lines.append(f"SwitchName=leaf{leaf} Nodes=n[{first:03d}-{first + nodes_per_leaf - 1:03d}]")
    for spine in range(spines):
        lines.append(f"SwitchName=spine{spine} Switches=leaf[{spine * each}-{spine * each + each - 1}]")
    if spines > 1:
        lines.append(f"SwitchName=core Switches=spine[0-{spines - 1}]")
    path.write_text("\n".join(lines) + "\n")
    return f"cluster.topology={path}"


def job(*overrides: str) -> Jobs:
    return jobs_from_config(run(*RUN, *TAPERED, "cluster.nodes=16", *overrides))


def test_the_file_says_how_many_nodes_share_a_switch(tmp_path: Path) -> None:
    jobs = job(tree(tmp_path / "two.conf", 4, 8, 2))
    assert (float(jobs.leaf_gpus), float(jobs.group_gpus)) == (32, 128)
    assert float(jobs.leaf_oversubscription) == 4
    one = job(tree(tmp_path / "one.conf", 16, 1))
    assert math.isinf(float(one.leaf_gpus))
    assert math.isinf(float(one.group_gpus))


def test_a_step_is_slower_where_its_nodes_lie_on_more_leaves(tmp_path: Path) -> None:
    times = [
        float(estimate_jobs(job(tree(tmp_path / f"{size}.conf", size, 64 // size)), default_constants()).time.data)
        for size in (32, 16, 8, 4)
    ]
    assert times[0] == times[1], "all sixteen nodes are under one leaf"
    assert times[1] < times[2] == times[3]


def test_what_was_measured_of_a_level_goes_before_what_is_stated(tmp_path: Path) -> None:
    levels = (LevelConstants("node", 1e-5, 400e9), LevelConstants("leaf", 2e-5, 800e9))
    write_calibration(tmp_path / "c.json", Calibration("dgx_h100", "nccl", "2025-01-01", levels))
    jobs = job(tree(tmp_path / "t.conf", 4, 8), f"cluster.calibration={tmp_path / 'c.json'}")
    assert float(jobs.leaf_oversubscription) == pytest.approx(4 * 400 / 800)
    assert float(jobs.nic_bandwidth) == pytest.approx(400e9 / 8)


def test_a_file_that_tells_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        job(f"cluster.topology={tmp_path / 'none.conf'}")


def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "changing.conf"
    assert float(job(tree(path, 4, 8)).leaf_gpus) == 32
    changed = tree(path, 8, 4)
    assert float(jobs_from_config(run(*RUN, *TAPERED, "cluster.nodes=16", changed)).leaf_gpus) == 64
