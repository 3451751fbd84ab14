"""What has to be seen after a fault: in time, the right culprit, and nothing left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fault_kinds import KINDS, Kind, Scene, attempts
from training_client import lines, processes_with

from hpc_train.resilience.heartbeat import find_folder

FAULTY = Path(__file__).parents[1] / "launch"
DEADLINE = 12
"""Seconds, of every phase but the start, whose imports take longer on a busy machine."""
START_DEADLINE = 30
UNTIL_THE_NEXT_SAVE = 15
"""Seconds of steps on a busy machine for which nobody waits for a save that hangs."""
COMPARE_EVERY = 4
"""Steps between two comparisons of the copies of the parameters."""
NOTICES = ("hang", "lost_node", "disagree", "transient", "restart", "requeue", "failure", "checkpoint_failed")
ALARMS = ("hang", "lost_node", "restart", "slow_node", "failure")
"""Events of which there is none where nothing is wrong."""


@dataclass(frozen=True)
class Cell:
    """What became of one fault in one phase."""

    fault: str
    phase: str
    noticed: float | None
    """Seconds from the fault to the first event about it; None: there was none."""
    trained: float | None
    """Seconds from the fault until the ranks had resumed, or begun again; None: the run ended."""
    then: str


def describe_faulty_run(store: Path, start_seconds: float = START_DEADLINE) -> list[str]:
    """Return overrides of a run on two nodes with one rank each, whose model does what a test asks for.

    start_seconds: deadline of the start.
    """
    model = ["model=custom", "model.module=faulty_model", "model.name=faulty", "train.sequence_length=16"]
    batch = ["train.global_batch=4", "train.micro_batch=2", "train.eval_batches=2", "cluster.node.ranks=1"]
    deadlines = [f"resilience.hang.{name}_seconds={DEADLINE}" for name in ("first_step", "load", "save")]
    start = f"resilience.hang.start_seconds={start_seconds}"
    rest = ["train.tensorboard=false", "train.noise_scale.every=0", "resilience.chaos=true"]
    compare = f"resilience.numbers.compare_every={COMPARE_EVERY}"
    return [*model, *batch, *deadlines, start, compare, *rest, "data=text", f"data.path={store}"]


def assert_noticed(kind: Kind, outcome: Cell, slack: float = 0.0) -> None:
    """It was noticed within its bound, or so many seconds later."""
    deadline = (START_DEADLINE if outcome.phase.startswith("start") else DEADLINE) if kind.hangs else 0
    if kind.hangs and outcome.phase == "save":
        deadline += UNTIL_THE_NEXT_SAVE
    assert outcome.noticed is not None
    assert outcome.noticed <= kind.seconds + deadline + slack, outcome


def assert_no_alarm(outcome: Cell, scene: Scene, began: float) -> None:
    """Nobody took it for a fault. A job that was asked to stop is requeued."""
    events = [event for event in lines(scene.run / "events.jsonl") if event["time"] > began]
    assert [event for event in events if event["event"] in ALARMS] == []
    assert outcome.noticed is None or outcome.phase.endswith("requeue")


def list_leftovers(scene: Scene) -> list[str]:
    """Processes of a run, and its files in the memory of nodes."""
    left = [f"process {process}" for srun in (True, False) for process in processes_with(str(scene.run), srun=srun)]
    entries = {find_folder(logs).name for logs in attempts(scene.run)}
    for node in sorted(set(scene.cluster.command("sinfo", "-hN", "-o", "%N").split())):
        left += entries & set(scene.cluster.dev_cluster("exec", node, "ls", "/dev/shm").split())
    return left


def assert_culprit(fault: str, scene: Scene, began: float) -> None:
    """The rank and its node are named, and nobody else."""
    events = [event for event in lines(scene.run / "events.jsonl") if event["time"] > began]
    restart = next((event for event in events if event["event"] == "restart"), None)
    if restart is None:  # while all ranks stopped on purpose, after which the job is requeued
        (requeue,) = (event for event in events if event["event"] == "requeue")
        assert f"meanwhile task 1 on {scene.host}" in requeue["why"]
        return
    if fault in ("ranks' srun", "weight", "moment", "gradient"):
        assert restart["host"] == "", "no node is to blame, or of two copies nobody knows which is right"
    elif fault not in ("both killed", "hang and kill"):
        assert restart["host"] == scene.host
    if fault == "raise":
        assert "a fault of the user's model" in restart["signature"]
    if KINDS[fault].hangs:
        hang = next(event for event in events if event["event"] == "hang")
        assert "task 1" in hang["why"]
