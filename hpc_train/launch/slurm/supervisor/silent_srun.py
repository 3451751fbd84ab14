"""Notice an srun that is silent: one that starts no rank, or does not report that its ranks have ended.

It hangs, Slurm gives it no step, or no slurmstepd runs its task; or it, or a slurmstepd, was killed or stopped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hpc_train.launch.recovery.failures import ENDED_TASKS, SRUN_ERRORS
from hpc_train.launch.state.attempts import read_tail_text
from hpc_train.launch.watching import WatchSettings
from hpc_train.regular_files import write_private_file
from hpc_train.resilience.heartbeat import Phase
from hpc_train.resilience.incident import Incident, mark_hang, write_incident
from hpc_train.resilience.watch import RankView, WatchClock
from hpc_train.training.records.run_records import append_event

SRUN_END_SECONDS = 30.0
"""How long srun has to end once all of its ranks have: epilogs of tasks may take some seconds."""
_LAST_WORDS = 2000
"""Bytes of srun's messages, the last of which says what it waits for."""


class StuckStart:
    """Tells when no rank of an attempt has begun within the deadline of a start."""

    def __init__(self, logs: Path, seconds: float) -> None:
        """logs: log directory of the attempt. seconds: resilience.hang.start_seconds."""
        self._logs, self.deadline = logs, seconds
        self.silent, self._clock, self._begun = 0.0, WatchClock(), False

    def is_overdue(self, views: Sequence[RankView]) -> bool:
        """Return whether none has begun for longer than it may take. views: of all ranks that agents have seen."""
        self.silent += self._clock.tick()
        if not self._begun:
            # A rank that agents cannot see, as in a container, has a log. The shared file system is asked only late.
            self._begun = bool(views) or (self.silent > self.deadline and any(self._logs.glob("task-*.log")))
        return not self._begun and self.silent > self.deadline

    def describe(self) -> str:
        """Return one line: for how long nothing has begun, and what srun has said last."""
        messages = read_tail_text(self._logs / SRUN_ERRORS, _LAST_WORDS).strip().splitlines()
        words = f"; its last words: {messages[-1]}" if messages else ""
        text = f"srun has started no rank for {self.silent:.0f} s (deadline {self.deadline:.0f} s){words}"
        return "".join(filter(str.isprintable, text))


def report_stuck_start(logs: Path, text: str, settings: WatchSettings) -> None:
    """Write down that no rank has begun: a hang of which no node is known to be to blame."""
    incident = Incident("hang", text)
    folder = write_incident(logs, incident)
    if settings.act:
        mark_hang(logs, incident)
    acted = "ended" if settings.act else "left alone: resilience.act=false"
    append_event(logs.parents[1] / "events.jsonl", "hang", int(logs.name), why=text, action=acted, folder=folder.name)


class EndedRanks:
    """Tells when all ranks have ended and their srun has not noticed."""

    def __init__(self, tasks: int) -> None:
        """tasks: number of tasks of the attempt."""
        self._tasks, self._seconds, self._clock = tasks, 0.0, WatchClock()

    def leave_out(self, tasks: int) -> None:
        """Expect nothing of so many tasks, whose nodes are lost."""
        self._tasks -= tasks

    def outlive_srun(self, views: Sequence[RankView]) -> bool:
        """Return whether srun has had enough time to end after the last rank. views: of all ranks that were seen."""
        tick = self._clock.tick()
        over = len(views) == self._tasks and all(view.ended for view in views)
        self._seconds = self._seconds + tick if over else 0.0
        return self._seconds > SRUN_END_SECONDS


def write_ended_tasks(logs: Path, views: Sequence[RankView]) -> None:
    """Record, for the explanation of the failure, which ranks are gone without having finished."""
    ended = [(view.task, view.host) for view in views if view.ended and view.phase is not Phase.END]
    with suppress(OSError):
        write_private_file(logs / ENDED_TASKS, json.dumps(ended) + "\n")
