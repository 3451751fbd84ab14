"""The agent of one node: watches its ranks and reports what it sees, a line of JSON each second on stdout.

`python -m hpc_train.resilience.agent LOGS SETTINGS`, started by the supervisor as a job step of its own on every node.
It opens no port and reads nothing from shared storage. It obeys lines on its standard input: `stop` asks the ranks of
its node to save and stop, `stacks` asks them for their stacks, `kill` kills them, `end` lets it end after the ranks,
`leave` lets it end before them. If its standard input ends without such a line, the supervisor was killed: the agent
then stops reporting, and leaves the ranks' entries to the agent of the next supervisor. An agent that hears nothing,
not even `ping`, runs the command of its settings that looks after the job, and ends once its ranks have.

Stop signals come to every step of a job. An agent reports that it has got one: ranks that fail, or hang, before they
have agreed on their last step cannot say so. Standard library only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.errors import EXIT_REQUEUE
from hpc_train.regular_files import parse_json_object
from hpc_train.resilience.deadlines import make_hang_limits
from hpc_train.resilience.file_systems import Disk
from hpc_train.resilience.heartbeat import Phase, kill_ranks, read_beats, remove_entries, signal_ranks
from hpc_train.resilience.incident import read_machine
from hpc_train.resilience.notices import NoticeWatch
from hpc_train.resilience.watch import (
    GONE,
    LOOK_SECONDS,
    NodeWatch,
    RankView,
    WatchClock,
    read_process_state,
    seconds_to_next_look,
)
from hpc_train.runtime.stop_request import STOP_SIGNALS

REPORT_SECONDS = 1.0
"""Seconds between two reports."""
KILL = b"kill\n"
"""Message by which the supervisor has the ranks killed."""
STOP = b"stop\n"
"""Message by which the supervisor has the ranks asked to save and stop."""
STACKS = b"stacks\n"
"""Message by which the supervisor has the ranks asked for their stacks."""
END = b"end\n"
"""Message by which the supervisor has the agents end, once the ranks have."""
LEAVE = b"leave\n"
"""Message by which the supervisor has the agents end while the ranks go on, before it starts new agents."""
PING = b"ping\n"
"""Message that says only that the supervisor is there."""
PING_SECONDS = 3.0
"""Seconds between two such messages."""
_UNSURE_SECONDS = 10.0
"""After how long without a message an agent finds out, every few seconds, whether the job has lost its supervisor."""
_AGAIN_SECONDS = 5.0
_STOPPED_ALONE_SECONDS = 7.0
"""After how long without a message an agent ends once its ranks have, in a job that was asked to stop or that ends.

Its batch script may have been killed, or an srun may have forgotten it: Slurm then waits for it, up to KillWait.
"""
_ALONE_SECONDS = 60.0
"""After how long without a message an agent ends in any other job.

Slurm does not end an agent on a node that was taken from the job and is back at once.
"""


@dataclass(frozen=True)
class Report:
    """Report of a node's agent to the supervisor: the state of its ranks and of the machine."""

    host: str
    views: list[RankView]
    notice: str = ""
    """The machine is about to be taken away: what its cloud says."""
    blind: str = ""
    """Why notices cannot be seen."""
    learned: dict[Phase, float] = field(default_factory=dict)
    """Deadlines.learned."""
    machine: dict[str, Any] = field(default_factory=dict)
    """incident.read_machine; {} while no rank is late."""
    stop: str = ""
    """Name of the signal that asked all steps of the job to stop."""
    disks: list[Disk] = field(default_factory=list)
    """NodeWatch.disks."""


def encode_report(report: Report) -> str:
    """Return a report as one line."""
    rows = [
        [view.task, int(view.phase), view.step, round(view.silent, 3), round(view.deadline, 3), view.state]
        for view in report.views
    ]
    learned = {phase.name: round(seconds, 3) for phase, seconds in report.learned.items()}
    fields = {"host": report.host, "ranks": rows, "notice": report.notice, "blind": report.blind, "learned": learned}
    disks = [[disk.mount, disk.kind, disk.path, round(disk.seconds, 3)] for disk in report.disks]
    fields |= {"machine": report.machine, "stop": report.stop, "disks": disks}
    return json.dumps(fields, separators=(",", ":"))


