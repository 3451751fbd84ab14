"""Every fault in every phase of a run, on a real Slurm: noticed in time, the right rank named, the same numbers.

Half a minute a cell, because a hang is noticed after ten seconds and each start of the ranks imports torch. `make test`
draws three; with HPC_TRAIN_FAULT_TABLE=FILE every cell adds a line of its times to that file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import pytest
from drawn import draw
from slurm_client import SlurmCluster
from training_client import assert_same_result, kinds, lines, submit, tasks_of, wait_until

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.resilience.heartbeat import find_folder

FAULTY = Path(__file__).parents[1] / "launch"
STEPS, EVERY = 60, 20
DEADLINE = 12
"""Seconds, of every phase but the start, whose imports take longer on a busy machine."""
START_DEADLINE = 30
BOUNDS = {"kill": 6, "exit": 6, "raise": 6, "stop": 8, "gil": 8, "loop": 8, "hold": 8, "node": 25}
"""Seconds until a fault is noticed, beyond the deadline of the phase for ranks that hang."""
HANGS = ("stop", "gil", "loop", "hold")
PHASES = {
    "start": "1:build:1:{}",
    "first step": "1:train:1:{}",
    "step": "1:train:53:{}",
    "evaluation": "1:eval:5:{}",
    "save": "1:save:2:{}",
    "load after a restart": "0:train:50:kill 1:load:1:{}",
    "load after a requeue": "0:train:50:listen 1:load:1:{}",
}
"""When rank 1 gets the fault; the last step of a phase comes after a checkpoint was saved from `step` on."""
COMES_AGAIN = ("raise", "exit")
"""What would come again, so that nothing starts again unless a checkpoint was saved since the start."""
WITHOUT_A_SAVE = ("start", "first step", "load after a restart", "load after a requeue")
DRAWN = ("gil in evaluation", "loop in save", "raise in load after a restart")
"""The others that `make test` runs are in test_faults_of_jobs.py."""
NOTICES = ("hang", "lost_node", "restart", "requeue", "failure", "checkpoint_failed")


@dataclass(frozen=True)
class Cell:
    """What became of one fault in one phase."""

    fault: str
    phase: str
    noticed: float
    """Seconds from the fault to the first event about it."""
    trained: float | None
    """Seconds from the fault until the ranks had resumed, or begun again; None: the run ended."""
    then: str


@pytest.fixture(scope="module")
def settings(store: Path) -> list[str]:
    """A model that does what a test asks for, on two nodes with one rank each."""
    model = ["model=custom", "model.module=faulty_model", "model.name=faulty", "train.sequence_length=16"]
    batch = ["train.global_batch=4", "train.micro_batch=2", f"train.steps={STEPS}", f"checkpoint.every={EVERY}"]
    rest = ["train.eval_every=10", "train.eval_batches=2", "train.tensorboard=false", "cluster.node.ranks=1"]
    deadlines = [f"resilience.hang.{name}_seconds={DEADLINE}" for name in ("first_step", "load", "save")]
    start = f"resilience.hang.start_seconds={START_DEADLINE}"
    text = ["data=text", f"data.path={store}", "train.noise_scale.every=0", "launch.export=[FAULTS,FAULT_FOLDER]"]
    return [*model, *batch, *rest, *deadlines, start, *text, "launch.spares=1"]


def start(run: Path, settings: list[str], faults: str = "") -> str:
    """Submit a run with faults; returns the job id."""
    python = os.pathsep.join(filter(None, [str(FAULTY), os.environ.get("PYTHONPATH", "")]))
    run.parent.mkdir(parents=True, exist_ok=True)
    return submit(run, *settings, FAULTS=faults, FAULT_FOLDER=str(run.parent), PYTHONPATH=python)


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


CELLS = [f"{fault} in {phase}" for fault, phase in product(BOUNDS, PHASES)]


@pytest.mark.parametrize("cell", draw(CELLS, DRAWN))
def test_a_fault(
    cell: str, slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    fault, _, phase = cell.partition(" in ")
    run = tmp_path / "run"
    action = "hold" if fault == "node" else fault
    faults = PHASES[phase].format(action)
    job = start(run, settings, faults)
    if phase == "load after a requeue":
        wait_until("the first fault", (tmp_path / faults.split()[0]).exists)
        slurm_cluster.command("scancel", "--signal=USR2", job)
    mark = tmp_path / faults.split()[-1]
    wait_until("the fault", mark.exists)
    began = mark.stat().st_mtime
    if fault == "node":
        host = host_of_task_1(run)
        with slurm_cluster.powered_off(host):
            outcome = follow(cell, slurm_cluster, job, run, began)
    else:
        outcome = follow(cell, slurm_cluster, job, run, began)
    write_line(outcome)
    deadline = (START_DEADLINE if phase == "start" else DEADLINE) if fault in HANGS else 0
    assert outcome.noticed <= BOUNDS[fault] + deadline
    if fault in COMES_AGAIN and phase in WITHOUT_A_SAVE:
        assert outcome.then == "FAILED"
    else:
        assert outcome.then == "COMPLETED"
        assert_same_result(run, undisturbed, STEPS)
        if cell == "raise in save":
            assert "restart" not in kinds(run), "the next save is as good"
        else:
            assert_culprit(fault, run, began)
    assert tasks_of(run) == {}
    wait_until("the end of the supervisor", lambda: not any(find_folder(logs).exists() for logs in attempts(run)), 20)


def follow(cell: str, cluster: SlurmCluster, job: str, run: Path, began: float) -> Cell:
    """Wait for the end of the job, and look what came after the fault, and when."""
    fault, _, phase = cell.partition(" in ")
    then = cluster.wait_for_state(job, {"COMPLETED", "FAILED"}, timeout=240)
    events = [event for event in lines(run / "events.jsonl") if event["time"] > began]
    noticed = [event["time"] for event in events if event["event"] in NOTICES]
    assert noticed, kinds(run)
    trained = [
        event["time"] for event in events if event["event"] in ("start", "resume") and event["time"] > noticed[0]
    ]
    return Cell(fault, phase, noticed[0] - began, trained[0] - began if trained else None, then)


def assert_culprit(fault: str, run: Path, began: float) -> None:
    """The rank or its node is named, and nobody else."""
    events = [event for event in lines(run / "events.jsonl") if event["time"] > began]
    restart = next(event for event in events if event["event"] == "restart")
    if fault == "raise":
        assert "a fault of the user's model" in restart["signature"]
        return
    names = [rank["host"] for rank in json.loads((run / "logs/0/rankmap.json").read_text())["ranks"]] or [
        restart["host"]
    ]
    assert restart["host"] in names
    if fault in HANGS:
        hang = next(event for event in events if event["event"] == "hang")
        assert "task 1" in hang["why"]


def host_of_task_1(run: Path) -> str:
    newest = max(attempts(run), key=lambda logs: int(logs.name))
    return expand_hostlist(json.loads((newest / "attempt.json").read_text())["nodes"])[1]


def attempts(run: Path) -> list[Path]:
    return [path for path in (run / "logs").iterdir() if path.name.isdecimal()]


def write_line(cell: Cell) -> None:
    if "HPC_TRAIN_FAULT_TABLE" in os.environ:
        with Path(os.environ["HPC_TRAIN_FAULT_TABLE"]).open("a") as table:
            table.write(json.dumps(asdict(cell)) + "\n")
