"""The supervisor of a Slurm job: watch the ranks by an agent on every node; end those that hang or whose peer failed.

`python -m hpc_train.launch.slurm.supervisor.supervise LOGS PROCESS SCRIPT RECORD`, beside the ranks in the batch
script. PROCESS is the srun that started the ranks, SCRIPT the shell of the batch script, RECORD the descriptor of its
record of stop signals (stop_listener.sh), or nothing. The supervisor only ends ranks; the
batch script decides afterwards whether they are started again (hpc_train.launch.recovery.restarting). If the supervisor
dies, the ranks are not affected: its agents see the end of their input, and the script starts it again. It learns about
the ranks from the agents (agent_reports.py).
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_train.cluster.hostlist import expand_hostlist, list_task_hosts
from hpc_train.launch.command_output import print_to_job_log
from hpc_train.launch.recovery.failures import LOST_NODES, SRUN_ERRORS, STOP_ASKED
from hpc_train.launch.slurm.slurm_cli import current_job_id
from hpc_train.launch.slurm.supervisor.agent_reports import (
    AGENT_ERRORS,
    AGENTS,
    END_SECONDS,
    END_SECONDS_WITHOUT_A_NODE,
    TICK_SECONDS,
    AgentReports,
    NodeProbe,
    start_agents,
    start_probe,
)
from hpc_train.launch.slurm.supervisor.allowed_losses import LEFT_TO_OTHERS, AllowedLosses
from hpc_train.launch.slurm.supervisor.growth import GrowthCheck, count_ranks_per_node, report_growth
from hpc_train.launch.slurm.supervisor.job_steps import (
    LEFT_SRUN,
    SRUN_SECONDS,
    SRUN_SECONDS_WITHOUT_A_NODE,
    end_ranks,
    end_stuck_srun,
    is_running,
    kill_ranks,
    leave_srun,
    open_process,
    signal_ranks,
    signal_step,
)
from hpc_train.launch.slurm.supervisor.lost_script import make_lost_script_command
from hpc_train.launch.slurm.supervisor.silent_srun import EndedRanks, StuckStart, report_stuck_start, write_ended_tasks
from hpc_train.launch.slurm.supervisor.srun_errors import PeerFailures, SrunErrors
from hpc_train.launch.slurm.supervisor.time_limit import OUT_OF_TIME, PREEMPTED, TimeLimit
from hpc_train.launch.watching import (
    LATE_END_SECONDS,
    HangResponse,
    WatchSettings,
    describe_blindness,
    read_watch_settings,
    report_notice,
    report_watch,
)
from hpc_train.regular_files import read_json, write_private_file
from hpc_train.resilience.agent import KILL, STACKS, STOP
from hpc_train.resilience.deadlines import read_learned, write_learned
from hpc_train.resilience.exclusion import write_doubtful
from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.incident import HANG, Incident, write_incident
from hpc_train.resilience.watch import RankView, find_hang
from hpc_train.training.records.run_records import append_event

ENDED = "ended"
"""Action in the report of most faults: the ranks were ended."""
_CLAIM = "supervisor.lock"
STOP_WORD = b"hpc-train-stop"
"""Text in the batch script's record of stop signals after the job was asked to stop (stop_listener.sh)."""
_WITHOUT_STEPS = (Phase.START, Phase.LOAD, Phase.FIRST_STEP)
"""Phases of ranks that have nothing to save."""
_FIRST_REPORT_SECONDS = 10.0
"""How long the agents of a supervisor that was started again have to report, before it ends the ranks without them."""
_LEARNED_SECONDS = 30.0
"""Seconds between two writes of the learned deadlines, which a restarted supervisor reads."""