def decode_report(line: str) -> Report | None:
    """Return the report on a line; None for any other line."""
    try:
        value = parse_json_object(line)
        host = str(value["host"])
        views = [
            RankView(
                task=int(task),
                phase=Phase(phase),
                step=int(step),
                silent=float(silent),
                deadline=float(deadline),
                state=str(state),
                host=host,
            )
            for task, phase, step, silent, deadline, state in value["ranks"]
        ]
        learned = {Phase[name]: float(seconds) for name, seconds in value["learned"].items()}
        notice, blind, stop = (str(value[name]) for name in ("notice", "blind", "stop"))
        disks = [Disk(str(row[0]), str(row[1]), str(row[2]), float(row[3])) for row in value["disks"]]
        return Report(host, views, notice, blind, learned, dict(value["machine"]), stop, disks)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def name_this_node() -> str:
    """Return Slurm's name for this node, which may not be that of the host; the latter outside of Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def run_agent(logs: Path, settings: dict[str, Any]) -> None:
    """Report on the ranks of this node until the supervisor ends this agent or dies.

    settings: the `resilience` part of a configuration; `learned`: seconds by phase, from earlier attempts; `compiles`
    and `last_try`: see make_hang_limits; `without_supervisor`: the words of a command; `paths`: see NodeWatch.
    """
    learned = {Phase[name]: float(seconds) for name, seconds in settings["learned"].items()}
    host, due = name_this_node(), 0.0
    limits = make_hang_limits(settings["hang"], settings["compiles"], settings["last_try"])
    watch = NodeWatch(logs, limits, learned=learned, paths=settings.get("paths", ()))
    notices, notice, overdue, stop = NoticeWatch(**settings["notice"]), "", False, ""
    supervisor = SupervisorWatch(settings.get("without_supervisor", []))

    def report() -> None:
        machine = read_machine() if overdue else {}
        learned = watch.deadlines.learned()
        # One unbuffered write a line: the supervisor never reads half a report of an agent that was killed.
        line = encode_report(Report(host, views, notice, notices.failure or "", learned, machine, stop, watch.disks))
        os.write(1, line.encode() + b"\n")

    while True:
        views = watch.look()
        notice = notice or notices.poll() or ""
        before, overdue = overdue, any(view.overdue for view in views)
        reported_stop, stop = stop, find_stop_signal()
        # What is new about a rank that is overdue, or a stop, does not wait.
        if time.monotonic() >= due or overdue > before or stop != reported_stop:
            due = time.monotonic() + REPORT_SECONDS
            report()
        readable, _, _ = select.select([0], [], [], seconds_to_next_look(views))
        forgotten = not readable and supervisor.has_left(views, bool(stop))
        if not readable and not forgotten:
            continue
        # Several messages may arrive in one read, so each is searched for. No bytes mean end of file.
        messages = os.read(0, 4096) if readable else END
        supervisor.hear()
        if STOP in messages:
            signal_ranks(logs, signal.SIGUSR2)
        if STACKS in messages:
            signal_ranks(logs, signal.SIGUSR1)
        if KILL in messages:
            kill_ranks(logs)
        if not messages or END in messages or LEAVE in messages:
            reported_stop, stop = stop, find_stop_signal()
            if readable and messages and stop != reported_stop:
                report()
            notices.close()
            if LEAVE not in messages:
                _remove_entries_at_end(logs, supervisor_is_gone=not messages)
            return


class SupervisorWatch:
    """Counts for how long the supervisor has said nothing; a pause of this process counts little."""

    def __init__(self, words: Sequence[str]) -> None:
        """words: of a command that exits with EXIT_REQUEUE if the job had lost its supervisor, and was requeued."""
        self._words, self._clock = words, WatchClock()
        self._silent = self._due = 0.0
        self._command: subprocess.Popen[bytes] | None = None

    def hear(self) -> None:
        """Count from now on."""
        self._clock.tick()
        self._silent = self._due = 0.0

    def has_left(self, views: Sequence[RankView], stops: bool = False) -> bool:
        """Return whether nobody will end this agent, whose ranks have ended; runs the command before. Never waits.

        stops: whether the job was asked to stop.
        """
        self._silent += self._clock.tick()
        if self._command is not None and self._command.poll() == EXIT_REQUEUE:
            return True  # else Slurm would wait for it, up to KillWait
        if self._silent > _UNSURE_SECONDS:
            self._find_out()
        enough = _STOPPED_ALONE_SECONDS if stops else _ALONE_SECONDS
        return self._silent > enough and all(view.ended for view in views)

    def _find_out(self) -> None:
        runs = self._command is not None and self._command.poll() is None
        if not self._words or runs or self._silent < self._due:
            return
        self._due = self._silent + _AGAIN_SECONDS
        null = subprocess.DEVNULL
        with suppress(OSError):
            self._command = subprocess.Popen(self._words, stdin=null, stdout=null, stderr=null)


def _remove_entries_at_end(logs: Path, supervisor_is_gone: bool) -> None:
    """Remove the entries of the ranks: at once if the supervisor says that these have ended, else once they have.

    A supervisor that was killed says nothing. Its successor starts new agents, which need the entries of the ranks for
    as long as these live.
    """
    if supervisor_is_gone:
        _wait_for_ranks(logs)
    remove_entries(logs)


def _wait_for_ranks(logs: Path) -> None:
    """Wait until no rank of this node is alive."""
    while any(read_process_state(beat.process) != GONE for beat in read_beats(logs)):
        time.sleep(LOOK_SECONDS)


def find_stop_signal() -> str:
    """Return the name of a stop signal that this process has got and blocks; "" if there is none."""
    return next((number.name for number in STOP_SIGNALS if number in signal.sigpending()), "")


def main(logs: str, settings: str) -> int:
    """Watch until there is no supervisor to report to."""
    # These go to all steps of the job: they are meant for the ranks. Stop signals wait here for ever, as do those of
    # the commands that an agent starts.
    for number in (signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        run_agent(Path(logs), json.loads(settings))
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
