"""Start the agents of a Slurm job, one per node, and read what they report.

They are a job step of their own, beside that of the ranks. If one of them ends, the others are told to leave, and all
of them are started again.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.launch.slurm.supervisor.srun_errors import SrunErrors
from hpc_train.resilience.agent import END, LEAVE, PING, PING_SECONDS, Report, decode_report, name_this_node
from hpc_train.resilience.deadlines import merge_learned
from hpc_train.resilience.file_systems import Disk
from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.watch import RankView

RANKS = "ranks"
"""Name of the job step of the ranks; `hpc-train attach` and users start others in the same job."""
AGENTS = "agents"
"""Name of the agents' job step."""
PROBE = "probe"
"""Name of a job step that shows whether a node is there."""
AGENT_ERRORS = "agents.err"
"""File in an attempt's log directory: what the agents' srun says."""
TICK_SECONDS = 0.5
"""Seconds between two looks at the reports."""
END_SECONDS = 5.0
"""How long agents have to end once they are told to."""
END_SECONDS_WITHOUT_A_NODE = 1.0
"""How long agents have to end if a node is lost: their srun would wait for that node as long as Slurm does."""
_LATE_SECONDS = 3.0
"""Silence after which a node is late: agents report each second."""
_AGENT_START_SECONDS = 20.0
"""How much longer than usual a node may be silent whose agent is started again."""
_ABSENT_SECONDS = 5.0
"""How much longer than usual a node that has never reported may be silent once ranks on other nodes have failed, which
may be because the node is gone."""
_TOGETHER_SECONDS = 3.0
"""Nodes whose last reports came within this time are lost together, as those of a rack without power."""
_PAUSE_SECONDS = 3.0
"""How long this process may have been held up, as by the file system of the run, before what it has read is old."""
_CATCH_UP_SECONDS = 2.0
"""How long it then reads before it looks at anything."""
_STEPS_AHEAD = 5
"""Steps of other nodes' ranks that show that a silent node still computes."""
_AGENTS_AGAIN_SECONDS = 5.0
"""Between two starts of the agents."""
_SILENT_START_SECONDS = 60.0
"""How long the first srun of the agents has until one of them reports; the next one has twice as long, and so on."""
_OPTIONS_OF_RANKS = ("SLURM_CPUS", "SLURM_NTASKS", "SLURM_DIST", "SLURM_HOSTFILE")
"""Prefixes of variables that srun reads as options for how tasks are distributed."""


@dataclass
class NodeState:
    """The newest report of one node's agent, and what its silence since then means."""

    report: Report
    silent: float = 0.0
    """Seconds since its last report, counted only while this process runs."""
    agent_starts: bool = False
    """Whether its agent was started again and has not reported since."""
    front: int | None = None
    """The highest step of any rank when the node had been silent for half of the limit; None before that."""
    absent: bool = False
    """Whether no agent has ever reported from there, though those of other nodes have. The node may be lost."""


