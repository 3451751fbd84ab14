"""Second half of `hpc-train cancel`: wait for the ranks to save and end, then kill those that do not.

A rank that hangs never reaches the end of its step, where stop requests are checked, and its peers wait for it. The
ranks are first asked for their stacks, so that those that did not answer can be named, and then killed; the batch
script, or the local controller, sees that and records how the attempt ended. If even that does not end them, their job
or controller is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.clients import Ask
from hpc_train.launch.stacks import SIGNAL, collect_stacks, describe_stacks
from hpc_train.launch.state.attempts import Begun, cancel_marker
from hpc_train.launch.state.backoff import Backoff
from hpc_train.launch.state.decide import decide
from hpc_train.launch.state.facts import Facts, gather
from hpc_train.launch.state.points import Point
from hpc_train.launch.state.states import State, ours
from hpc_train.regular_files import read_text
from hpc_train.runtime.alive import is_alive
from hpc_train.training.records import add_event

_DEFAULT_SECONDS = 120
"""Default for runs frozen before launch.cancel_seconds existed, or whose job.json cannot be read."""
_ANSWER_SECONDS = {True: 6.0, False: 3.0}
"""Seconds to wait for the ranks' stacks, by whether it is a Slurm job (True) or local (False)."""
_GRACE_SECONDS = {True: 45.0, False: 5.0}
"""Seconds from then until the batch script (Slurm sends TERM, then KILL after KillWait) or controller must end."""
_JOBS_IN_ONE_CALL = 200
_TOO_LATE = ("already completing", "already completed", "Invalid job id", "not running")
_INTERRUPTED = 130


def end_what_hangs(points: Sequence[Point], shared: frozenset[Path], ask: Ask) -> int:
    """Wait for these points, which were asked to save and end; kill those that do not end in time.

    shared: runs whose job goes on for other points, so only their own job step is ended. Returns the exit code. Ctrl-C
    stops waiting; the points stay asked to end.
    """
    started, limits = time.monotonic(), {point.run: cancel_seconds(point) for point in points}
    backoff, ended = Backoff(0.2, 4.0), set[Path]()
    _tell(f"waiting up to {max(limits.values())} s for the end (Ctrl-C: stop waiting; it stays asked)")
    try:
        while still := [facts for facts in gather(points, ask) if not decide(facts).state.ended]:
            waited = time.monotonic() - started
            late = [it for it in still if waited >= limits[it.point.run] and it.point.run not in ended]
            for facts in late:
                ended.add(facts.point.run)
                _end(facts, facts.point.run in shared, limits[facts.point.run], ask)
            if all(it.point.run in ended for it in still):
                return _end_for_good(still, shared, ask)
            next_end = min(limits[it.point.run] for it in still if it.point.run not in ended)
            time.sleep(min(backoff.seconds(False), max(0.0, started + next_end - time.monotonic())))
    except KeyboardInterrupt:
        _tell("no longer waiting; it stays asked to save and end. A rank that hangs needs `hpc-train cancel --now`")
        return _INTERRUPTED
    return 0


