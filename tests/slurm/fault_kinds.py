"""The kinds of faults of the matrix: in which phases of a run rank 1 gets them, and what is done from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_client import SlurmCluster
from training_client import find_script, parent_of, pid_of_task, processes_with, tasks_of, variables_of

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.resilience.chaos import Order
from hpc_train.resilience.heartbeat import find_folder

PHASES = {
    "start": "1:build:1:{}",
    "first step": "1:train:1:{}",
    "step": "1:train:53:{}",
    "data": "1:data:57:{}",
    "evaluation": "1:eval:5:{}",
    "save": "1:save:2:{}",
    "load after a restart": "0:train:50:kill 1:load:1:{}",
    "load after a requeue": "0:train:50:listen 1:load:1:{}",
    "save before a requeue": "0:train:50:listen 1:save:3:{}",
}
"""When rank 1 gets the fault; the last step of a phase comes after a checkpoint was saved from `step` on."""
ORDERS = {
    "start": ("", 0),
    "start after a restart": ("0:train:50:kill", 0),
    "start after a requeue": ("0:train:50:listen", 0),
    "first step": ("", 0),
    "step": ("", 52),
    "save": ("", 38),
}
"""Where a fault is ordered as by `hpc-train chaos`: the faults before it, and the step that the order names."""
EVERY_PHASE = tuple(phase for phase in PHASES if phase != "data")


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    seconds: float
    """Until it is noticed, beyond the deadline of the phase for ranks that hang."""
    action: str
    """What rank 1 does; `hold` where the fault comes from outside, nothing where it is ordered."""
    phases: tuple[str, ...] = EVERY_PHASE
    hangs: bool = False
    comes_again: bool = False
    """Nothing starts again unless a checkpoint was saved since the start, or one is loaded."""
    goes_on: bool = False
    """The ranks go on without a restart, and nobody is blamed."""
    silent: bool = False
    """It is no fault as long as it lasts, and must not be taken for one."""
    ends_the_job: bool = False
    """The ranks save and end, and somebody has to resume the run."""
    order: Order | None = None
    """What rank 1 is ordered to do; its step is that of the phase."""
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


def host_of_task_1(run: Path) -> str:
    newest = max(attempts(run), key=lambda logs: int(logs.name))
    return expand_hostlist(json.loads((newest / "attempt.json").read_text())["nodes"])[1]


def attempts(run: Path) -> list[Path]:
    return [path for path in (run / "logs").iterdir() if path.name.isdecimal()]


@contextmanager
def slow_network(scene: Scene) -> Iterator[None]:
    """Give the node of rank 1 a network of two megabits a second."""
    scene.cluster.dev_cluster("net", scene.host, "rate", "2mbit")
    Path(scene.run.parent / "go").touch()
    try:
        yield
    finally:
        scene.cluster.dev_cluster("net", scene.host, "clear")


@contextmanager
def busy_node(scene: Scene) -> Iterator[None]:
    """Let processes compete with rank 1 for its CPUs."""
    code = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    words = [sys.executable, "-S", "-c", code]
    cpus = os.sched_getaffinity(pid_of_task(scene.run, 1))
    started = [subprocess.Popen(words) for _ in cpus]
    for process, cpu in zip(started, cpus, strict=True):
        os.sched_setaffinity(process.pid, {cpu})
    (scene.run.parent / "go").touch()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


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
        scene.cluster.wait_until_back(scene.host)
        scene.cluster.resume_drained_nodes()
        left = [str(find_folder(logs)) for logs in attempts(scene.run)]  # for an epilog: the agent there was killed
        scene.cluster.dev_cluster("exec", scene.host, "rm", "-rf", *left)


def kill_and_switch_off(scene: Scene) -> AbstractContextManager[None]:
    """Kill rank 0, and take the power from the node of rank 1."""
    os.kill(pid_of_task(scene.run, 0), signal.SIGKILL)
    return scene.cluster.powered_off(scene.host)


def kill_supervisor(scene: Scene) -> AbstractContextManager[None]:
    """Kill the supervisor of the attempt."""
    os.kill(find_supervisor(scene), signal.SIGKILL)
    return nullcontext()


def stop_supervisor(scene: Scene) -> AbstractContextManager[None]:
    """Stop the supervisor of the attempt."""
    os.kill(find_supervisor(scene), signal.SIGSTOP)
    return nullcontext()


def find_supervisor(scene: Scene) -> int:
    (supervisor,) = processes_with("hpc_train.launch.slurm.supervisor.supervise", str(scene.logs))
    return supervisor


def kill_decision(scene: Scene) -> AbstractContextManager[None]:
    """Kill rank 1, and then the process that decides what follows."""
    os.kill(pid_of_task(scene.run, 1), signal.SIGKILL)

    def deciding() -> list[int]:
        return processes_with("hpc_train.launch.recovery.restarting", str(scene.run))

    end = time.monotonic() + 60
    while not (found := deciding()):
        assert time.monotonic() < end, "nobody has decided anything"
    os.kill(found[0], signal.SIGKILL)
    return nullcontext()


def kill_without_controller(scene: Scene) -> AbstractContextManager[None]:
    """Kill rank 1 while Slurm's controller does not answer for 25 seconds."""
    status = scene.cluster.dev_cluster("status").splitlines()
    (controller,) = [int(line.split()[1]) for line in status if line.startswith("slurmctld")]
    os.kill(controller, signal.SIGSTOP)
    try:
        os.kill(pid_of_task(scene.run, 1), signal.SIGKILL)
        time.sleep(25)
    finally:
        os.kill(controller, signal.SIGCONT)
    return nullcontext()


