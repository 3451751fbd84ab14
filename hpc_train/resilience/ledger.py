"""Account for every node-second of a run, from its submission to its end, in one class each.

While a run trains, rank 0 appends lines to goodput.jsonl: how many seconds each activity has taken so far (LedgerFile).
Afterwards, or meanwhile, `account_run` puts those lines together with what the attempts left behind: when each began
and ended, when a fault was noticed, and from which step the next attempt continued. Steps that had to be repeated count
as lost.

Standard library only: `hpc-train status` reads it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hpc_train.regular_files import append_line, parse_json_object
from hpc_train.resilience.heartbeat import Heartbeat, Phase

ACTIVITIES = {
    Phase.START: "start",
    Phase.LOAD: "load",
    Phase.FIRST_STEP: "step",
    Phase.STEP: "step",
    Phase.DATA: "data",
    Phase.EVALUATE: "evaluate",
    Phase.SAVE: "save",
    Phase.END: "drain",
}
"""Name in goodput.jsonl of each of a rank's phases."""
CLASSES = {
    "queue": "waiting for nodes",
    "start": "starting: imports, rendezvous, model",
    "load": "loading a checkpoint",
    "kept": "steps that count",
    "lost": "steps made again, or never saved",
    "data": "waiting for data",
    "save": "waiting for a save",
    "evaluate": "evaluation",
    "detect": "stuck or dead, not noticed yet",
    "drain": "ending",
    "restart": "between an end and the next start in the same allocation",
    "spare": "spare nodes, idle",
    "other": "not accounted for",
}
"""Classes of the ledger, and what they mean."""
_SECONDS_BETWEEN_LINES = 5.0
GOODPUT = "goodput.jsonl"
"""File in a run directory."""


# --- write


@dataclass(frozen=True)
class LedgerLine:
    """A line of goodput.jsonl: what a process has spent its time on so far."""

    attempt: int
    time: float
    """Seconds since the epoch."""
    step: int
    """Updates made so far, including those of earlier attempts."""
    seconds: Mapping[str, float]
    """Seconds of each activity since this process began."""
    nodes: int = 1
    """Nodes that train."""
    ended: bool = False
    """Whether this is the last line of a process that ended regularly: done, or stopped on purpose."""


class LedgerFile:
    """Appends lines to goodput.jsonl. A full disk does not stop the run: lines are missing, and `failure` says why."""

    def __init__(self, path: Path, attempt: int, nodes: int) -> None:
        self._path, self._attempt, self._nodes = path, attempt, nodes
        self._next = 0.0
        self.failure: str | None = None
        """Why lines are missing; None if none are."""

    def write(self, heartbeat: Heartbeat, step: int, due: bool = False, ended: bool = False) -> None:
        """Append a line if the last one is at least 5 s old, or at once: `due` at a save, `ended` at the end."""
        now = time.monotonic()
        if now < self._next and not due and not ended:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        line = LedgerLine(self._attempt, time.time(), step, sum_activities(heartbeat), self._nodes, ended)
        try:
            append_line(self._path, json.dumps(asdict(line)))
        except OSError as error:
            self.failure = self.failure or f"{self._path.name}: {error.strerror}"


def sum_activities(heartbeat: Heartbeat) -> dict[str, float]:
    """Return the seconds of this process by activity, as goodput.jsonl has them."""
    seconds: dict[str, float] = {}
    for phase, value in heartbeat.seconds().items():
        seconds[ACTIVITIES[phase]] = round(seconds.get(ACTIVITIES[phase], 0.0) + value, 4)
    return seconds


def parse_ledger(text: str) -> list[LedgerLine]:
    """Return the lines of a goodput.jsonl; those that are damaged or cut short are left out."""
    names = {part.name for part in fields(LedgerLine)}
    lines = []
    for row in text.splitlines():
        values = parse_json_object(row)
        with suppress(ValueError, TypeError, AttributeError):
            line = LedgerLine(**{name: value for name, value in values.items() if name in names})
            if _is_sound(line):
                lines.append(line)
    return lines


def _is_sound(line: LedgerLine) -> bool:
    counts = (line.attempt, line.step, line.nodes)
    numbers = (line.time, *line.seconds.values())
    return (
        all(type(value) is int and value >= 0 for value in counts)
        and all(isinstance(value, (int, float)) and 0 <= value < 1e12 for value in numbers)
        and set(line.seconds) <= set(ACTIVITIES.values())
    )


# --- account


@dataclass(frozen=True)
class Period:
    """One start of the ranks. Times are seconds since the epoch."""

    attempt: int
    job: str
    """Allocation that it ran in: a further start in the same one is a restart."""
    began: float
    ended: float
    """When its ranks had ended; the present time if they still run."""
    nodes: int = 1
    """Nodes that train."""
    spares: int = 0
    """Further nodes of the allocation."""
    noticed: float | None = None
    """When it was noticed that the ranks were dead or stuck; None if they ended by themselves."""
    resumed: int | None = None
    """Step from which the ranks continued; None if they never got that far."""
    lines: Sequence[LedgerLine] = ()


