"""Ranks that srun starts as MPI processes on several nodes: parameter servers against an all-reduce."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import h5py
import pytest
from slurm_client import SlurmCluster, train_to_the_end

RUN = [
    "cluster.nodes=2",
    "cluster.node.ranks=2",
    "launch.time_minutes=5",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.feed_forward=64",
    "train.sequence_length=32",
    "train.steps=6",
    "checkpoint.every=3",
    'launch.setup=["export OMPI_MCA_osc=pt2pt"]',  # Debian's Open MPI excludes both that work between nodes
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small token store on the file system that all nodes share."""
    path = tmp_path_factory.mktemp("store") / "text.h5"
    sources = [str(Path(module.__file__).parent) for module in (json, h5py)]
    subprocess.run([sys.executable, "-m", "hpc_train", "data", "build", str(path), *sources], check=True)
    return path


def losses(cluster: SlurmCluster, run: Path, store: Path, *overrides: str) -> list[float]:
    """Train on 2 nodes x 2 ranks to the end."""
    train_to_the_end(cluster, run, f"data.path={store}", *RUN, *overrides)
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)
def test_servers_across_nodes(slurm_cluster: SlurmCluster, store: Path, tmp_path: Path) -> None:
    two = "cluster.node.ranks=1"
    reduced = losses(slurm_cluster, tmp_path / "reduced", store, two)
    served = losses(
        slurm_cluster, tmp_path / "served", store, two, "parallel.server.mode=synchronous", "parallel.server.servers=2"
    )
    assert served == pytest.approx(reduced, rel=1e-4)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_servers_that_train_too_do_not_wait_for_one_another(
    slurm_cluster: SlurmCluster, store: Path, tmp_path: Path
) -> None:
    alone = losses(
        slurm_cluster, tmp_path / "alone", store, "parallel.server.mode=asynchronous", "parallel.server.hybrid=true"
    )
    assert len(alone) == 6
    assert alone[-1] < alone[0]
