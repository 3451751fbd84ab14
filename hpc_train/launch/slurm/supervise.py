"""The supervisor of a Slurm job: watches its ranks through an agent on every node, and ends those that hang or whose
peer has failed.

`python -m hpc_train.launch.slurm.supervise LOGS PROCESS`, beside the ranks in the batch script. PROCESS is the srun
that started the ranks. It only ever ends ranks; whether they are started again is decided by the script after them
(hpc_train.launch.restarting). If it dies, nothing else does: its agents see the end of their input, and the script
starts it again. If an agent dies, the others are told to leave, and all of them are started again.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import EXIT_NO_REQUEUE, EXIT_REQUEUE
from hpc_train.launch.failures import SRUN_ERRORS, list_exit_codes
from hpc_train.launch.slurm.slurm_cli import current_job_id, run_client
from hpc_train.launch.slurm.time_limit import TimeLimit
from hpc_train.launch.watching import HangResponse, WatchSettings, read_watch_settings, report_notice
from hpc_train.regular_files import read_json
from hpc_train.resilience.agent import END, KILL, LEAVE, Report, decode_report
from hpc_train.resilience.deadlines import merge_learned, read_learned, write_learned
from hpc_train.resilience.exclusion import EXCLUDE, choose_excluded, read_strikes
from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.incident import Incident, write_incident
from hpc_train.resilience.watch import GONE, RankView, read_process_state
from hpc_train.training.records.run_records import append_event

AGENTS = "agents"
"""Name of the agents' job step."""
LOST_NODE = "lost-node"
"""File in an attempt's log directory: the name of a node that fell silent. The batch script reads it."""
_AGENT_ERRORS = "agents.err"
_CLAIM = "supervisor.lock"
_ERROR_BYTES = 1 << 20
"""How much of srun's messages is read at a time."""
_TICK_SECONDS = 0.5
_SIGNAL_SECONDS = 1.0
"""How long to wait for scancel: it acts at once, but then waits for all nodes of the job, also for lost ones."""
_SRUN_SECONDS = 6.0
"""How long srun has to end after its ranks were killed."""
_SRUN_SECONDS_WITHOUT_A_NODE = 2.0
"""The same where a node is lost, for which srun would wait as long as Slurm does. In this time the nodes that are left
tell it that their ranks have ended: a slurmstepd whose srun is gone goes on trying, which may drain its node."""
_PEER_SECONDS = 2.0
"""How long ranks have to end by themselves after one of them has failed, and to write down what they saw of that."""
_LATE_SECONDS = 3.0
"""Silence after which a node is late: agents report each second."""
_AGREED_SECONDS = 30.0
"""The same after an exit code that all ranks agree on, when they stop on purpose."""
_END_SECONDS = 5.0
"""How long agents have to end once they are told to."""
_AGENT_START_SECONDS = 20.0
"""How much longer than usual a node may be silent whose agent is started again."""
_STEPS_AHEAD = 5
"""Steps of other nodes' ranks that show that a silent node still computes."""
_AGENTS_AGAIN_SECONDS = 5.0
"""Between two starts of the agents."""
_LEARNED_SECONDS = 30.0
"""Between two writes of the deadlines that were learned, which a supervisor that is started again reads."""


@dataclass
class _Node:
    report: Report
    silent: float = 0.0
    """Seconds since its last report, counted only while this process runs."""
    agent_starts: bool = False
    """Whether its agent was started again and has not reported since."""
    front: int | None = None
    """The step that any rank had come to when the node had been silent for half as long as it may be; None before."""


@dataclass
class SrunErrors:
    """What an srun says of its tasks that have failed, read as it comes."""

    path: Path
    """Where its standard error goes."""
    _position: int = 0

    def read_exit_codes(self) -> list[int]:
        """Return how tasks have ended that were reported since the last call; see list_exit_codes."""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(self._position)
            text, newline, _ = file.read(_ERROR_BYTES).rpartition(b"\n")
            self._position += len(text + newline)
            return list_exit_codes((text + newline).decode(errors="replace"))
        return []


