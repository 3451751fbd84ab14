"""The kinds of faults of the matrix: in which phases of a run rank 1 gets them, and what is done from outside."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from slurm_client import SlurmCluster
from training_client import parent_of, pid_of_task, processes_with, tasks_of, variables_of, wait_until

from hpc_train.cluster.hostlist import expand_hostlist
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


def host_of_task_1(run: Path) -> str:
    newest = max(attempts(run), key=lambda logs: int(logs.name))
    return expand_hostlist(json.loads((newest / "attempt.json").read_text())["nodes"])[1]


def attempts(run: Path) -> list[Path]:
    return [path for path in (run / "logs").iterdir() if path.name.isdecimal()]


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
        wait_until("the node", lambda: scene.cluster.node_state(scene.host) in ("idle", "drained"))
        if scene.cluster.node_state(scene.host) == "drained":  # as Slurm could not end the rank there in a minute
            scene.cluster.scontrol("update", f"nodename={scene.host}", "state=resume")
        left = [str(find_folder(logs)) for logs in attempts(scene.run)]  # for an epilog: the agent there was killed
        scene.cluster.dev_cluster("exec", scene.host, "rm", "-rf", *left)


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
            with suppress(ProcessLookupError):  # one of the two processes of an srun ends with the other
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
    "full disk": Kind(4, "full3", ("save",), ends_the_job=True),
}
