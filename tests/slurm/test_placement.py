"""Ranks are placed by the switches that Slurm, or a file, tells of; a training gives the same numbers all the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_client import SlurmCluster, train_to_the_end

RUN = [
    "cluster.nodes=4",
    "cluster.node.ranks=1",
    "cluster.fabric.oversubscription=8",
    "launch.time_minutes=5",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.feed_forward=64",
    "train.sequence_length=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.steps=6",
    "train.eval_every=0",
    "checkpoint.every=0",
    "precision=fp64",
]
PAIRS = ["parallel.strategy=zero3", "parallel.dp_replicate=2", "parallel.dp_shard=2"]
DEALT = "SwitchName=left Nodes=node[1,3]\nSwitchName=right Nodes=node[2,4]\nSwitchName=top Switches=left,right\n"
"""The nodes as if they hung on other leaves than they do: in Slurm's order every second one on the same."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "text.h5"
    source = str(Path(json.__file__).parent)
    subprocess.run([sys.executable, "-m", "hpc_train", "data", "build", str(path), source], check=True)
    return path


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    for job in slurm_cluster.squeue("-o", "%i"):
        slurm_cluster.scancel(job)


def train(cluster: SlurmCluster, run: Path, store: Path, *overrides: str) -> dict[str, Any]:
    """Train on all four nodes to the end; returns rankmap.json."""
    train_to_the_end(cluster, run, f"data.path={store}", *RUN, *overrides)
    found: dict[str, Any] = json.loads((run / "rankmap.json").read_text())
    return found


def numbers(run: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


def hosts(rank_map: dict[str, Any]) -> list[str]:
    """In the order of their ranks."""
    return [it["host"] for it in sorted(rank_map["ranks"], key=lambda it: int(it["rank"]))]


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("topology") / "topology.conf"
    path.write_text(DEALT)
    return f"cluster.topology={path}"


@pytest.fixture(scope="module")
def plain(slurm_cluster: SlurmCluster, store: Path, topology: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the launcher's order, whose numbers the others must give."""
    run = tmp_path_factory.mktemp("plain") / "run"
    found = train(slurm_cluster, run, store, *PAIRS, topology, "launch.placement=launcher")
    assert hosts(found) == ["node1", "node2", "node3", "node4"]
    return run


@pytest.mark.timeout(600)
def test_groups_are_put_under_one_leaf(
    slurm_cluster: SlurmCluster, store: Path, topology: str, plain: Path, tmp_path: Path
) -> None:
    placed = tmp_path / "placed"
    after = train(slurm_cluster, placed, store, *PAIRS, topology, "launch.placement=strict")
    assert {frozenset(hosts(after)[:2]), frozenset(hosts(after)[2:])} == {
        frozenset({"node1", "node3"}),
        frozenset({"node2", "node4"}),
    }
    assert [it["process"] for it in sorted(after["ranks"], key=lambda it: int(it["rank"]))] != [0, 1, 2, 3]
    assert after["straddling"]["dp_shard"]["leaf"] == {"groups": 2, "identity": 2, "placed": 0}
    assert after["cost"]["placed"] < after["cost"]["identity"]
    for one, other in zip(numbers(plain), numbers(placed), strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    said = (placed / "logs/0" / f"task-{after['ranks'][0]['process']}.log").read_text()
    assert f"placement: {after['reason']}" in said


@pytest.mark.long
@pytest.mark.timeout(600)
def test_slurms_own_order_is_kept_where_it_is_the_best(
    slurm_cluster: SlurmCluster, store: Path, tmp_path: Path
) -> None:
    """The real leaves, node1 and node2, node3 and node4, are what SLURM_TOPOLOGY_ADDR says on every node."""
    found = train(slurm_cluster, tmp_path / "run", store, *PAIRS, "launch.placement=strict")
    assert hosts(found) == ["node1", "node2", "node3", "node4"]
    assert found["straddling"]["dp_shard"]["leaf"]["identity"] == 0
    assert found["cost"]["identity"] == found["cost"]["placed"] > 0
    assert "no gain" in found["reason"]


@pytest.mark.timeout(600)
def test_mpi_follows_the_placement(
    slurm_cluster: SlurmCluster, store: Path, topology: str, plain: Path, tmp_path: Path
) -> None:
    """The MPI library numbers its processes as Slurm does, gradients are reduced over our ranks."""
    placed = tmp_path / "placed"
    mpi = ("parallel.reduce_with=mpi", "launch.placement=strict")
    found = train(slurm_cluster, placed, store, topology, *mpi)
    assert hosts(found) != ["node1", "node2", "node3", "node4"]
    for one, other in zip(numbers(plain), numbers(placed), strict=True):
        assert one == pytest.approx(other, rel=1e-10)


def test_ranks_that_mpi_did_not_start_are_refused_in_one_line(
    slurm_cluster: SlurmCluster, store: Path, tmp_path: Path
) -> None:
    """`--mpi=none` leaves a process alone with its MPI library, which aborts it or says that it is 0 of 1."""
    train_here = [sys.executable, "-m", "hpc_train", "train", f"run_dir={tmp_path / 'run'}", f"data.path={store}"]
    words = ["srun", "-N2", "--mpi=none", *train_here, "parallel.reduce_with=mpi", "train.steps=1"]
    # In a folder of its own: a rank that is killed while it waits for the others leaves the file by which they meet.
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("hpc-train:")]
    assert lines == ["hpc-train: parallel.reduce_with=mpi: srun gave these processes no MPI; use srun --mpi=pmix"]
    assert "Traceback" not in done.stderr