def cancel_seconds(point: Point) -> int:
    """Return launch.cancel_seconds of a run as it was frozen."""
    try:
        launch = json.loads(read_text(point.run / "job.json"))["config"]["launch"]
        return int(launch.get("cancel_seconds") or launch["signal_seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _DEFAULT_SECONDS


def jobs_of(facts: Facts, running: bool) -> list[str]:
    """Return a run's running jobs, or its waiting ones."""
    states = {record.job_id: ours(record.state) for record in facts.records}
    return [job for job in facts.jobs if job in states and (states[job] is State.RUNNING) == running]


def steps_of(facts: Facts, ask: Ask) -> list[str]:
    """Return the job step of a point that runs beside others; it has the point's name."""
    jobs = jobs_of(facts, running=True)
    if not jobs:
        return []
    said = ask(["squeue", "--steps", "--noheader", f"--jobs={','.join(jobs)}", "--format=%i|%j"])
    found = (line.strip().partition("|") for line in said.out.splitlines())
    return [step for step, _, name in found if name == facts.point.name]


def scancel(options: Sequence[str], jobs: Sequence[str], ask: Ask) -> None:
    """Cancel these jobs. Raises UserError, unless they have already ended."""
    for first in range(0, len(jobs), _JOBS_IN_ONE_CALL):
        said = ask(["scancel", *options, *jobs[first : first + _JOBS_IN_ONE_CALL]])
        if said.code and not any(word in said.err for word in _TOO_LATE):
            raise UserError(f"scancel: {said.reason}")


def _end(facts: Facts, shared: bool, waited: int, ask: Ask) -> None:
    """Name the ranks that hang, then kill all ranks."""
    if facts.silent is not None:
        raise UserError(f"{facts.point.name}: {facts.silent}; it is asked to save and end; try again")
    newest = facts.newest
    if newest is None or newest.begun is None:
        return  # waiting for its turn in a local sweep: see _end_for_good
    if facts.jobs:
        ids = steps_of(facts, ask) if shared else jobs_of(facts, running=True)
        send: Callable[[signal.Signals], None] = partial(_signal_jobs, ids, ask)
    else:
        send = partial(_signal_ranks, newest.begun)
    stacks = collect_stacks(
        facts.point.run / "logs" / str(newest.number), partial(send, SIGNAL), _ANSWER_SECONDS[bool(facts.jobs)]
    )
    why = f"it did not end within {waited} s and was ended: {describe_stacks(stacks) or 'no rank left a log'}"
    job = {"job_id": facts.jobs[-1]} if facts.jobs else {}
    add_event(facts.point.run / "events.jsonl", "cancel", newest.number, now=True, why=why, **job)
    print(f"{facts.point.name}: {why}", flush=True)
    send(signal.SIGKILL)


def _signal_jobs(ids: Sequence[str], ask: Ask, number: signal.Signals) -> None:
    """Send a signal to the ranks, not to the batch script."""
    scancel([f"--signal={number.name.removeprefix('SIG')}"], ids, ask)


def _signal_ranks(begun: Begun, number: signal.Signals) -> None:
    """Send a signal to the children of the local controller.

    For other launchers only the recorded process is known, and it need not answer.
    """
    if begun.launcher == "local":
        processes = _children(begun.process)
    else:
        processes = [begun.process] if number == signal.SIGKILL else []
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError, ValueError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
    return found


def _end_for_good(still: Sequence[Facts], shared: frozenset[Path], ask: Ask) -> int:
    """Wait briefly for batch scripts and controllers, then end them too; returns the exit code."""
    points = [it.point for it in still]
    deadline = time.monotonic() + max(_GRACE_SECONDS[bool(it.jobs)] for it in still)
    while still and time.monotonic() < deadline:
        time.sleep(0.2 if not any(it.jobs for it in still) else 1.0)
        still = [facts for facts in gather(points, ask) if not decide(facts).state.ended]
    for facts in still:
        if facts.jobs:
            _end_job(facts, facts.point.run in shared, ask)
        else:
            _end_here(facts)
    return 0


def _end_job(facts: Facts, shared: bool, ask: Ask) -> None:
    """End the whole job: its batch script may be gone, or hang on a file system."""
    if not shared:
        for job in facts.jobs:
            cancel_marker(facts.point.run, job).touch(0o600)
        scancel([], list(facts.jobs), ask)
        print(f"job {facts.jobs[-1]}: cancelled; Slurm ends it when its nodes answer", flush=True)


def _end_here(facts: Facts) -> None:
    """End the controller and its session, or the process that runs the sweep."""
    begun, pool = (facts.newest.begun if facts.newest else None), facts.point.placed
    if begun is not None and is_alive(begun.process, begun.started, begun.machine):
        with suppress(ProcessLookupError):
            if begun.launcher == "local":
                os.killpg(begun.process, signal.SIGKILL)
            else:
                os.kill(begun.process, signal.SIGKILL)
    elif pool is not None and is_alive(pool.process, pool.started, pool.machine):
        with suppress(ProcessLookupError):
            os.kill(pool.process, signal.SIGKILL)


def _tell(line: str) -> None:
    print(f"hpc-train: {line}", file=sys.stderr, flush=True)
