"""The drill: a sweep over two resource shapes in which one point raises, one loses its node and one is preempted.

Takes over a minute, of waiting for Slurm: a node is lost and given up, and what it held is requeued and trained again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_client import SlurmCluster
from sweep_client import Sweep, ended

STEPS = 1500
RAISES = "1:train:2:raise"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_sweep_that_meets_everything_is_told_of_truly_and_finished(slurm_cluster: SlurmCluster, sweep: Sweep) -> None:
    said = sweep.submit(
        *("cluster.nodes=1,2", "train.seed=0,1,2", f"train.steps={STEPS}", "checkpoint.every=25"),
        *("cluster.slurm.exclusive=true", "launch.signal_seconds=10"),
        faults=RAISES,
    )
    small, large = (job["points"] for job in said["jobs"])
    assert (len(small), len(large)) == (3, 3)

    preempted = wait_for_a_running_one(sweep, small)
    wanted = sweep.rows()[preempted]["nodes"][0]
    options = ("-p", "urgent", "-w", wanted, "--exclusive", "-t1", "-o", "/dev/null")
    urgent = slurm_cluster.sbatch(*options, "--wrap", "sleep 3")
    sweep.wait("the preemption", lambda rows: rows[preempted]["state"] in ("REQUEUED", "PREEMPTED"))
    slurm_cluster.scancel(urgent)

    (raised,) = wait_for(sweep, lambda rows: [name for name in large if rows[name]["state"] == "FAILED"])
    lost = wait_for_a_running_one(sweep, [name for name in large if name != raised])
    node = sweep.rows()[lost]["nodes"][-1]
    with slurm_cluster.powered_off(node):
        sweep.wait("the requeue", lambda rows: requeues(sweep.point(lost)) > 0 or rows[lost]["attempt"] == 1)
    sweep.wait("the end of all", ended, timeout=300)

    rows = sweep.rows()
    assert {name: row["state"] for name, row in rows.items()} == {
        name: "FAILED" if name == raised else "DONE" for name in said["points"]
    }
    assert rows[preempted]["attempt"] >= 1
    assert rows[lost]["attempt"] >= 1
    why = rows[raised]["reason"]
    assert why.endswith("RuntimeError: a fault of the user's model")
    assert sweep.run("logs", "--first-error", str(sweep.path)) == f"{raised}: FAILED: {why}\n"

    resumed = json.loads(sweep.run("resume", "--json", str(sweep.path)))
    assert resumed["points"] == [raised]
    sweep.wait("the end of the second go", ended)
    results = json.loads(sweep.run("results", "--json", str(sweep.path)))
    assert [(row["state"], row["final"]["step"]) for row in results] == [("DONE", STEPS)] * 6
    for name in said["points"]:
        assert steps_of(sweep.point(name)) == list(range(1, STEPS + 1)), "each step once, whatever happened"


def wait_for(sweep: Sweep, found: Callable[[dict[str, dict[str, Any]]], list[str]]) -> list[str]:
    """What `found` gives, as soon as it is something."""
    seen: list[str] = []

    def look(rows: dict[str, dict[str, Any]]) -> bool:
        seen[:] = found(rows)
        return bool(seen)

    sweep.wait("a point", look, timeout=240)
    return seen


def wait_for_a_running_one(sweep: Sweep, names: list[str]) -> str:
    """One of these points that runs and has a checkpoint to go on from."""
    return wait_for(
        sweep,
        lambda rows: [name for name in names if rows[name]["state"] == "RUNNING" and sweep.steps(name) >= 30],
    )[0]


def requeues(run: Path) -> int:
    return sum(
        event["event"] == "requeue" for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
    )


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