@dataclass
class PeerFailures:
    """Decides when ranks are to be ended because one of them has failed."""

    errors: SrunErrors
    """Of the ranks' srun."""
    _due: float = float("inf")
    killed: float | None = None
    """When the others were killed."""

    def are_due(self) -> bool:
        """Return whether a rank has failed, and the others had enough time to end by themselves."""
        for code in self.errors.read_exit_codes():
            seconds = _AGREED_SECONDS if code in (EXIT_REQUEUE, EXIT_NO_REQUEUE) else _PEER_SECONDS
            self._due = min(self._due, time.monotonic() + seconds)
        return time.monotonic() >= self._due


@dataclass
class AgentReports:
    """The newest report of each node, read from the agents' srun as it comes."""

    start: Callable[[Mapping[Phase, float]], subprocess.Popen[bytes]]
    """Starts the agents, with the deadlines that were learned so far."""
    errors: SrunErrors
    """Of the agents' srun."""
    nodes: dict[str, _Node] = field(default_factory=dict)
    ended: bool = False
    """Whether the agents have ended by themselves."""
    _unparsed: bytes = b""
    _last_read: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.errors.read_exit_codes()  # of earlier agents
        self.process = self.start(self.merge_learned())
        self._started, self.ended, self._unparsed = time.monotonic(), False, b""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def start_again(self) -> bool:
        """Have all agents end if one of them was killed, and start them again; returns whether they were started."""
        if self.errors.read_exit_codes():
            self.send(LEAVE)
        if not self.ended or time.monotonic() < self._started + _AGENTS_AGAIN_SECONDS:
            return False
        self.close()
        self._begin()
        for host in self.nodes:
            self.expect_new_agent(host)
        return True

    def expect_new_agent(self, host: str) -> None:
        """Give a node time for the start of another agent, once: a node on which none can start is lost."""
        node = self.nodes[host]
        if not node.agent_starts:
            node.silent, node.agent_starts = -_AGENT_START_SECONDS, True

    def merge_learned(self) -> dict[Phase, float]:
        """Return the deadlines that the agents have learned."""
        return merge_learned(node.report.learned for node in self.nodes.values())

    def read(self, seconds: float) -> None:
        """Read reports for this many seconds, or until a rank is late, and count how long each node has been silent."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._selector.select(left):
                data = os.read(self.process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
                if not data:  # all agents are gone
                    self.ended = True
                    time.sleep(left)
                    break
                if self._parse_reports(data):
                    break
        now = time.monotonic()
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
                self.nodes[report.host] = _Node(report, -_TICK_SECONDS)
                late = late or any(view.overdue for view in report.views)
        return late

    def _find_front(self) -> int:
        return max((view.step for view in self.list_views()), default=0)

    def has_a_stuck_agent(self, host: str) -> bool:
        """Return whether a silent node is there, and only its agent is not, as where somebody has stopped it.

        Ranks on other nodes still make steps, which they cannot without its ranks; or it is the node of this process.
        Steps count from the middle of its silence on, as it may have died at any moment after its last report. An
        agent that has just been started again counts as any other: the node may be overloaded.
        """
        node = self.nodes[host]
        others_go_on = node.front is not None and self._find_front() - node.front >= _STEPS_AHEAD
        return not node.agent_starts and (others_go_on or host == socket.gethostname())

    def list_views(self) -> list[RankView]:
        """Return the newest views of all ranks."""
        return [view for node in self.nodes.values() for view in node.report.views]

    def list_machines(self) -> dict[str, Any]:
        """Return what nodes with late ranks say of their kernel logs and ports, by host."""
        return {host: node.report.machine for host, node in self.nodes.items() if node.report.machine}

    def find_notice(self) -> Report | None:
        """Return the report of a node that is about to be taken away; None if there is none."""
        return next((node.report for node in self.nodes.values() if node.report.notice), None)

    def find_silent(self, seconds: float) -> str | None:
        """Return a node that has said nothing for so long, while another still reports; None if there is none."""
        for node in self.nodes.values():
            if node.front is None and node.silent > seconds / 2:
                node.front = self._find_front()
        silent = [host for host, node in self.nodes.items() if node.silent > seconds]
        return silent[0] if silent and len(silent) < max(2, len(self.nodes)) else None

    def may_miss_a_node(self, seconds: float) -> bool:
        """Return whether a node is late that may yet turn out to be lost, after `seconds` of silence.

        The ranks on the other nodes often fail first, because their connections break.
        """
        return any(_LATE_SECONDS < node.silent <= seconds + 2 * _TICK_SECONDS for node in self.nodes.values())

    def send(self, order: bytes) -> None:
        """Write to the standard input of all agents; nothing happens if they are gone."""
        with suppress(OSError):
            os.write(self.process.stdin.fileno(), order)  # type: ignore[union-attr]

    def close(self, seconds: float = _END_SECONDS) -> None:
        """Let the agents end; those that have not done so after `seconds` are killed."""
        self._selector.close()
        self.send(END)
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]


def start_agents(logs: Path, resilience: Mapping[str, Any], nodes: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start an agent on each of these nodes, in a step of its own that takes nothing from the ranks."""
    count, names = len(nodes), ",".join(nodes)
    options = ["--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={names}"]
    quiet = [
        "--cpus-per-task=1",
        "--mem=0",
        "--mpi=none",
        "--cpu-bind=none",
        "--unbuffered",
        "--kill-on-bad-exit=0",  # for which Slurm takes KillWait: the supervisor has the others end
        f"--job-name={AGENTS}",
    ]
    agent = [sys.executable, "-P", "-m", "hpc_train.resilience.agent", str(logs), json.dumps(dict(resilience))]
    with (logs / _AGENT_ERRORS).open("ab") as errors:
        # Variables that srun would take for options of the ranks' step must not reach this one.
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_CPUS", "SLURM_NTASKS"))}
        return subprocess.Popen(
            ["srun", *options, *quiet, *agent],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            start_new_session=True,
        )


