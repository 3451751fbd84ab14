"""`hpc-train cancel RUN`: what waits never starts, what runs saves and ends, and nothing is requeued.

scancel by itself gives the ranks KillWait (30 s by default) to save. Here they are told as before a time limit, have
the time that they need, and the batch script, which finds the marker of the cancellation, ends the job in place of a
requeue.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpc_train.errors import UserError
from hpc_train.launch.clients import Ask, ask
from hpc_train.launch.state.attempts import cancel_marker
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import Facts, gather
from hpc_train.launch.state.points import find
from hpc_train.launch.state.states import State, Status, ours
from hpc_train.training.records import add_event

_AT_ONCE = 200
"""Job ids on one command line."""
_TOO_LATE = ("already completing", "already completed", "Invalid job id", "not running")


@dataclass(frozen=True)
class _Open:
    """A run that has not ended."""

    facts: Facts
    status: Status

    def jobs(self, running: bool) -> list[str]:
        """Its jobs that run, or those that wait."""
        states = {record.job_id: ours(record.state) for record in self.facts.records}
        return [job for job in self.facts.jobs if job in states and (states[job] is State.RUNNING) == running]


def cancel_command(run: str, yes: bool, now: bool) -> int:
    """End a run, all of a sweep, or a job; returns the exit code. On a terminal it asks first.

    Raises UserError, one line, if it runs where it cannot be reached from here.
    """
    seen = [_Open(facts, decide(facts)) for facts in gather(find(run, ask), ask)]
    still = [it for it in seen if not it.status.state.ended]
    if not still:
        print(f"nothing to cancel: {_counted(it.status for it in seen)}")
        return 0
    if not yes and sys.stdin.isatty() and not _agreed(still):
        print("left as it is")
        return 1
    _cancel_jobs([it for it in still if it.facts.jobs], now, ask)
    for it in still:
        if not it.facts.jobs:
            _cancel_local(it, now)
    return 0


def _counted(rows: Iterable[Status]) -> str:
    return ", ".join(f"{row.point} is {row.state}" for row in rows)


def _agreed(still: Sequence[_Open]) -> bool:
    what = _counted(it.status for it in still) if len(still) < 4 else f"{len(still)} runs have not ended"
    return input(f"{what}: cancel? [y/N] ").strip().lower() in ("y", "yes")


def _cancel_jobs(runs: Sequence[_Open], now: bool, ask: Ask) -> None:
    """First those that wait, so that none of them starts in the place of one that ends."""
    for it in runs:
        if it.facts.silent is not None:
            raise UserError(f"{it.status.point}: {it.facts.silent}; try again")
        for job in it.facts.jobs:
            cancel_marker(it.facts.point.run, job).touch(0o600)
        attempt = -1 if it.status.attempt is None else it.status.attempt
        for job in it.facts.jobs:
            add_event(it.facts.point.run / "events.jsonl", "cancel", attempt, job_id=job, now=now)
    waiting = [job for it in runs for job in it.jobs(running=False)]
    running = [job for it in runs for job in it.jobs(running=True)]
    if now:
        _scancel([], waiting + running, ask)
    else:
        _scancel(["--state=PENDING"], waiting, ask)
        _scancel(["--signal=USR2"], running, ask)
    for job in waiting:
        print(f"job {job}: cancelled")
    for job in running:
        print(f"job {job}: {'cancelled' if now else 'asked to save and end'}")


def _scancel(options: Sequence[str], jobs: Sequence[str], ask: Ask) -> None:
    for first in range(0, len(jobs), _AT_ONCE):
        said = ask(["scancel", *options, *jobs[first : first + _AT_ONCE]])
        if said.code and not any(word in said.err for word in _TOO_LATE):
            raise UserError(f"scancel: {said.reason}")


def _cancel_local(it: _Open, now: bool) -> None:
    """The controller of the local pool passes the signal on; by other launchers, one rank that knows is enough."""
    newest = it.facts.newest
    begun = newest.begun if newest else None
    if newest is None or begun is None or not it.facts.alive:
        why = it.status.reason or "nobody knows who runs it"
        raise UserError(f"{it.status.point}: {why}; nothing was cancelled")
    add_event(it.facts.point.run / "events.jsonl", "cancel", newest.number, now=now)
    with suppress(ProcessLookupError):
        if not now:
            os.kill(begun.process, signal.SIGUSR2)
        elif begun.launcher == "local":
            os.killpg(begun.process, signal.SIGKILL)  # the pool began a session of its own
        else:
            os.kill(begun.process, signal.SIGKILL)
    print(f"{it.status.point}: {'killed' if now else 'asked to save and end'} (process {begun.process})")
