"""`hpc-train cancel RUN`: what waits never starts, what runs saves and ends, and nothing is requeued.

scancel by itself gives the ranks KillWait (30 s by default) to save. Here they are told as before a time limit, have
the time that they need, and the batch script, which finds the marker of the cancellation, ends the job in place of a
requeue.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.clients import Ask, ask
from hpc_train.launch.escalation import end_what_hangs, jobs_of, scancel, steps_of
from hpc_train.launch.state.attempts import cancel_marker
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import Facts, gather
from hpc_train.launch.state.points import Point, find, points_of
from hpc_train.launch.state.states import State, Status
from hpc_train.launch.sweep import ledger
from hpc_train.training.records import add_event

_NAMED = 4
"""From so many on they are counted."""


@dataclass(frozen=True)
class _Open:
    """A run that has not ended."""

    facts: Facts
    status: Status

    @property
    def waits_here(self) -> bool:
        """Whether it waits for its turn in a sweep of this machine."""
        return self.status.state is State.PENDING and not self.facts.jobs

    def jobs(self, running: bool) -> list[str]:
        """Its jobs that run, or those that wait."""
        return jobs_of(self.facts, running)


def cancel_command(run: str, yes: bool, now: bool, wait: bool = True) -> int:
    """End a run, a point or all of a sweep, or a job; returns the exit code. On a terminal it asks first.

    now: without a save. wait: until it has ended; what has not after launch.cancel_seconds is ended, and the ranks that
    did not answer are named. Raises UserError, one line, if it runs where it cannot be reached from here.
    """
    points = find(run, ask)
    seen = _look(points)
    still = [it for it in seen if not it.status.state.ended]
    if not still:
        print(f"nothing to cancel: {_counted(seen)}")
        return 0
    if not yes and sys.stdin.isatty() and not _agreed(still):
        print("left as it is")
        return 1
    shared = frozenset[Path]()
    if jobs := [it for it in still if it.facts.jobs]:
        late, shared = _cancel_jobs(jobs, now, ask)
        if begun := [it for it in _look(late) if it.jobs(running=True)]:
            _cancel_jobs(begun, now, ask)
    _cancel_here([it for it in still if not it.facts.jobs], now)
    if now or not wait:
        return 0
    return end_what_hangs([it.facts.point for it in still], shared, ask)


def _look(points: Sequence[Point]) -> list[_Open]:
    return [_Open(facts, decide(facts)) for facts in gather(points, ask)]


def _cancel_here(runs: Sequence[_Open], now: bool) -> None:
    """Runs without Slurm. Who is told to stop all of a sweep tells those of its points that run."""
    pools = {it.facts.point.placed.process for it in runs if it.waits_here and it.facts.point.placed}
    if not pools:
        for it in runs:
            _cancel_local(it, now)
        return
    if not any(it.facts.newest for it in runs) and len(runs) == 1:
        raise UserError(f"{runs[0].status.point}: waits for its turn in a sweep on this machine; cancel the sweep")
    for process in pools:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        print(f"process {process}: asked to save and end what runs, and to begin nothing more")
    for it in runs:
        if now and not it.waits_here:
            _cancel_local(it, now)


def _counted(runs: Sequence[_Open]) -> str:
    if len(runs) < _NAMED:
        return ", ".join(f"{it.status.point} is {it.status.state}" for it in runs)
    return ", ".join(f"{count} are {state}" for state, count in Counter(it.status.state for it in runs).most_common())


def _agreed(still: Sequence[_Open]) -> bool:
    return input(f"{_counted(still)}: cancel? [y/N] ").strip().lower() in ("y", "yes")


def _cancel_jobs(runs: Sequence[_Open], now: bool, ask: Ask) -> tuple[list[Point], frozenset[Path]]:
    """First those that wait, so that none of them starts in the place of one that ends.

    Returns the points that waited, which may have begun at the same moment, and the runs whose jobs go on for others.
    """
    for it in runs:
        if it.facts.silent is not None:
            raise UserError(f"{it.status.point}: {it.facts.silent}; try again")
    shared = _shared(runs, ask)
    _leave_word(runs, shared, now)
    alone = [it for it in runs if it not in shared]
    waiting = list(dict.fromkeys(job for it in alone for job in it.jobs(running=False)))
    running = list(dict.fromkeys(job for it in alone for job in it.jobs(running=True)))
    steps = [step for it in shared for step in steps_of(it.facts, ask)]
    if now:
        scancel([], waiting + running + steps, ask)
    else:
        scancel(["--state=PENDING"], [job for job in waiting if "_" not in job], ask)
        # With a filter, one element that waits stands for all of its array that do (Slurm 22.05). One that begins at
        # this moment is told by SIGTERM, and has KillWait to save.
        scancel([], [job for job in waiting if "_" in job], ask)
        scancel(["--signal=USR2"], running + steps, ask)
    _tell(waiting, [*running, *steps], now)
    for it in shared:
        print(f"{it.status.point}: {'will not begin' if it.status.state.waiting else 'asked to save and end'}")
    waited = [it.facts.point for it in alone if it.status.state.waiting]
    return waited, frozenset(it.facts.point.run for it in shared)


def _tell(waiting: Sequence[str], running: Sequence[str], now: bool) -> None:
    if len(waiting) < _NAMED:
        for job in waiting:
            print(f"job {job}: cancelled")
    else:
        print(f"{len(waiting)} jobs that waited: cancelled")
    for job in running:
        print(f"job {job}: {'cancelled' if now else 'asked to save and end'}")


def _shared(runs: Sequence[_Open], ask: Ask) -> list[_Open]:
    """Points whose job has others, too, that are to go on."""
    packed = [it for it in runs if it.facts.point.packed]
    if not packed:
        return []
    mine = {it.facts.point.run for it in packed}
    sweeps = {it.facts.point.sweep.path: it.facts.point.sweep for it in packed if it.facts.point.sweep}
    jobs = {job for it in packed for job in it.facts.jobs}
    others = [
        point
        for sweep in sweeps.values()
        for point in points_of(sweep)
        if point.run not in mine and point.placed and point.placed.job in jobs
    ]
    going_on = {job for facts in gather(others, ask) if not decide(facts).state.ended for job in facts.jobs}
    return [it for it in packed if going_on & set(it.facts.jobs)]


def _leave_word(runs: Sequence[_Open], shared: Sequence[_Open], now: bool) -> None:
    """For the batch script, which does not requeue then, and for `status`. What has not begun has no run directory."""
    waiting: dict[Path, dict[str, str]] = {}
    for it in runs:
        point = it.facts.point
        if not point.run.exists() and point.sweep is not None:
            waiting.setdefault(point.sweep.ledger, {})[point.name] = it.facts.jobs[-1]
            if it not in shared:
                continue
            (point.run / "logs").mkdir(mode=0o700, parents=True)
            point.run.chmod(0o700)
        for job in it.facts.jobs:
            cancel_marker(point.run, job).touch(0o600)
        attempt = -1 if it.status.attempt is None else it.status.attempt
        for job in it.facts.jobs:
            add_event(point.run / "events.jsonl", "cancel", attempt, job_id=job, now=now)
    for path, points in waiting.items():
        ledger.append(path, "cancel", points=points)


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