def supervise(
    logs: Path,
    ranks: int,
    settings: WatchSettings,
    resilience: Mapping[str, Any],
    stop_signals: Sequence[int],
    signal_seconds: float,
) -> None:
    """Watch the ranks until their srun has ended.

    resilience: that part of the run's configuration. stop_signals: those that this process has got so far.
    signal_seconds: launch.signal_seconds.
    """
    job = current_job_id(os.environ)
    assert job is not None
    limit = TimeLimit(job, signal_seconds)
    silent, stopping, near, lost = float(resilience["node_silent_seconds"]), False, False, None
    nodes, run = expand_hostlist(os.environ["HPC_TRAIN_NODES"]), logs.parents[1]

    def start(learned: Mapping[Phase, float]) -> subprocess.Popen[bytes]:
        seconds = {phase.name: value for phase, value in {**read_learned(run), **learned}.items()}
        return start_agents(logs, {**resilience, "learned": seconds}, nodes)

    reports, learned_due = AgentReports(start, SrunErrors(logs / _AGENT_ERRORS)), time.monotonic() + _LEARNED_SECONDS
    growth = GrowthCheck(run, nodes, float(resilience["elastic"]["grow_seconds"]))
    response = HangResponse(logs, settings, lambda: signal_ranks(job, signal.SIGUSR1), list_task_hosts(run, nodes))
    failures = PeerFailures(SrunErrors(logs / SRUN_ERRORS))
    try:
        while is_running(ranks):
            reports.read(_TICK_SECONDS)
            if is_running(ranks) and reports.start_again():
                report_watch(logs, "an agent has ended before the ranks, and the agents were started again")
            if time.monotonic() > learned_due:
                learned_due = time.monotonic() + _LEARNED_SECONDS
                write_learned(run, reports.merge_learned())
            lost = reports.find_silent(silent)
            if lost and reports.has_a_stuck_agent(lost):
                print(f"hpc-train: the agent of {lost} says nothing, though its ranks go on", flush=True)
                signal_steps(job, signal.SIGKILL, agents=True)
                reports.expect_new_agent(lost)
                lost = None
            if lost and is_running(ranks):
                report_lost_node(logs, lost, reports, settings)
                if settings.act:
                    end_ranks(job, ranks, reports, _SRUN_SECONDS_WITHOUT_A_NODE)
                return
            if not stopping and (notice := reports.find_notice()):
                stopping = True
                report_notice(logs, notice.host, notice.notice)
                signal_ranks(job, signal.SIGUSR2)  # all ranks save the same step, and the job is requeued
            if not stopping and growth.finds_nodes():
                stopping = True
                report_growth(logs, len(nodes), growth.wanted, settings)
                if settings.act:
                    signal_ranks(job, signal.SIGUSR2)
            near = near or limit.is_near()
            if near and not stopping and have_started(reports.list_views()):
                stopping = True
                print("hpc-train: the time limit of the job is near: the ranks are asked to save and stop", flush=True)
                signal_ranks(job, signal.SIGUSR2)
            if failures.are_due():
                if end_peers(failures, job, ranks, reports, silent):
                    return
            elif response.respond(reports.list_views(), reports.list_machines()):
                end_ranks(job, ranks, reports)
                return
    finally:
        limit.close()
        growth.close()
        if reports.nodes:
            write_learned(run, reports.merge_learned())
        if not stop_signals:  # a rank that outlives its srun would go on beside those of the next attempt
            reports.send(KILL)
        reports.close(_SIGNAL_SECONDS if lost else _END_SECONDS)


