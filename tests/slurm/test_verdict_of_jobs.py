"""The report of a job on several nodes names what holds it back: a cable that the kernel limits. And it is traced."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_client import SlurmCluster, dev_cluster

from hpc_train.api import Run
from hpc_train.training.records.profile_files import list_traces

NODES = 2
RUN = (
    "launch=slurm",
    f"cluster.nodes={NODES}",
    "cluster.node.ranks=1",
    "cluster.fabric.interface=hsn0",
    "launch.threads=1",
    "launch.time_minutes=5",
    "data=text",
    "model.layers=2",
    "model.hidden=128",
    "model.heads=4",
    "model.kv_heads=4",
    "model.feed_forward=384",
    "train.sequence_length=128",
    "train.global_batch=16",
    "train.micro_batch=8",
    "train.steps=25",
    "train.eval_every=0",
    "train.tensorboard=false",
    "checkpoint.every=0",
)


@pytest.fixture
def thin_cables(slurm_cluster: SlurmCluster) -> Iterator[None]:
    """Each node can send a hundredth of what it could."""
    nodes = [f"node{number}" for number in range(1, 5)]
    try:
        for node in nodes:
            assert dev_cluster("net", node, "rate", "50mbit").returncode == 0
        yield
    finally:
        for node in nodes:
            dev_cluster("net", node, "clear")


def report(store: Path, run: Path, *overrides: str) -> dict[str, Any]:
    """Submit a run, wait for its end, and return its report."""
    program = [sys.executable, "-m", "hpc_train"]
    words = [*program, "submit", *RUN, f"data.path={store}", f"run_dir={run}", *overrides]
    submitted = subprocess.run(words, capture_output=True, text=True)
    assert submitted.returncode == 0, submitted.stderr
    status = Run(run).wait(timeout=240)
    assert status.state == "DONE", status
    done = subprocess.run([*program, "report", str(run), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(400)
def test_a_thin_cable_is_the_network(
    slurm_cluster: SlurmCluster, thin_cables: None, store: Path, tmp_path: Path
) -> None:
    found = report(store, tmp_path / "run", "profile.steps=4:5", "profile.ranks=[1]")
    assert found["verdict"]["class"] == "network", found["verdict"]
    assert {phase["node"] for phase in found["phases"]} <= {f"node{number}" for number in range(1, 5)}
    assert len(found["phases"]) == NODES
    assert len(list((tmp_path / "run/logs").glob("*/steps-node-*.bin"))) == NODES
    assert [(trace.rank, trace.first, trace.last) for trace in list_traces(tmp_path / "run")] == [(1, 4, 5)]