class Supervisor:
    """Watches the ranks of one attempt, asks them to stop where they have to, and ends them after a fault."""

    def __init__(
        self,
        logs: Path,
        srun: int,
        settings: WatchSettings,
        resilience: Mapping[str, Any],
        launch: Mapping[str, Any],
        stop_record: int | None = None,
    ) -> None:
        """Start the agents.

        srun: process id of the ranks' srun. resilience, launch: these parts of the run's configuration. stop_record:
        descriptor of the batch script's record of stop signals.
        """
        job = current_job_id(os.environ)
        assert job is not None
        self._logs, self._run, self._srun, self._job = logs, logs.parents[1], srun, job
        self._settings, self._resilience, self._stop_record = settings, resilience, stop_record
        self._nodes = expand_hostlist(os.environ["HPC_TRAIN_NODES"])
        self._spares = [host for host in expand_hostlist(os.environ["SLURM_JOB_NODELIST"]) if host not in self._nodes]
        self._silent_seconds = float(resilience["node_silent_seconds"])
        self._stopping = self._time_is_short = self._lost_a_node = False
        self._decided = [name for name in (HANG, LOST_NODES, OUT_OF_TIME) if (logs / name).exists()]
        self._began = time.monotonic()
        errors, self._srun_end = SrunErrors(logs / AGENT_ERRORS), open_process(srun)
        self._reports = AgentReports(self._start_agents, errors, self._nodes, self._srun_end)
        self._learned_due = time.monotonic() + _LEARNED_SECONDS
        self._limit = TimeLimit(job, float(launch["signal_seconds"]))
        runs = int(os.environ.get("SLURM_RESTART_COUNT", "0")) + 1
        self._may_run_again = runs < launch["max_attempts"] or launch["chain"] > 1
        self._probe = NodeProbe(lambda host: start_probe(host, self._nodes))
        self._growth = GrowthCheck(logs, self._nodes, float(resilience["elastic"]["grow_seconds"]))
        frozen = read_json(self._run / "job.json")
        ranks = count_ranks_per_node(frozen)
        # Ranks are known by task here: a rank map exists only once they have met.
        hosts = list_task_hosts(self._nodes, [ranks] * len(self._nodes), os.environ)
        self._response = HangResponse(logs, settings, lambda: signal_ranks(job, signal.SIGUSR1), hosts)
        self._failures = PeerFailures(SrunErrors(logs / SRUN_ERRORS))
        self._start = StuckStart(logs, settings.limits.start)
        self._ended = EndedRanks(len(hosts))
        self._losses = AllowedLosses(logs, frozen["config"]["parallel"]["sync"]["lost_after_seconds"], hosts)
        self._reported_start = self._reported_blind = self._reported_late_end = self._recorded_stop = False
        self._asked_to_end: float | None = None
        self._reported_lost: set[str] = set()

    def _start_agents(self, learned: Mapping[Phase, float]) -> subprocess.Popen[bytes]:
        seconds = {phase.name: value for phase, value in {**read_learned(self._run), **learned}.items()}
        return start_agents(self._logs, {**self._resilience, "learned": seconds}, self._nodes)

    def watch(self, stop_signals: Sequence[int], script: int | None = None) -> None:
        """Watch the ranks until their srun has ended, or they were ended.

        stop_signals: the signals that this process has received so far. script: process id of the batch script.
        """
        try:
            while is_running(self._srun):
                self._reports.read(TICK_SECONDS)
                self._record_stop_signal()
                self._look_after_agents()
                if stop_signals:
                    self._report_late_end()
                # A lost node comes before other faults: it is why the ranks on the other nodes fail, or hang.
                if self._finish_decision() or self._end_after_lost_node() or self._end_after_fault():
                    return
        finally:
            # Where the script was killed, Slurm kills what it has started, too, and asks the ranks to save and stop.
            self._close(bool(stop_signals) or (script is not None and not is_running(script)))

    def _record_stop_signal(self) -> None:
        """Write down that the job was asked to stop: its ranks do not start again after a fault."""
        if not self._recorded_stop and (self._reports.stop_signal or is_stop_recorded(self._stop_record)):
            self._recorded_stop = True
            self._limit.ask_again()
            with suppress(OSError):
                (self._logs / STOP_ASKED).touch(mode=0o600)

    def _look_after_agents(self) -> None:
        """Replace agents that have ended or all report nothing, and record what they cannot see and have learned."""
        if self._reports.are_all_silent(self._silent_seconds):
            self._replace_agents()
        if is_running(self._srun) and self._reports.start_again():
            report_watch(self._logs, "an agent has ended before the ranks, or none reports: they were started again")
        blind = self._reports.find_blind()
        if blind is not None and not self._reported_blind:
            self._reported_blind = True
            report_watch(self._logs, describe_blindness(blind.host, blind.blind))
        if time.monotonic() > self._learned_due:
            self._learned_due = time.monotonic() + _LEARNED_SECONDS
            write_learned(self._run, self._reports.merge_learned())

    def _report_late_end(self) -> None:
        """Record once what holds up the ranks of a job that is cancelled, or requeued by Slurm, if they do not end."""
        now = time.monotonic()
        self._asked_to_end = self._asked_to_end or now
        seconds = now - self._asked_to_end
        if self._reported_late_end or seconds < LATE_END_SECONDS or not is_running(self._srun):
            return
        text = self._response.report_late_end(
            self._reports.list_views(), seconds, lambda: self._reports.send(STACKS), self._reports.list_machines()
        )
        self._reported_late_end = bool(text)
        if text:
            print_to_job_log(f"hpc-train: {text}")

    def _replace_agents(self) -> None:
        """Have all agents end and new ones start; it may as well be their srun that is stopped."""
        signal_step(self._job, AGENTS, signal.SIGKILL)
        self._reports.give_up()

    def _finish_decision(self) -> bool:
        """Return whether the ranks were ended as an earlier supervisor of them had decided, and was killed meanwhile.

        What it has written down would otherwise explain a later end of the ranks, which may train on by now.
        """
        if not self._decided:
            return False
        if not self._reports.nodes and time.monotonic() < self._began + _FIRST_REPORT_SECONDS:
            return False
        self._lost_a_node = LOST_NODES in self._decided
        seconds = SRUN_SECONDS_WITHOUT_A_NODE if self._lost_a_node else SRUN_SECONDS
        end_ranks(self._logs, self._job, self._srun, self._reports, seconds)
        return True

    def _end_after_lost_node(self) -> bool:
        """Return whether all ranks were ended because nodes are lost; resilience.act=false: that is only reported."""
        # Spare nodes are asked, too, as soon as a node may be lost: the ranks would start again on them.
        doubtful = self._spares if self._reports.is_any_late(self._silent_seconds / 2) else ()
        self._probe.ask([*self._reports.list_late(), *doubtful])
        silent = self._reports.find_silent(self._silent_seconds)
        reachable = [host for host in silent if self._is_there(host)]
        lost = [host for host in silent if host not in reachable and self._is_needed(host)]
        if reachable and not lost:
            self._give_up_agents(reachable)
        self._lost_a_node = bool(lost)
        if set(lost) <= self._reported_lost or not is_running(self._srun):
            return False
        self._reported_lost |= set(lost)
        if self._losses.cover(self._reports.list_views(), lost):
            report_lost_nodes(self._logs, lost, self._reports, LEFT_TO_OTHERS)
            self._leave_out(lost)
            return False
        action = ENDED if self._settings.act else "left alone: resilience.act=false"
        report_lost_nodes(self._logs, lost, self._reports, action)
        write_doubtful(self._logs, [host for host in self._spares if not self._probe.has_answered(host)])
        if self._settings.act:
            end_ranks(self._logs, self._job, self._srun, self._reports, SRUN_SECONDS_WITHOUT_A_NODE)
        return self._settings.act

    def _leave_out(self, lost: Sequence[str]) -> None:
        """Watch no longer what was on nodes without which the ranks on the others go on."""
        for host in lost:
            self._reports.leave_unwatched(host)
        self._nodes = [host for host in self._nodes if host not in lost]
        self._ended.leave_out(self._losses.count_tasks(lost))
        self._lost_a_node = False
        self._losses.begin_to_wait()

    def _is_there(self, host: str) -> bool:
        """Return whether a silent node is there, and only lacks an agent that reports."""
        needed = not self._losses.cover(self._reports.list_views(), [host])
        return self._reports.has_a_stuck_agent(host, needed) or self._probe.has_answered(host)

    def _is_needed(self, host: str) -> bool:
        """Return whether the ranks miss a silent node.

        One that has never reported may just have no agent, while its ranks train on.
        """
        if host not in self._reports.list_absent() or self._failures.killed is not None:
            return True
        views = self._reports.list_views()
        waits = bool(views) and all(view.phase is Phase.START for view in views)
        return waits or find_hang(views) is not None

    def _give_up_agents(self, hosts: Sequence[str]) -> None:
        """Replace agents that say nothing, though their nodes are there; do without those that have never begun."""
        print_to_job_log(f"hpc-train: {', '.join(hosts)}: no agent reports from there, though it is there")
        absent = self._reports.list_absent()
        for host in hosts:
            if host in absent:
                self._reports.leave_unwatched(host)
        if not set(hosts) <= set(absent):
            self._replace_agents()

    def _end_after_fault(self) -> bool:
        """Ask the ranks to stop if necessary; return whether they were ended because one failed or hangs."""
        self._time_is_short = self._time_is_short or self._limit.is_near()
        if not self._stopping:
            self._ask_to_stop_if_due()
        # A failed rank comes before a hang: its peers wait for it in a collective, and look as if they hung.
        views = self._reports.list_views()
        if self._failures.are_due() and not self._losses.cover(views):
            return self._end_peers()
        if self._is_out_of_time(views):
            return self._end_before_limit()
        # A supervisor that begins after a node was lost sees only the ranks of others, all of which hang.
        seen = not self._reports.list_absent() and not self._losses.may_be_unnoticed()
        seen = seen and not self._reports.are_old()
        machines, disks = self._reports.list_machines(), self._reports.list_disks()
        if seen and self._response.respond(views, machines, disks):
            end_ranks(self._logs, self._job, self._srun, self._reports)
            return True
        if self._ended.outlive_srun(views):
            report_watch(self._logs, "all ranks have ended, and their srun has not noticed: it is left behind")
            write_ended_tasks(self._logs, views)
            leave_srun(self._logs, self._srun)
            return True
        return self._start.is_overdue(views) and self._end_stuck_start()

    def _end_stuck_start(self) -> bool:
        """Report once that srun has started no rank; return whether srun was ended for that reason."""
        if not self._reported_start:
            self._reported_start = True
            report_stuck_start(self._logs, self._start.describe(), self._settings)
        if self._settings.act:
            end_stuck_srun(self._logs, self._job, self._srun, self._reports)
        return self._settings.act

    def _is_out_of_time(self, views: Sequence[RankView]) -> bool:
        """Return whether Slurm would end the ranks before they have trained or saved, and then not requeue the job.

        A job that may not run again is left to its limit: Slurm's TIMEOUT says best how it ended.
        """
        if not self._time_is_short or self._limit.leaves_time():
            return False
        if not (self._may_run_again and self._settings.act and self._resilience["restarts"]):
            return False
        if not self._limit.leaves_time(saving=True):
            return not views or any(view.phase is not Phase.END for view in views)
        if not views:  # ranks that agents cannot see, as in a container, have logs, and may have something to save
            return not any(self._logs.glob("task-*.log"))
        return all(view.phase in _WITHOUT_STEPS for view in views)

    def _end_before_limit(self) -> bool:
        """End the ranks, so that the job can be requeued."""
        preempted = self._limit.is_preempted
        limit = "the end of the grace time" if preempted else "the time limit"
        print_to_job_log(f"hpc-train: {limit} is here, and the ranks have not stopped: they are ended")
        with suppress(OSError):
            write_private_file(self._logs / OUT_OF_TIME, f"{PREEMPTED}\n" if preempted else "")
        end_ranks(self._logs, self._job, self._srun, self._reports)
        return True

    def _ask_to_stop_if_due(self) -> None:
        """Ask all ranks to save the same step and stop, if they cannot continue for long; the job is then requeued."""
        if notice := self._reports.find_notice():
            report_notice(self._logs, notice.host, notice.notice)
        elif self._growth.finds_nodes():
            report_growth(self._logs, len(self._nodes), self._growth.wanted, self._settings)
            self._stopping = True
            if not self._settings.act:
                return
        elif self._recorded_stop and self._reports.list_views():
            # The signal came before some of them were there; all stop if one does. Not by Slurm, which may have
            # begun to requeue the job.
            self._stopping = True
            self._reports.send(STOP)
            return
        elif self._time_is_short and have_started(self._reports.list_views()):
            print_to_job_log("hpc-train: the time limit of the job is near: the ranks are asked to save and stop")
        else:
            return
        self._stopping = True
        self._reports.send(STOP)  # by the agents and by Slurm, whose controller may not answer now
        signal_ranks(self._job, signal.SIGUSR2)

    def _end_peers(self) -> bool:
        """Kill the remaining ranks after one has failed; return whether their srun also had enough time to end.

        srun is given time while a node may still turn out to be lost, which shows after some seconds without a report.
        """
        if self._failures.killed is None:
            write_ended_tasks(self._logs, self._reports.list_views())
            kill_ranks(self._job, self._reports)
            self._failures.killed = time.monotonic()
        self._reports.hurry_absent()
        early = time.monotonic() < self._failures.killed + SRUN_SECONDS
        if early or self._reports.may_miss_a_node(self._silent_seconds):
            return False
        leave_srun(self._logs, self._srun)
        return True

    def _close(self, stopped: bool) -> None:
        """End the agents and probes, and save the learned deadlines for the next attempt."""
        self._limit.close()
        self._growth.close()
        if self._reports.nodes:
            write_learned(self._run, self._reports.merge_learned())
        if not stopped:  # a rank that outlives its srun would go on beside those of the next attempt
            self._reports.send(KILL)
        self._reports.close(END_SECONDS_WITHOUT_A_NODE if self._lost_a_node else END_SECONDS)
        self._record_stop_signal()
        for errors in (self._reports.errors, self._failures.errors):
            errors.close()
        if self._srun_end is not None:
            os.close(self._srun_end)


