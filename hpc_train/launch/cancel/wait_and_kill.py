"""Wait for cancelled runs to save and end, and kill what does not end in time.

A rank that hangs never reaches the end of its step, where stop requests are checked, and its peers wait for it: after
launch.cancel_seconds the ranks are asked for their stacks, so that those that do not answer can be named, and then
killed. If even that does not end them, their job or controller is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.command_output import CommandOutput
from hpc_train.launch.rank_signals import ANSWER_SECONDS, address_ranks, cancel_jobs
from hpc_train.launch.rank_stacks import STACK_SIGNAL, collect_stacks, describe_stacks
from hpc_train.launch.slurm.polling import Backoff
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.state.attempts import cancel_marker_path
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import RunFacts, gather_facts
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.processes import is_process_alive
from hpc_train.regular_files import read_json
from hpc_train.training.records.run_records import append_event

_DEFAULT_SECONDS = 120
"""Seconds for a run whose job.json cannot be read."""
_GRACE_SECONDS = {True: 45.0, False: 5.0}
"""Seconds from then until the batch script (Slurm sends TERM, then KILL after KillWait) or controller must end."""
_EXIT_INTERRUPTED = 128 + signal.SIGINT


def wait_and_kill(points: Sequence[RunPoint], shared: frozenset[Path], ask: RunClient, output: CommandOutput) -> int:
    """Wait for these points, which were asked to save and end; kill those that do not end in time.

    shared: runs whose job continues for other points, so only their own job step is ended. Returns the exit code.
    Ctrl-C stops waiting; the points stay asked to end.
    """
    started, limits = time.monotonic(), {point.run: read_cancel_seconds(point) for point in points}
    backoff, killed = Backoff(0.2, 4.0), set[Path]()
    try:
        output.report(
            f"waiting up to {max(limits.values())} s for the end (Ctrl-C stops waiting; the run still saves and ends)"
        )
        while unfinished := [facts for facts in gather_facts(points, ask) if not decide_state(facts).state.ended]:
            waited = time.monotonic() - started
            overdue = [
                facts for facts in unfinished if waited >= limits[facts.point.run] and facts.point.run not in killed
            ]
            for facts in overdue:
                killed.add(facts.point.run)
                _kill_hanging_ranks(facts, facts.point.run in shared, limits[facts.point.run], ask, output)
            # All ranks that were left are killed; what has not ended by now is a batch script or a controller.
            if all(facts.point.run in killed for facts in unfinished):
                return _kill_jobs_and_controllers(unfinished, shared, ask, output)
            next_limit = min(limits[facts.point.run] for facts in unfinished if facts.point.run not in killed)
            time.sleep(min(backoff.seconds(False), max(0.0, started + next_limit - time.monotonic())))
    except KeyboardInterrupt:
        output.report("no longer waiting; the run still saves and ends. If a rank hangs: `hpc-train cancel --now`")
        return _EXIT_INTERRUPTED
    return 0


def read_cancel_seconds(point: RunPoint) -> int:
    """Return launch.cancel_seconds of a run as it was frozen."""
    try:
        launch = read_json(point.run / "job.json")["config"]["launch"]
        return int(launch["cancel_seconds"] or launch["signal_seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _DEFAULT_SECONDS


def _kill_hanging_ranks(facts: RunFacts, shared: bool, waited: int, ask: RunClient, output: CommandOutput) -> None:
    """Name the ranks that hang, then kill all ranks."""
    if facts.slurm_error is not None:
        raise UserError(f"{facts.point.name}: {facts.slurm_error}; it is asked to save and end; try again")
    newest = facts.newest
    if newest is None or newest.begun is None:
        return  # waiting for its turn in a local sweep: _kill_jobs_and_controllers ends the process of the sweep
    send = address_ranks(facts, newest.begun, shared, ask)
    stacks = collect_stacks(
        facts.point.run / "logs" / str(newest.number), partial(send, STACK_SIGNAL), ANSWER_SECONDS[bool(facts.jobs)]
    )
    why = f"it did not end within {waited} s and was ended: {describe_stacks(stacks) or 'no rank left a log'}"
    job = {"job_id": facts.jobs[-1]} if facts.jobs else {}
    append_event(facts.point.run / "events.jsonl", "cancel", newest.number, now=True, why=why, **job)
    output.print_result(f"{facts.point.name}: {why}")
    send(signal.SIGKILL)


def _kill_jobs_and_controllers(
    unfinished: Sequence[RunFacts], shared: frozenset[Path], ask: RunClient, output: CommandOutput
) -> int:
    """Wait briefly for batch scripts and controllers, then end them too; returns the exit code."""
    points = [run.point for run in unfinished]
    deadline = time.monotonic() + max(_GRACE_SECONDS[bool(run.jobs)] for run in unfinished)
    while unfinished and time.monotonic() < deadline:
        time.sleep(0.2 if not any(run.jobs for run in unfinished) else 1.0)
        unfinished = [facts for facts in gather_facts(points, ask) if not decide_state(facts).state.ended]
    for facts in unfinished:
        if facts.jobs:
            _kill_job(facts, facts.point.run in shared, ask, output)
        else:
            _kill_local_processes(facts)
    return 0


def _kill_job(facts: RunFacts, shared: bool, ask: RunClient, output: CommandOutput) -> None:
    """End the whole job: its batch script may be gone, or hang on a file system."""
    if not shared:
        for job in facts.jobs:
            cancel_marker_path(facts.point.run, job).touch(0o600)
        cancel_jobs([], list(facts.jobs), ask)
        output.print_result(f"job {facts.jobs[-1]}: cancelled; Slurm ends it when its nodes answer")


def _kill_local_processes(facts: RunFacts) -> None:
    """End the controller and its session, or the process that runs the sweep."""
    begun, pool = (facts.newest.begun if facts.newest else None), facts.point.placed
    if begun is not None and is_process_alive(begun.process, begun.started, begun.machine):
        with suppress(ProcessLookupError):
            if begun.launcher == "local":
                # The controller leads a session of its own, so its ranks die with its process group.
                os.killpg(begun.process, signal.SIGKILL)
            else:
                os.kill(begun.process, signal.SIGKILL)
    elif pool is not None and is_process_alive(pool.process, pool.started, pool.machine):
        with suppress(ProcessLookupError):
            os.kill(pool.process, signal.SIGKILL)
