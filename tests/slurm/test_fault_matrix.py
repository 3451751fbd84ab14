"""Every fault in every phase of a run, on a real Slurm: noticed in time, the right rank named, the same numbers.

Half a minute a cell, because a hang is noticed after ten seconds and each start of the ranks imports torch. `make test`
draws one; with HPC_TRAIN_FAULT_TABLE=FILE every cell adds a line of its times to that file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from drawn import draw
from fault_checks import (
    FAULTY,
    NOTICES,
    Cell,
    assert_culprit,
    assert_no_alarm,
    assert_noticed,
    describe_faulty_run,
    list_leftovers,
)
from fault_kinds import KINDS, ORDERS, PHASES, Scene, host_of_task_1
from slurm_client import SlurmCluster
from training_client import assert_same_result, hpc_train, kinds, lines, submit, wait_until

from hpc_train.resilience.chaos import give_order

STEPS, EVERY = 60, 20
WITHOUT_A_SAVE = ("start", "first step")
LOADS = ("load after a restart", "load after a requeue")
DRAWN = ("raise in load after a restart",)
"""Elsewhere it would end the run. `make test` meets each kind once, in test_campaign.py and test_faults_of_jobs.py."""


@pytest.fixture(scope="module")
def settings(store: Path) -> list[str]:
    exported = "launch.export=[FAULTS,FAULT_FOLDER]"
    lengths = [f"train.steps={STEPS}", f"checkpoint.every={EVERY}", "train.eval_every=10"]
    return [*describe_faulty_run(store), *lengths, exported, "launch.spares=1"]


def start(run: Path, settings: list[str], faults: str = "") -> str:
    """Submit a run with faults; returns the job id."""
    run.parent.mkdir(parents=True, exist_ok=True)
    return submit(run, *settings, **variables(run, faults))


def variables(run: Path, faults: str = "") -> dict[str, str]:
    """The environment in which a run with faults is submitted or resumed."""
    python = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))
    return {"FAULTS": faults, "FAULT_FOLDER": str(run.parent), "PYTHONPATH": python}


@pytest.fixture(scope="module")
def undisturbed(slurm_cluster: SlurmCluster, settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run without faults."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    slurm_cluster.wait_for_state(start(run, settings), "COMPLETED", timeout=180)
    return run


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    for job in slurm_cluster.squeue("-o", "%A"):
        slurm_cluster.scancel(job)


CELLS = [f"{fault} in {phase}" for fault, kind in KINDS.items() for phase in kind.phases]


@pytest.mark.parametrize("cell", draw(CELLS, DRAWN))
def test_a_fault(
    cell: str, slurm_cluster: SlurmCluster, settings: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    fault, _, phase = cell.partition(" in ")
    kind, run = KINDS[fault], tmp_path / "run"
    faults, step = ORDERS[phase] if kind.order else (PHASES[phase].format(kind.action), 0)
    job = start(run, settings, faults)
    if " after a " in phase or " before a " in phase:
        wait_until("the first fault", (tmp_path / faults.split()[0]).exists)
    if kind.order:
        mark = give_order(run, replace(kind.order, step=step)).with_suffix(".obeyed")
    else:
        mark = tmp_path / faults.split()[-1]
    if phase.endswith("requeue"):
        slurm_cluster.command("scancel", "--signal=USR2", job)
    wait_until("the fault", mark.exists)
    scene = Scene(slurm_cluster, run, job, host_of_task_1(run))
    # An order is renamed when it is obeyed, which changes no time but that of its folder.
    began = mark.stat().st_ctime if kind.order else time.time() if kind.outside else mark.stat().st_mtime
    with kind.outside(scene) if kind.outside else nullcontext():
        outcome = follow(cell, scene, began)
    write_line(outcome)
    if kind.silent:
        assert_no_alarm(outcome, scene, began)
    else:
        assert_noticed(kind, outcome)
    # An older checkpoint may help after an exception in a load, but needs as much memory.
    if kind.comes_again and (phase in WITHOUT_A_SAVE or (phase in LOADS and fault == "memory")):
        assert outcome.then == "FAILED"
        failures = [event["why"] for event in lines(run / "events.jsonl") if event["event"] == "failure"]
        named = "a fault of the user's model" if fault == "raise" else f"task 1 on {scene.host}"
        assert named in failures[-1]
    else:
        if kind.ends_the_job:
            assert outcome.then == "FAILED"
            resumed = hpc_train("resume", "--json", str(run), **variables(run))
            (job,) = json.loads(resumed.stdout)["jobs"]
            slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
        else:
            assert outcome.then == "COMPLETED"
        assert_same_result(run, request.getfixturevalue("undisturbed"), STEPS)
        if kind.ends_the_job:
            assert kinds(run).count("resume") == 1
        elif kind.goes_on or (fault in ("raise", "memory") and phase.startswith("save")):
            assert "restart" not in kinds(run), "nothing is lost, or the next save is as good"
        elif not kind.silent:
            assert_culprit(fault, scene, began)
    wait_until("the end of what is left", lambda: list_leftovers(scene) == [], 60)


def follow(cell: str, scene: Scene, began: float) -> Cell:
    """Wait for the end of the job, and look what came after the fault, and when."""
    fault, _, phase = cell.partition(" in ")
    run = scene.run
    then = scene.cluster.wait_for_state(scene.job, {"COMPLETED", "FAILED"}, timeout=120)
    events = [event for event in lines(run / "events.jsonl") if event["time"] > began]
    ends = KINDS[fault].ends_the_job
    noticed = next((event["time"] for event in events if event["event"] in (*NOTICES, *(["signal"] * ends))), None)
    if noticed is None:
        return Cell(fault, phase, None, None, then)
    resumed = [event["time"] for event in events if event["event"] in ("start", "resume") and event["time"] > noticed]
    return Cell(fault, phase, noticed - began, resumed[0] - began if resumed else None, then)


def write_line(cell: Cell) -> None:
    if "HPC_TRAIN_FAULT_TABLE" in os.environ:
        with Path(os.environ["HPC_TRAIN_FAULT_TABLE"]).open("a") as table:
            table.write(json.dumps(asdict(cell)) + "\n")