def have_started(views: Sequence[RankView]) -> bool:
    """Return whether all ranks have met: from then on, a signal reaches each of them."""
    return bool(views) and all(view.phase is not Phase.START for view in views)


def count_ranks_per_node(spec: Mapping[str, Any]) -> int:
    """Return the ranks of each node. spec: the job.json of the run."""
    node = spec["config"]["cluster"]["node"]
    return int(node["ranks"] or max(int(node["gpus"]), 1))


def list_task_hosts(run: Path, nodes: Sequence[str]) -> list[str]:
    """Return the node of each task of a run on these nodes: Slurm numbers the tasks node by node."""
    ranks = count_ranks_per_node(read_json(run / "job.json"))
    return [node for node in nodes for _ in range(ranks)]


class GrowthCheck:
    """Asks Slurm from time to time for the nodes that a run lacks which goes on with fewer (resilience.elastic)."""

    def __init__(self, run: Path, nodes: Sequence[str], seconds: float) -> None:
        """nodes: those that the ranks are on. seconds: between two questions; 0: nothing is asked."""
        spec = read_json(run / "job.json")
        self.wanted = int(spec["ranks"]) // count_ranks_per_node(spec)
        self._words = [sys.executable, "-P", "-m", "hpc_train.launch.slurm.waiting_time", str(run), ",".join(nodes)]
        self._seconds = seconds if len(nodes) < self.wanted else 0.0
        self._next = time.monotonic() + self._seconds
        self._question: subprocess.Popen[bytes] | None = None

    def finds_nodes(self) -> bool:
        """Return whether Slurm has the missing nodes; never waits for the answer."""
        if self._question is not None:
            code = self._question.poll()
            if code is not None:
                self._question, self._next = None, time.monotonic() + self._seconds
            return code == 0
        if self._seconds and time.monotonic() > self._next:
            self._question = subprocess.Popen(self._words, stdin=subprocess.DEVNULL)
        return False

    def close(self) -> None:
        """End a question that was not answered."""
        if self._question is not None:
            self._question.kill()
            self._question.wait()


def report_growth(logs: Path, nodes: int, wanted: int, settings: WatchSettings) -> None:
    """Write down that the job is about to be requeued for all of its nodes, and which it keeps away from."""
    run = logs.parents[1]
    text = f"the run has {nodes} of its {wanted} nodes, and the others are free now"
    action = "asked to save and stop" if settings.act else "left alone: resilience.act=false"
    with suppress(OSError):
        (logs / EXCLUDE).write_text(",".join(choose_excluded(read_strikes(run), wanted)) + "\n")
    append_event(run / "events.jsonl", "grow", int(logs.name), why=text, action=action)


def report_watch(logs: Path, text: str) -> None:
    """Write down that the ranks were not watched for some seconds."""
    append_event(logs.parents[1] / "events.jsonl", "watch", int(logs.name), why=text)


def report_lost_node(logs: Path, host: str, reports: AgentReports, settings: WatchSettings) -> None:
    """Write down that a node has fallen silent."""
    text = f"node {host} has not been heard of for {reports.nodes[host].silent:.0f} s"
    write_incident(logs, Incident("lost node", text, None, host, reports.list_views()), reports.list_machines())
    if settings.act:
        (logs / LOST_NODE).write_text(host + "\n")
    action = "ended" if settings.act else "left alone: resilience.act=false"
    append_event(logs.parents[1] / "events.jsonl", "lost_node", int(logs.name), why=text, action=action)


