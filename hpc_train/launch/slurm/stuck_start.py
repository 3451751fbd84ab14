"""Notice an srun that starts no rank: it hangs, Slurm gives it no step, or no slurmstepd runs its task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from hpc_train.launch.failures import SRUN_ERRORS
from hpc_train.launch.state.attempts import read_tail_text
from hpc_train.launch.watching import WatchSettings
from hpc_train.resilience.incident import Incident, mark_hang, write_incident
from hpc_train.resilience.watch import RankView
from hpc_train.training.records.run_records import append_event

_LONGEST_TICK = 1.0
"""Maximum seconds that one check adds, so that time in which the watcher itself was stopped does not count."""
_LAST_WORDS = 2000
"""Bytes of srun's messages, the last of which says what it waits for."""


class StuckStart:
    """Tells when no rank of an attempt has begun within the deadline of a start."""

    def __init__(self, logs: Path, seconds: float) -> None:
        """logs: log directory of the attempt. seconds: resilience.hang.start_seconds."""
        self._logs, self.deadline = logs, seconds
        self.silent, self._last, self._begun = 0.0, time.monotonic(), False

    def is_overdue(self, views: Sequence[RankView]) -> bool:
        """Return whether none has begun for longer than it may take. views: of all ranks that agents have seen."""
        now = time.monotonic()
        self.silent += min(now - self._last, _LONGEST_TICK)
        self._last = now
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
