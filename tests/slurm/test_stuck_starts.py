"""Starts that come to nothing, on a real Slurm: an srun without a rank, and the nodes of tasks that do not begin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from slurm_client import SlurmCluster
from training_client import lines, processes_with, submit, wait_until

HOSTS = """
import os, sys
from hpc_train.cluster.hostlist import list_task_hosts
hosts = list_task_hosts(sys.argv[1].split(","), [2, 2], os.environ)
print(hosts[int(os.environ["SLURM_PROCID"])] == os.environ["SLURMD_NODENAME"], os.environ["SLURM_PROCID"])
"""
STUCK_SECONDS = 3


@pytest.mark.parametrize("order", ["block", "cyclic", "plane=2", "plane=1", "cyclic:cyclic"])
def test_each_task_is_where_it_is_said_to_be(slurm_cluster: SlurmCluster, order: str) -> None:
    nodes = sorted(set(slurm_cluster.command("sinfo", "-hN", "-o", "%N").split()))[:2]
    words = [f"--nodelist={','.join(nodes)}", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "-m", order]
    said = slurm_cluster.srun(*words, sys.executable, "-c", HOSTS, ",".join(nodes))
    assert said == [f"True {task}" for task in range(4)]


@pytest.mark.hangs
def test_an_srun_that_starts_no_rank_is_noticed_and_ended(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Its slurmstepds never come to run the task: they wait for a task prolog, which for the agents is quick."""
    prolog, run = tmp_path / "prolog", tmp_path / "run"
    prolog.write_text('#!/bin/sh\n[ "$SLURM_STEP_NAME" = agents ] || sleep 300\n')
    prolog.chmod(0o700)
    deadlines = [f"resilience.hang.start_seconds={STUCK_SECONDS}", "resilience.restarts=1", "launch.max_attempts=1"]
    setup = f"launch.setup=['export SLURM_TASK_PROLOG={prolog}']"
    data = ["data=digits", "model=vit_tiny", "train.steps=2", "checkpoint.every=1", "cluster.node.ranks=1"]
    job = submit(run, *data, *deadlines, setup)
    slurm_cluster.wait_for_state(job, "FAILED", timeout=120)
    events = lines(run / "events.jsonl")
    hangs = [event["why"] for event in events if event["event"] == "hang"]
    assert [why.startswith("srun has started no rank for") for why in hangs] == [True, True]
    (restart,) = (event for event in events if event["event"] == "restart")
    assert (restart["cause"], restart["host"]) == ("a hang", "")
    (last,) = (event for event in events if event["event"] == "gave_up")
    assert "1 restarts in a row brought no newer checkpoint" in last["why"]
    wait_until("the end of all processes", lambda: not processes_with(str(tmp_path)), 60)