@dataclass
class AgentReports:
    """The newest report of each node, read from the agents' srun as it comes."""

    start: Callable[[Mapping[Phase, float]], subprocess.Popen[bytes]]
    """Starts the agents, with the deadlines that were learned so far."""
    errors: SrunErrors
    """The messages of the agents' srun."""
    expected: Sequence[str] = ()
    """Slurm's names of the nodes that agents are started on."""
    wake: int | None = None
    """A descriptor that ends a read early once it is readable, such as that of a process that has ended."""
    nodes: dict[str, NodeState] = field(default_factory=dict)
    ended: bool = False
    """Whether the agents have ended by themselves."""
    stop_signal: str = ""
    """Name of the first signal that has asked all steps of the job to stop."""
    _patience: float = _SILENT_START_SECONDS
    _reported: bool = False
    """Whether any of the current agents has reported."""
    _unwatched: set[str] = field(default_factory=set)
    """Nodes without an agent that are not lost."""
    _unparsed: bytes = b""
    _last_read: float = field(default_factory=time.monotonic)
    _ping_due: float = field(default_factory=lambda: time.monotonic() + PING_SECONDS)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.errors.read_exit_codes()  # of earlier agents
        self.process = self.start(self.merge_learned())
        self._started, self._reported, self.ended, self._unparsed = time.monotonic(), False, False, b""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)
        if self.wake is not None:
            self._selector.register(self.wake, selectors.EVENT_READ)

    def start_again(self) -> bool:
        """Have all agents end if one was killed, or none has reported, and start them again; returns whether it did."""
        if self.errors.read_exit_codes():
            self.send(LEAVE)
        # An srun that does not come to start them, as where Slurm creates no step, may do so at a second try.
        if not self._reported and time.monotonic() > self._started + self._patience:
            self._patience = 2 * self._patience
            self.give_up()
        if not self.ended or time.monotonic() < self._started + _AGENTS_AGAIN_SECONDS:
            return False
        self.close(END_SECONDS)
        self._begin()
        for host in self.nodes:
            self.expect_new_agent(host)
        return True

    def give_up(self) -> None:
        """Have the current agents replaced, as they or their srun may be stopped.

        An agent that still reads its orders leaves the entries of the ranks to the next one.
        """
        self.send(LEAVE)
        self.ended = True

    def are_all_silent(self, seconds: float) -> bool:
        """Return whether agents have reported, but none for `seconds`: they are stopped, or their srun is."""
        return self._reported and all(node.silent > seconds for node in self.nodes.values())

    def expect_new_agent(self, host: str) -> None:
        """Give a node time for the start of another agent, once: a node on which none can start is lost."""
        node = self.nodes[host]
        if not node.agent_starts and not node.absent:
            node.silent, node.agent_starts = -_AGENT_START_SECONDS, True

    def merge_learned(self) -> dict[Phase, float]:
        """Return the deadlines that the agents have learned."""
        return merge_learned(node.report.learned for node in self.nodes.values())

    def read(self, seconds: float) -> None:
        """Read reports for this many seconds, or until a rank is late, and count how long each node has been silent."""
        behind = self.are_old()
        end = time.monotonic() + (_CATCH_UP_SECONDS if behind else seconds)
        while (left := end - time.monotonic()) > 0:
            ready = {key.fd for key, _ in self._selector.select(left)}
            if self.wake in ready:
                break
            if ready:
                data = os.read(self.process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
                if not data:  # all agents are gone
                    self.ended = True
                    time.sleep(left)
                    break
                if self._parse_reports(data) and not behind:
                    break
        now = time.monotonic()
        if now > self._ping_due:
            self._ping_due = now + PING_SECONDS
            self.send(PING)
        for node in self.nodes.values():
            node.silent += min(now - self._last_read, 2 * seconds)
        self._last_read = now

    def _parse_reports(self, data: bytes) -> bool:
        """Take the reports among what was read; returns whether a rank is late in one of them."""
        late = False
        *lines, self._unparsed = (self._unparsed + data).split(b"\n")
        for line in lines:
            report = decode_report(line.decode(errors="replace"))
            if report is not None:
                self._reported = True
                self.stop_signal = self.stop_signal or report.stop
                self.nodes[self._find_name(report.host)] = NodeState(report, -TICK_SECONDS)
                late = late or any(view.overdue for view in report.views)
        if self._reported:
            self._add_absent()
        return late

    def _find_name(self, host: str) -> str:
        """Return the expected name of a node that calls itself `host`, or else this name."""
        short = host.partition(".")[0]
        return next((name for name in self.expected if name.partition(".")[0] == short), host)

    def _add_absent(self) -> None:
        """Count the silence of nodes that have not reported, from the first report of another node on."""
        for host in self.expected:
            if host not in self.nodes and host not in self._unwatched:
                self.nodes[host] = NodeState(Report(host, []), -_AGENT_START_SECONDS, absent=True)

    def list_absent(self) -> list[str]:
        """Return the nodes that have never reported, and of which is not known yet whether they are lost."""
        return [host for host, node in self.nodes.items() if node.absent]

    def leave_unwatched(self, host: str) -> None:
        """Expect no agent on a node that is there, but has none, as where it has no Python."""
        del self.nodes[host]
        self._unwatched.add(host)

    def _find_front(self) -> int:
        return max((view.step for view in self.list_views()), default=0)

    def has_a_stuck_agent(self, host: str, needed: bool = True) -> bool:
        """Return whether a silent node is up and only its agent is stuck, for example because it was stopped.

        Ranks on other nodes still make steps, which they cannot without its ranks; or it is the node of this process.
        Steps count from the middle of its silence on, as it may have died at any moment after its last report. An
        agent that has just been started again counts as any other: the node may be overloaded.

        needed: whether the ranks on other nodes cannot make steps without those of this one.
        """
        node = self.nodes[host]
        front = None if node.absent else node.front
        others_go_on = needed and front is not None and self._find_front() - front >= _STEPS_AHEAD
        return not node.agent_starts and (others_go_on or host == self._find_name(name_this_node()))

    def list_views(self) -> list[RankView]:
        """Return the newest views of all ranks."""
        return [view for node in self.nodes.values() for view in node.report.views]

    def list_machines(self) -> dict[str, Any]:
        """Return what nodes with late ranks say of their kernel logs and ports, by host."""
        return {host: node.report.machine for host, node in self.nodes.items() if node.report.machine}

    def list_disks(self) -> dict[str, list[Disk]]:
        """Return the file systems that nodes with silent ranks have asked, by host."""
        return {node.report.host: node.report.disks for node in self.nodes.values() if node.report.disks}

    def are_old(self) -> bool:
        """Return whether this process was held up since it has read them, as by the file system of the run."""
        return time.monotonic() - self._last_read > _PAUSE_SECONDS

    def find_notice(self) -> Report | None:
        """Return the report of a node that is about to be taken away; None if there is none."""
        return next((node.report for node in self.nodes.values() if node.report.notice), None)

    def find_blind(self) -> Report | None:
        """Return the report of a node that cannot see whether it is about to be taken away; None if there is none."""
        return next((node.report for node in self.nodes.values() if node.report.blind), None)

    def find_silent(self, seconds: float) -> list[str]:
        """Return the nodes that have been silent for `seconds` while another one still reports; [] if there is none.

        Also [] while further nodes are about to be silent for so long: what is lost together is reported together.
        """
        for node in self.nodes.values():
            if node.front is None and node.silent > seconds / 2:
                node.front = self._find_front()
        silent = [host for host, node in self.nodes.items() if node.silent > seconds]
        soon = max(seconds - _TOGETHER_SECONDS, seconds / 2)
        if any(soon < node.silent <= seconds for node in self.nodes.values()):
            return []
        return silent if len(silent) < max(2, len(self.nodes)) else []

    def list_late(self) -> list[str]:
        """Return the nodes whose agents have said nothing for some reports, or have never begun, and may be stopped."""
        late = [host for host, node in self.nodes.items() if node.silent > _LATE_SECONDS and not node.agent_starts]
        absent = [host for host in self.list_absent() if self.nodes[host].silent > -_AGENT_START_SECONDS / 2]
        return list(dict.fromkeys([*late, *absent]))

    def is_any_late(self, seconds: float) -> bool:
        """Return whether a node has been silent for so long."""
        return any(node.silent > seconds for node in self.nodes.values())

    def may_miss_a_node(self, seconds: float) -> bool:
        """Return whether a node is late that may yet turn out to be lost, after `seconds` of silence.

        The ranks on the other nodes often fail first, because their connections break.
        """
        late = (node.silent for node in self.nodes.values() if node.absent or node.silent > _LATE_SECONDS)
        return any(silent <= seconds + 2 * TICK_SECONDS for silent in late)

    def hurry_absent(self) -> None:
        """Give nodes that have never reported less time for that, as ranks on others have failed."""
        for node in self.nodes.values():
            if node.absent:
                node.silent = max(node.silent, -_ABSENT_SECONDS)

    def send(self, order: bytes) -> None:
        """Write to the standard input of all agents; nothing happens if they are gone."""
        with suppress(OSError):
            os.write(self.process.stdin.fileno(), order)  # type: ignore[union-attr]

    def close(self, seconds: float = END_SECONDS) -> None:
        """Let the agents end; those that have not done so after `seconds` are killed."""
        self._selector.close()
        self.send(END)
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # an srun that is stopped has a second process
            self.process.kill()
            self.process.wait()
        self._read_rest()
        self.process.stdout.close()  # type: ignore[union-attr]

    def _read_rest(self) -> None:
        """Read what agents have reported as they ended."""
        with suppress(OSError):
            while data := os.read(self.process.stdout.fileno(), 1 << 16):  # type: ignore[union-attr]
                self._parse_reports(data)


@dataclass
class NodeProbe:
    """Asks silent nodes for a sign of life by a job step of its own: perhaps only the agent is stopped."""

    start: Callable[[str], subprocess.Popen[bytes]]
    """Starts a step on a node that ends at once."""
    _steps: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def ask(self, hosts: Collection[str]) -> None:
        """Ask each of these nodes once, and forget the answers of all others. Never waits.

        A job step without an answer is left running: ending it could get the node drained, if the node cannot report
        the end to srun.
        """
        self._steps = {host: self._steps.get(host) or self.start(host) for host in hosts}

    def has_answered(self, host: str) -> bool:
        """Return whether a node that was asked has run the step."""
        return host in self._steps and self._steps[host].poll() == 0


def start_probe(host: str, nodes: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a step that ends at once on the node whose agent calls it `host`; Slurm may have a longer name for it."""
    short = host.partition(".")[0]
    names = [node for node in nodes if node.partition(".")[0] == short] or [host]
    return subprocess.Popen(
        [*_step_command(PROBE, names[:1]), "true"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_step_environment(),
        start_new_session=True,
    )


def _step_command(name: str, nodes: Sequence[str]) -> list[str]:
    """Return an srun with a task on each of these nodes that takes nothing from the ranks."""
    count, names = len(nodes), ",".join(nodes)
    return [
        "srun",
        "--overlap",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={names}",
        "--cpus-per-task=1",
        "--mem=0",
        "--mpi=none",
        "--cpu-bind=none",
        "--unbuffered",
        "--kill-on-bad-exit=0",  # for which Slurm takes KillWait: the supervisor has the others end
        "--no-kill",  # else Slurm kills the agents of all nodes when it finds that one is lost
        f"--job-name={name}",
    ]


def _step_environment() -> dict[str, str]:
    """Return the environment without variables that srun would take for options of the ranks' step."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OPTIONS_OF_RANKS)}


def start_agents(logs: Path, resilience: Mapping[str, Any], nodes: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start an agent on each of these nodes, in a step of its own."""
    agent = [sys.executable, "-P", "-m", "hpc_train.resilience.agent", str(logs), json.dumps(dict(resilience))]
    with (logs / AGENT_ERRORS).open("ab") as errors:
        return subprocess.Popen(
            [*_step_command(AGENTS, nodes), *agent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_step_environment(),
            start_new_session=True,
        )