def have_started(views: Sequence[RankView]) -> bool:
    """Return whether all ranks have met at the rendezvous; from then on, each of them handles signals."""
    return bool(views) and all(view.phase is not Phase.START for view in views)


def is_stop_recorded(record: int | None) -> bool:
    """Return whether the batch script knows that the job was asked to stop. record: descriptor of its record."""
    try:
        return record is not None and STOP_WORD in os.pread(record, 4096, 0)
    except OSError:
        return False


def report_lost_nodes(logs: Path, hosts: Sequence[str], reports: AgentReports, action: str) -> None:
    """Record that nodes have fallen silent, as one incident. action: what is done about the ranks on the others."""
    seconds = min(reports.nodes[host].silent for host in hosts)
    which = f"node {hosts[0]} has" if len(hosts) == 1 else f"nodes {', '.join(hosts)} have"
    text = f"{which} not been heard of for {seconds:.0f} s"
    write_incident(logs, Incident("lost node", text, None, hosts[0], reports.list_views()), reports.list_machines())
    if action == ENDED:
        with suppress(OSError):  # a full disk: the ranks are ended all the same
            write_private_file(logs / LOST_NODES, "\n".join(hosts) + "\n")
    what = {"why": text, "hosts": list(hosts), "action": action}
    append_event(logs.parents[1] / "events.jsonl", "lost_node", int(logs.name), **what)


