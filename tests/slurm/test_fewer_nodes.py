"""Jobs with fewer nodes than they want, on a real Slurm: what it answers about them, and resilience.elastic.

A run that loses a node, goes on with those that are left, and comes back to all takes a minute: a node is lost after
ten seconds of silence, and the ranks start three times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from slurm_client import SlurmCluster
from training_client import TINY, kinds, lines, steps_done, submit, tensors, wait_until

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.launch.slurm.node_availability import read_availability
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.slurm.waiting_time import estimate_wait, fit_demand
from hpc_train.launch.submit import default_to_slurm
from hpc_train.training.run_directory import RunDirectory, locate_run_directory

STEPS = 300
SETTINGS = (
    *("model=llama_tiny", *TINY, "model.kv_heads=2", "precision=fp64", f"train.steps={STEPS}", "train.micro_batch=2"),
    *("train.global_batch=12", "train.eval_every=0", "train.tensorboard=false", "train.noise_scale.every=0"),
    *("checkpoint.every=10", "optim.eps=1e-6", "cluster.nodes=3", "cluster.node.ranks=1", "data=text"),
)
ELASTIC = ("resilience.elastic.min_nodes=2", "resilience.elastic.grow_seconds=1")


def nodes_of(run: Path, attempt: int) -> int:
    return len(json.loads((run / f"logs/{attempt}/attempt.json").read_text())["nodes"].split(","))


@dataclass(frozen=True)
class Questions:
    """Asks a real Slurm about jobs of a run on two nodes with two spares."""

    config: RunConfig
    folder: RunDirectory

    def wait(self, nodes: int, *exclude: str) -> float | None:
        return estimate_wait(self.config, self.folder, nodes, exclude)

    def fit(self, wanted: int, *exclude: str) -> tuple[int, tuple[str, ...]]:
        """Return nodes and exclusions of a job whose ranks need `wanted` nodes."""
        demand = fit_demand(self.config, self.folder, wanted, exclude)
        return demand.nodes, tuple(demand.exclude)


def make_questions(run: Path, *overrides: str) -> Questions:
    words = ["cluster.nodes=2", "cluster.node.ranks=1", "launch.spares=2", "launch.time_minutes=10"]
    config = compose(default_to_slurm([f"run_dir={run}", *words, *overrides]))
    return Questions(config, locate_run_directory(config))


@contextmanager
def drained(cluster: SlurmCluster, node: str) -> Iterator[None]:
    cluster.scontrol("update", f"nodename={node}", "state=drain", "reason=a test")
    try:
        yield
    finally:
        cluster.scontrol("update", f"nodename={node}", "state=resume")
        cluster.wait_for_node(node)  # for a second or two Slurm does not take it for one that responds


@contextmanager
def reserved(cluster: SlurmCluster, name: str, *nodes: str) -> Iterator[None]:
    where = [f"reservation={name}", f"nodes={','.join(nodes)}", "users=root"]
    cluster.scontrol("create", *where, "starttime=now", "duration=60", "flags=ignore_jobs")
    try:
        yield
    finally:
        cluster.scontrol("delete", f"reservation={name}")


def test_what_slurm_answers_about_nodes_that_it_has_and_has_not(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    ask = make_questions(tmp_path)
    nodes = sorted(set(slurm_cluster.command("sinfo", "-hN", "-p", "batch", "-o", "%N").split()))
    free = ask.wait(4)
    assert free is not None
    assert free <= 5
    assert (ask.wait(5), ask.wait(4, nodes[0]), ask.wait(1, *nodes)) == (None, None, None)
    assert ask.fit(2, nodes[0]) == (3, (nodes[0],)), "a spare node is given up"
    assert ask.fit(4, nodes[0]) == (4, ()), "and then the exclusion"
    assert ask.fit(5, nodes[0]) == (7, ()), "nothing helps"
    with drained(slurm_cluster, nodes[3]):
        assert (ask.wait(4), ask.wait(3, nodes[0])) == (None, None)
        assert ask.fit(2, nodes[0]) == (2, (nodes[0],))
        assert ask.fit(2, nodes[0], nodes[1]) == (2, (nodes[0],))
        assert ask.fit(2, nodes[3]) == (3, (nodes[3],)), "the one that is left out is the one that is drained"


def test_what_slurm_answers_about_nodes_that_are_busy_or_reserved(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    ask = make_questions(tmp_path)
    nodes = sorted(set(slurm_cluster.command("sinfo", "-hN", "-p", "batch", "-o", "%N").split()))
    where = ("-N2", "-w", f"{nodes[0]},{nodes[1]}", "--exclusive", "-t10", "-o", "/dev/null")
    job = slurm_cluster.sbatch(*where, "--wrap", "sleep 600")
    try:
        slurm_cluster.wait_for_state(job, "RUNNING")
        soon, later = ask.wait(2), ask.wait(3)
        assert soon is not None
        assert later is not None
        assert soon <= 5 < 400 < later <= 660
        assert ask.fit(2, nodes[2]) == (3, (nodes[2],)), "a job may wait for busy nodes"
        available = read_availability(None, None, run_client)
        assert available is not None
        free_in = dict(zip(available.nodes, available.latest.tolist(), strict=True))
        assert [400 < free_in[node] <= 600 for node in nodes] == [True, True, False, False]
    finally:
        slurm_cluster.scancel(job)
        slurm_cluster.wait_for_state(job, "CANCELLED", timeout=60)
    assert make_questions(tmp_path, "launch.reservation=nowhere").wait(1) is None
    with reserved(slurm_cluster, "two", *nodes[:2]):
        inside = make_questions(tmp_path, "launch.reservation=two", "launch.spares=0")
        assert (inside.wait(2) or 0.0) <= 5
        assert inside.wait(3) is None
        assert inside.fit(2, nodes[0]) == (2, ()), "a reservation has no other nodes"
        assert ask.fit(2, nodes[2]) == (2, ()), "nodes that are reserved for others are not there"


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
