"""Every fault in every phase of a run, on a real Slurm: noticed in time, the right rank named, the same numbers.

Half a minute a cell, because a hang is noticed after ten seconds and each start of the ranks imports torch. `make test`
draws three; with HPC_TRAIN_FAULT_TABLE=FILE every cell adds a line of its times to that file.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from drawn import draw
from slurm_client import SlurmCluster
from training_client import assert_same_result, hpc_train, kinds, lines, pid_of_task, submit, tasks_of, wait_until

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.resilience.heartbeat import find_folder

FAULTY = Path(__file__).parents[1] / "launch"
STEPS, EVERY = 60, 20
DEADLINE = 12
"""Seconds, of every phase but the start, whose imports take longer on a busy machine."""
START_DEADLINE = 30
WITHOUT_A_SAVE = ("start", "first step", "load after a restart", "load after a requeue")
PHASES = {
    "start": "1:build:1:{}",
    "first step": "1:train:1:{}",
    "step": "1:train:53:{}",
    "data": "1:data:57:{}",
    "evaluation": "1:eval:5:{}",
    "save": "1:save:2:{}",
    "load after a restart": "0:train:50:kill 1:load:1:{}",
    "load after a requeue": "0:train:50:listen 1:load:1:{}",
}
"""When rank 1 gets the fault; the last step of a phase comes after a checkpoint was saved from `step` on."""
EVERY_PHASE = tuple(phase for phase in PHASES if phase != "data")


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    seconds: float
    """Until it is noticed, beyond the deadline of the phase for ranks that hang."""
    action: str
    """What rank 1 does; `hold` where the fault comes from outside."""
    phases: tuple[str, ...] = EVERY_PHASE
    hangs: bool = False
    comes_again: bool = False
    """Nothing starts again unless a checkpoint was saved since the start."""
    ends_the_job: bool = False
    """The ranks save and end, and somebody has to resume the run."""
    outside: Callable[[Scene], AbstractContextManager[None]] | None = None
    """What is done to the machines once rank 1 holds, and undone after the job."""


@dataclass(frozen=True)
class Scene:
    """A run whose rank 1 has just got its fault."""

    cluster: SlurmCluster
    run: Path
    job: str
    host: str
    """The node of rank 1."""

    @property
    def logs(self) -> Path:
        """The log directory of the attempt at hand."""
        return max(attempts(self.run), key=lambda logs: int(logs.name))


def kill_both(scene: Scene) -> AbstractContextManager[None]:
    """Kill all ranks at once."""
    for process in tasks_of(scene.run).values():
        os.kill(process, signal.SIGKILL)
    return nullcontext()


def switch_node_off(scene: Scene) -> AbstractContextManager[None]:
    """Take the power from the node of rank 1."""
    return scene.cluster.powered_off(scene.host)


@contextmanager
def cut_network(scene: Scene) -> Iterator[None]:
    """Cut both networks of the node of rank 1."""
    cables = [("net", scene.host), ("net", scene.host, "--mgmt")]
    try:
        for words in cables:
            scene.cluster.dev_cluster(*words[:2], "down", *words[2:])
        yield
    finally:
        for words in cables:
            scene.cluster.dev_cluster(*words[:2], "up", *words[2:])
        scene.cluster.wait_for_node(scene.host, timeout=120)


def kill_and_switch_off(scene: Scene) -> AbstractContextManager[None]:
    """Kill rank 0, and take the power from the node of rank 1."""
    os.kill(pid_of_task(scene.run, 0), signal.SIGKILL)
    return scene.cluster.powered_off(scene.host)


def kill_supervisor(scene: Scene) -> AbstractContextManager[None]:
    """Kill the supervisor of the attempt."""
    (supervisor,) = processes_with("hpc_train.launch.slurm.supervise", str(scene.logs))
    os.kill(supervisor, signal.SIGKILL)
    return nullcontext()


def kill_script(scene: Scene) -> AbstractContextManager[None]:
    """Kill the shell of the batch script, but not its slurmstepd."""
    scripts = processes_with("slurm_script", f"job{int(scene.job):05}")
    first = [script for script in scripts if parent_of(script) not in scripts]
    os.kill(first[0], signal.SIGKILL)
    return nullcontext()


def kill_slurmstepd(scene: Scene) -> AbstractContextManager[None]:
    """Kill the slurmstepd of rank 1."""
    os.kill(parent_of(pid_of_task(scene.run, 1)), signal.SIGKILL)
    return nullcontext()


def kill_agent(scene: Scene) -> AbstractContextManager[None]:
    """Kill the agent on the node of rank 1."""
    agents = processes_with("hpc_train.resilience.agent", str(scene.logs))
    (agent,) = [process for process in agents if variables_of(process)["SLURMD_NODENAME"] == scene.host]
    os.kill(agent, signal.SIGKILL)
    return nullcontext()


def kill_srun(word: str) -> Callable[[Scene], AbstractContextManager[None]]:
    """Return a fault that kills the srun of the ranks, or of the agents."""

    def kill(scene: Scene) -> AbstractContextManager[None]:
        sruns = processes_with(word, str(scene.run), srun=True)
        assert sruns
        for process in sruns:
            os.kill(process, signal.SIGKILL)
        return nullcontext()

    return kill


ALIVE = ("step", "evaluation", "save")
KINDS = {
    "kill": Kind(6, "kill"),
    "both killed": Kind(6, "hold", outside=kill_both),
    "segfault": Kind(6, "segfault"),
    "abort": Kind(6, "abort"),
    "exit": Kind(6, "exit", comes_again=True),
    "raise": Kind(6, "raise", (*EVERY_PHASE, "data"), comes_again=True),
    "memory": Kind(8, "memory", comes_again=True),
    "stop": Kind(8, "stop", hangs=True),
    "gil": Kind(8, "gil", hangs=True),
    "loop": Kind(8, "loop", hangs=True),
    "hold": Kind(8, "hold", (*EVERY_PHASE, "data"), hangs=True),
    "disk": Kind(8, "disk", ALIVE, hangs=True),
    "node": Kind(25, "hold", outside=switch_node_off),
    "network": Kind(25, "hold", ("start", *ALIVE), outside=cut_network),
    "slurmstepd": Kind(8, "hold", ("start", *ALIVE), hangs=True, outside=kill_slurmstepd),
    "supervisor": Kind(25, "hold", ("start", *ALIVE), hangs=True, outside=kill_supervisor),
    "agent": Kind(25, "hold", ("start", *ALIVE), hangs=True, outside=kill_agent),
    "agents' srun": Kind(25, "hold", ALIVE, hangs=True, outside=kill_srun("hpc_train.resilience.agent")),
    "ranks' srun": Kind(8, "hold", ("start", *ALIVE), outside=kill_srun("hpc_train.launch.rank_entrypoint")),
    "batch script": Kind(6, "listen", ("step", "evaluation"), ends_the_job=True, outside=kill_script),
    "kill and node": Kind(25, "hold", ALIVE, outside=kill_and_switch_off),
    "full disk": Kind(4, "full3", ("save",)),
}
DRAWN = ("gil in evaluation", "loop in save", "raise in load after a restart")
"""The others that `make test` runs are in test_faults_of_jobs.py."""
NOTICES = ("signal", "hang", "lost_node", "restart", "requeue", "failure", "checkpoint_failed")


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
    cell: str, slurm_cluster: SlurmCluster, settings: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    fault, _, phase = cell.partition(" in ")
    kind, run = KINDS[fault], tmp_path / "run"
    faults = PHASES[phase].format(kind.action)
    job = start(run, settings, faults)
    if phase == "load after a requeue":
        wait_until("the first fault", (tmp_path / faults.split()[0]).exists)
        slurm_cluster.command("scancel", "--signal=USR2", job)
    mark = tmp_path / faults.split()[-1]
    wait_until("the fault", mark.exists)
    scene = Scene(slurm_cluster, run, job, host_of_task_1(run))
    began = time.time() if kind.outside else mark.stat().st_mtime
    with kind.outside(scene) if kind.outside else nullcontext():
        outcome = follow(cell, scene, began)
    write_line(outcome)
    deadline = (START_DEADLINE if phase == "start" else DEADLINE) if kind.hangs else 0
    assert outcome.noticed <= kind.seconds + deadline
    if kind.comes_again and phase in WITHOUT_A_SAVE:
        assert outcome.then == "FAILED"
        failures = [event["why"] for event in lines(run / "events.jsonl") if event["event"] == "failure"]
        assert f"task 1 on {scene.host}" in failures[-1]
    else:
        if kind.ends_the_job:
            assert outcome.then == "FAILED"
            resumed = hpc_train("resume", "--json", str(run), **variables(run))
            (job,) = json.loads(resumed.stdout)["jobs"]
            slurm_cluster.wait_for_state(job, "COMPLETED", timeout=120)
        else:
            assert outcome.then == "COMPLETED"
        assert_same_result(run, undisturbed, STEPS)
        if kind.ends_the_job:
            assert kinds(run).count("resume") == 1
        elif cell in ("raise in save", "memory in save", "full disk in save"):
            assert "restart" not in kinds(run), "the next save is as good"
        else:
            assert_culprit(fault, scene, began)
    wait_until("the end of what is left", lambda: list_leftovers(scene, fault) == [], 60)


def list_leftovers(scene: Scene, fault: str) -> list[str]:
    """Processes of a run, and its files in the memory of nodes. A node that was cut off keeps them for an epilog."""
    left = [f"process {process}" for srun in (True, False) for process in processes_with(str(scene.run), srun=srun)]
    entries = {find_folder(logs).name for logs in attempts(scene.run)}
    for node in sorted(set(scene.cluster.command("sinfo", "-hN", "-o", "%N").split())):
        if (fault, node) != ("network", scene.host):
            left += entries & set(scene.cluster.dev_cluster("exec", node, "ls", "/dev/shm").split())
    return left


def follow(cell: str, scene: Scene, began: float) -> Cell:
    """Wait for the end of the job, and look what came after the fault, and when."""
    fault, _, phase = cell.partition(" in ")
    run = scene.run
    then = scene.cluster.wait_for_state(scene.job, {"COMPLETED", "FAILED"}, timeout=120)
    events = [event for event in lines(run / "events.jsonl") if event["time"] > began]
    noticed = [event["time"] for event in events if event["event"] in NOTICES]
    assert noticed, kinds(run)
    trained = [
        event["time"] for event in events if event["event"] in ("start", "resume") and event["time"] > noticed[0]
    ]
    return Cell(fault, phase, noticed[0] - began, trained[0] - began if trained else None, then)


def assert_culprit(fault: str, scene: Scene, began: float) -> None:
    """The rank and its node are named, and nobody else."""
    events = [event for event in lines(scene.run / "events.jsonl") if event["time"] > began]
    restart = next(event for event in events if event["event"] == "restart")
    if fault == "ranks' srun":
        assert restart["host"] == "", "no node is to blame"
    elif fault != "both killed":
        assert restart["host"] == scene.host
    if fault == "raise":
        assert "a fault of the user's model" in restart["signature"]
    if KINDS[fault].hangs:
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


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def variables_of(process: int) -> dict[str, str]:
    """The environment of a process."""
    items = Path(f"/proc/{process}/environ").read_text(errors="replace").split("\0")
    return dict(item.split("=", 1) for item in items if "=" in item)


def processes_with(*words: str, srun: bool = False) -> list[int]:
    """Ids of the processes of this machine with these on their command line: srun's own, or all others."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in command for word in words) and command.startswith("srun") == srun:
            found.append(int(entry.name))
    return found
