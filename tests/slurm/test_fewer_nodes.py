"""resilience.elastic on a real Slurm: a run loses a node, goes on with those that are left, and comes back to all.

Takes a minute: a node is lost after ten seconds of silence, and the ranks start three times.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from slurm_client import SlurmCluster
from training_client import TINY, kinds, lines, steps_done, submit, tensors, wait_until

STEPS = 300
SETTINGS = (
    *("model=llama_tiny", *TINY, "model.kv_heads=2", "precision=fp64", f"train.steps={STEPS}", "train.micro_batch=2"),
    *("train.global_batch=12", "train.eval_every=0", "train.tensorboard=false", "train.noise_scale.every=0"),
    *("checkpoint.every=10", "optim.eps=1e-6", "cluster.nodes=3", "cluster.node.ranks=1", "data=text"),
)
ELASTIC = ("resilience.elastic.min_nodes=2", "resilience.elastic.grow_seconds=1")


def nodes_of(run: Path, attempt: int) -> int:
    return len(json.loads((run / f"logs/{attempt}/attempt.json").read_text())["nodes"].split(","))


@pytest.mark.long
def test_a_run_goes_on_with_fewer_nodes_and_comes_back_to_all(
    slurm_cluster: SlurmCluster, store: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, f"data.path={store}")
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    slurm_cluster.wait_for_state(submit(undisturbed, *settings), "COMPLETED", timeout=180)
    job = submit(run, *settings, *ELASTIC)
    wait_until("steps", lambda: steps_done(run) > 20)
    busy = slurm_cluster.sbatch("-N1", "--exclusive", "-t10", "-o", "/dev/null", "--wrap", "sleep 600")
    slurm_cluster.wait_for_state(busy, "RUNNING")
    hosts = [rank["host"] for rank in json.loads((run / "rankmap.json").read_text())["ranks"]]
    with slurm_cluster.powered_off(hosts[2]):
        wait_until("the restart", lambda: "restart" in kinds(run), timeout=60)
        (again,) = (event for event in lines(run / "events.jsonl") if event["event"] == "restart")
        assert (again["action"], again["cause"]) == ("restarted", "a lost node")
        assert " on 2 of 3 nodes (restart 1 of 3" in again["why"]
        wait_until("the second start", lambda: kinds(run).count("resume") == 1, timeout=60)
        assert "grow" not in kinds(run)
        slurm_cluster.scancel(busy)
        wait_until("the missing node", lambda: "grow" in kinds(run), timeout=60)
        slurm_cluster.wait_for_state(job, "COMPLETED", timeout=180)
    assert [nodes_of(run, attempt) for attempt in range(3)] == [3, 2, 3]
    assert slurm_cluster.job(job)["ExcNodeList"] == hosts[2]
    expected, actual = tensors(undisturbed, STEPS), tensors(run, STEPS)
    # Sums in another order: 1e-16 at each step, which 300 steps of AdamW make more of.
    assert max(float(np.abs(expected[name] - actual[name]).max()) for name in expected) < 1e-7
    assert [line["step"] for line in lines(run / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert len({line["tokens"] for line in lines(run / "metrics.jsonl")}) == 1