@dataclass
class Ledger:
    """Node-seconds by class."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CLASSES, 0.0))

    @property
    def total(self) -> float:
        """Node-seconds from submission to end."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """Share of the node-seconds after the first wait in the queue that went into steps that count."""
        used = self.total - self.seconds["queue"]
        return self.seconds["kept"] / used if used > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return what `hpc-train status --goodput --json` prints: node-seconds by class, total, and goodput."""
        return {
            "node_seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "total": round(self.total, 3),
            "goodput": round(self.goodput, 4),
        }


def account_run(periods: Sequence[Period], submitted: float, saved: int) -> Ledger:
    """Account for all time from `submitted` to the end of the last period.

    periods: in order of time. saved: the newest step from which the run can resume, or the last step of a finished run;
    later steps count as lost.
    """
    ledger = Ledger()
    before: Period | None = None
    for index, period in enumerate(periods):
        end_before = before.ended if before else submitted
        waited = max(0.0, period.began - end_before) * (period.nodes + period.spares)
        same_job = before is not None and before.job == period.job
        # Within one allocation the nodes are ours while nothing runs on them; between two jobs nobody pays for them.
        ledger.seconds["restart" if same_job else "queue"] += waited
        _account_period(ledger, period, _resumed_after(periods[index + 1 :], saved))
        before = period
    return ledger


def _resumed_after(later: Iterable[Period], saved: int) -> int:
    """Return the step up to which the steps of a period count: the lowest step from which a later period resumed."""
    return min([saved, *(period.resumed for period in later if period.resumed is not None)])


def _account_period(ledger: Ledger, period: Period, kept_up_to: int) -> None:
    length = max(0.0, period.ended - period.began)
    parts = _split_length(period, length, kept_up_to)
    for name, seconds in parts.items():
        ledger.seconds[name] += seconds * period.nodes
    ledger.seconds["spare"] += length * period.spares


def _split_length(period: Period, length: float, kept_up_to: int) -> dict[str, float]:
    """Return the seconds of one period by class; they add up to its length."""
    if not period.lines:  # its ranks never came to training
        noticed = length if period.noticed is None else min(max(period.noticed - period.began, 0.0), length)
        return {"start": noticed, "drain": length - noticed}
    last = period.lines[-1]
    parts = {name: last.seconds.get(name, 0.0) for name in ("start", "load", "data", "save", "evaluate", "drain")}
    step_seconds = last.seconds.get("step", 0.0)
    parts["kept"] = min(step_seconds, _seconds_of_steps(period.lines, period.resumed, kept_up_to))
    parts["lost"] = step_seconds - parts["kept"]
    # Rank 0 has written the line, and the batch script the begin and the end: the clocks of their nodes may differ.
    written = min(max(last.time, period.began + sum(last.seconds.values())), period.ended)
    # What came before the process: the batch script, modules, srun.
    parts["start"] += max(0.0, written - sum(last.seconds.values()) - period.began)
    after = max(0.0, period.ended - written)
    if not last.ended and period.noticed is not None:
        parts["detect"] = min(max(0.0, period.noticed - written), after)
        after -= parts["detect"]
    parts["drain"] += after
    # So that the classes add up exactly. It is small unless a process was stopped or clocks of nodes differ.
    parts["other"] = length - sum(parts.values())
    return parts


def _seconds_of_steps(lines: Sequence[LedgerLine], resumed: int | None, step: int) -> float:
    """Return the seconds that the steps up to `step` took, interpolated between lines."""
    # Lines come every few seconds, a save at any step: the step asked for lies between two lines as a rule.
    at, seconds = resumed if resumed is not None else lines[0].step, 0.0
    for line in lines:
        step_seconds = line.seconds.get("step", 0.0)
        if line.step >= step:
            share = (step - at) / (line.step - at) if line.step > at else 0.0
            return seconds + max(0.0, min(share, 1.0)) * (step_seconds - seconds)
        at, seconds = line.step, step_seconds
    return seconds


def format_ledger(ledger: Ledger) -> list[str]:
    """Return the ledger as lines of text, the largest class first."""
    total = ledger.total
    if not total:
        return ["nothing to account for yet"]
    rows = sorted(((value, name) for name, value in ledger.seconds.items() if value > 5e-4 * total), reverse=True)
    return [
        f"goodput {ledger.goodput:.1%} of {(total - ledger.seconds['queue']) / 3600:,.2f} node-hours on nodes",
        *(f"{value / total:>7.1%}  {value / 3600:>10,.3f} node-hours  {CLASSES[name]}" for value, name in rows),
    ]