def signal_ranks(job: str, number: signal.Signals) -> None:
    """Signal the ranks of a job."""
    signal_steps(job, number, agents=False)


def signal_steps(job: str, number: signal.Signals, agents: bool) -> None:
    """Signal the newest step of a job's ranks, or of its agents. SIGKILL to the job as a whole would cancel it.

    An older step is one of an earlier attempt, which Slurm has not given up yet because a node of it was lost.
    """
    others = ("batch", "extern")
    steps = [step for step, name in list_steps(job) if name not in others and (name == AGENTS) is agents]
    if steps:
        newest = max(steps, key=lambda step: int(step.rpartition(".")[2]))
        process = subprocess.Popen(["scancel", f"--signal={number.name.removeprefix('SIG')}", newest])
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SIGNAL_SECONDS)


def end_ranks(job: str, srun: int, reports: AgentReports, seconds: float = _SRUN_SECONDS) -> None:
    """Kill the ranks of a job, and their srun (a process id) if it has not ended `seconds` later."""
    kill_ranks(job, reports)
    end = time.monotonic() + seconds
    while is_running(srun) and time.monotonic() < end:
        time.sleep(0.1)
    kill_srun(srun)


def end_peers(failures: PeerFailures, job: str, srun: int, reports: AgentReports, silent: float) -> bool:
    """Kill the ranks that are left after one has failed, and later their srun; returns whether that was done, too.

    srun is left while a node may turn out to be lost, which happens after `silent` seconds without a report.
    """
    if failures.killed is None:
        kill_ranks(job, reports)
        failures.killed = time.monotonic()
    if time.monotonic() < failures.killed + _SRUN_SECONDS or reports.may_miss_a_node(silent):
        return False
    kill_srun(srun)
    return True


def kill_ranks(job: str, reports: AgentReports) -> None:
    """Kill the ranks of a job, by its agents and by Slurm.

    By the agents, as a node whose slurmstepd was killed does not get Slurm's signal, and srun then waits for that node.
    """
    reports.send(KILL)
    signal_ranks(job, signal.SIGKILL)


def kill_srun(process: int) -> None:
    """Kill an srun that has not ended after its ranks."""
    if is_running(process):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def list_steps(job: str) -> list[tuple[str, str]]:
    """Return id and name of each running step of a job."""
    answer = run_client(["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i|%j"])
    pairs = (line.strip().partition("|") for line in answer.out.splitlines())
    return [(step, name) for step, _, name in pairs if step]


def is_running(process: int) -> bool:
    """Return whether a process is there and is no zombie, which its parent has still to wait for."""
    return read_process_state(process) != GONE


def claim_ranks(logs: Path) -> bool:
    """Return whether this process is the only supervisor of an attempt, and stays so until it ends.

    Two of them would both kill ranks and report each fault twice. The file system may have no locks: then it is taken
    to be the only one, since a batch script starts no second one beside it.
    """
    descriptor = os.open(logs / _CLAIM, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True  # the descriptor stays open: the kernel gives the lock back when this process ends, however it does


def main(logs: str, process: str) -> int:
    """Watch the ranks of one attempt; what goes wrong here is printed, and does not touch them."""
    # Handlers, and not SIG_IGN, which children would inherit: Slurm sends these to the whole batch step.
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda number, _: stop_signals.append(number))
    settings = read_watch_settings(Path(logs))
    if settings is None:
        return 0
    if not claim_ranks(Path(logs)):
        print("hpc-train: another supervisor watches these ranks; this one leaves", flush=True)
        return 0
    config = read_json(Path(logs).parents[1] / "job.json")["config"]
    resilience = {**config["resilience"], "compiles": bool(config["parallel"]["compile"])}
    if (Path(logs) / _AGENT_ERRORS).exists():
        report_watch(Path(logs), "the supervisor has ended before the ranks, and was started again")
    signal_seconds = float(config["launch"]["signal_seconds"])
    supervise(Path(logs), int(process), settings, resilience, stop_signals, signal_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