def claim_ranks(logs: Path) -> bool:
    """Return whether this process is the only supervisor of an attempt, and stays so until it ends.

    Two of them would both kill ranks and report each fault twice. If the file system has no locks, it counts as the
    only one, since a batch script starts one at a time.
    """
    descriptor = os.open(logs / _CLAIM, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True  # the descriptor stays open: the kernel gives the lock back when this process ends, however it does


def main(logs: str, process: str, script: str, record: str = "") -> int:
    """Watch the ranks of one attempt. Errors of the supervisor itself are printed and do not affect the ranks."""
    # Handlers, and not SIG_IGN, which children would inherit: Slurm sends these to the whole batch step.
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, lambda number, _: stop_signals.append(number))
    settings = read_watch_settings(Path(logs))
    if settings is None or (Path(logs) / LEFT_SRUN).exists():  # its ranks have been ended
        return 0
    if not claim_ranks(Path(logs)):
        print_to_job_log("hpc-train: another supervisor watches these ranks; this one leaves")
        return 0
    config = read_json(Path(logs).parents[1] / "job.json")["config"]
    resilience = {
        **config["resilience"],
        "compiles": bool(config["parallel"]["compile"]),
        "last_try": settings.last_try,
        "paths": settings.paths,
        "without_supervisor": make_lost_script_command(logs) if settings.act else [],
    }
    if (Path(logs) / AGENT_ERRORS).exists():
        report_watch(Path(logs), "the supervisor has ended before the ranks, and was started again")
    stop_record = int(record) if record else None
    supervisor = Supervisor(Path(logs), int(process), settings, resilience, config["launch"], stop_record)
    supervisor.watch(stop_signals, int(script))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:5]))