def kill_script(scene: Scene) -> AbstractContextManager[None]:
    """Kill the shell of the batch script, but not its slurmstepd."""
    os.kill(find_script(scene.job), signal.SIGKILL)
    return nullcontext()


def kill_slurmstepd(scene: Scene) -> AbstractContextManager[None]:
    """Kill the slurmstepd of rank 1."""
    os.kill(parent_of(pid_of_task(scene.run, 1)), signal.SIGKILL)
    return nullcontext()


def kill_agent(scene: Scene) -> AbstractContextManager[None]:
    """Kill the agent on the node of rank 1."""
    agents = processes_with("hpc_train.resilience.agent", str(scene.logs))
    (agent,) = [process for process in agents if variables_of(process).get("SLURMD_NODENAME") == scene.host]
    os.kill(agent, signal.SIGKILL)
    return nullcontext()


def kill_one_while_the_other_hangs(scene: Scene) -> AbstractContextManager[None]:
    """Kill rank 0 at the moment at which the stacks of the ranks are asked for, because rank 1 hangs."""
    rank = pid_of_task(scene.run, 0)
    time.sleep(9.5)
    with suppress(ProcessLookupError):  # the ranks have been ended already
        os.kill(rank, signal.SIGKILL)
    return nullcontext()


def kill_srun(word: str) -> Callable[[Scene], AbstractContextManager[None]]:
    """Return a fault that kills the srun of the ranks, or of the agents."""

    def kill(scene: Scene) -> AbstractContextManager[None]:
        sruns = processes_with(word, str(scene.run), srun=True)
        assert sruns
        for process in sruns:
            with suppress(ProcessLookupError):  # one of the two processes of an srun ends with the other
                os.kill(process, signal.SIGKILL)
        return nullcontext()

    return kill


ALIVE = ("step", "evaluation", "save")
WITH_A_RESTART = ("start", "first step", *ALIVE, "load after a restart", "load after a requeue")
"""Not the save before a requeue, in which nothing is left to do for those who watch."""
COMPUTES = ("first step", "step", "evaluation")
"""There is a model whose numbers can go wrong."""
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
    "disk": Kind(8, "disk", hangs=True),
    "slow": Kind(8, "nap8", (*EVERY_PHASE, "data"), silent=True),
    "stopped for a while": Kind(8, "pause7", (*EVERY_PHASE, "data"), silent=True),
    "slow link": Kind(8, "hold", COMPUTES, silent=True, outside=slow_network),
    "busy core": Kind(8, "hold", COMPUTES, silent=True, outside=busy_node),
    "nan": Kind(4, "nan", ("first step", "step"), goes_on=True),
    "weight": Kind(6, "flip", ("first step", "step", "evaluation")),
    "moment": Kind(6, "", ("step",), order=Order("flip_moment", 1)),
    "gradient": Kind(6, "", ("first step", "step"), order=Order("flip_gradient", 1)),
    "slow disk": Kind(8, "", ("save",), silent=True, order=Order("slow_disk", 1, seconds=8)),
    "rendezvous": Kind(8, "", tuple(ORDERS)[:3], hangs=True, order=Order("rendezvous", 1)),
    "node": Kind(25, "hold", outside=switch_node_off),
    "network": Kind(25, "hold", WITH_A_RESTART, outside=cut_network),
    "slurmstepd": Kind(8, "hold", WITH_A_RESTART, hangs=True, outside=kill_slurmstepd),
    "supervisor": Kind(25, "hold", hangs=True, outside=kill_supervisor),
    "supervisor stopped": Kind(30, "hold", WITH_A_RESTART, hangs=True, outside=stop_supervisor),
    "agent": Kind(25, "hold", WITH_A_RESTART, hangs=True, outside=kill_agent),
    "agents' srun": Kind(25, "hold", WITH_A_RESTART, hangs=True, outside=kill_srun("hpc_train.resilience.agent")),
    "ranks' srun": Kind(8, "hold", outside=kill_srun("hpc_train.launch.rank_entrypoint")),
    "decision": Kind(8, "hold", outside=kill_decision),
    "controller": Kind(40, "hold", WITH_A_RESTART, outside=kill_without_controller),
    "batch script": Kind(6, "listen", ("step", "evaluation"), ends_the_job=True, outside=kill_script),
    "kill and node": Kind(25, "hold", WITH_A_RESTART, outside=kill_and_switch_off),
    "hang and kill": Kind(25, "gil", COMPUTES, outside=kill_one_while_the_other_hangs),
    "full disk": Kind(4, "full3", ("save",), ends_the_job=True),
}
"""Where a kind has fewer phases than there are: a rank that starts or loads has no numbers yet, a full disk matters to
who writes, a rank answers `listen` only where it trains or evaluates, and copies of parameters are first compared after
three steps (docs/survival.md, what cannot be seen)."""
