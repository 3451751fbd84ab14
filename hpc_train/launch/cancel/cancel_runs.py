"""Cancel runs: pending jobs never start, running ones save and end, and nothing is requeued.

scancel by itself gives the ranks KillWait (30 s by default) to save. Here they get the signal that also comes before a
time limit, and have launch.cancel_seconds; the batch script finds the cancel marker and ends the job instead of
requeueing it. wait_and_kill.py ends what does not end by itself.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.cancel.wait_and_kill import wait_and_kill
from hpc_train.launch.command_output import CommandOutput
from hpc_train.launch.rank_signals import cancel_jobs, find_job_steps, select_jobs_in_state
from hpc_train.launch.slurm.slurm_cli import RunClient, run_client
from hpc_train.launch.state.attempts import cancel_marker_path
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import RunFacts, gather_facts
from hpc_train.launch.state.run_lookup import RunPoint, find_points, list_points_of_sweep
from hpc_train.launch.state.state_names import RunStatus, State
from hpc_train.launch.sweep import sweep_directory
from hpc_train.training.records.run_records import append_event

_MAX_NAMED = 4
"""Runs or jobs that are named one by one; more are counted."""


@dataclass(frozen=True)
class CancelCandidate:
    """A run, and the state that it is in."""

    facts: RunFacts
    status: RunStatus

    @property
    def waits_here(self) -> bool:
        """Whether it waits for its turn in a sweep of this machine."""
        return self.status.state is State.PENDING and not self.facts.jobs

    def jobs(self, running: bool) -> list[str]:
        """Return its jobs that run, or its jobs that wait."""
        return select_jobs_in_state(self.facts, running)


def find_runs(target: str) -> list[CancelCandidate]:
    """Find the runs of a run directory, a sweep directory or a job, with their states."""
    return _find_states(find_points(target, run_client))


def cancel_runs(runs: Sequence[CancelCandidate], now: bool, wait: bool, output: CommandOutput) -> int:
    """Cancel runs that have not ended, and return the exit code.

    now: without a save. wait: until everything has ended; what has not after launch.cancel_seconds is killed, and the
    ranks that did not answer are named. Raises UserError, one line, for a run that cannot be reached from here.
    """
    shared = frozenset[Path]()
    if jobs := [run for run in runs if run.facts.jobs]:
        waiting, shared = _cancel_jobs(jobs, now, run_client, output)
        # A job that began after we had asked for its state is cancelled as running ones are: it can save.
        if started_runs := [run for run in _find_states(waiting) if run.jobs(running=True)]:
            _cancel_jobs(started_runs, now, run_client, output)
    _cancel_without_slurm([run for run in runs if not run.facts.jobs], now, output)
    if now or not wait:
        return 0
    return wait_and_kill([run.facts.point for run in runs], shared, run_client, output)


def _find_states(points: Sequence[RunPoint]) -> list[CancelCandidate]:
    return [CancelCandidate(facts, decide_state(facts)) for facts in gather_facts(points, run_client)]


def _cancel_without_slurm(runs: Sequence[CancelCandidate], now: bool, output: CommandOutput) -> None:
    """Cancel runs without Slurm. The process that runs a sweep passes a stop on to its running points."""
    pools = {run.facts.point.placed.process for run in runs if run.waits_here and run.facts.point.placed}
    if not pools:
        for run in runs:
            _cancel_local(run, now, output)
        return
    if not any(run.facts.newest for run in runs) and len(runs) == 1:
        raise UserError(f"{runs[0].status.point}: waits for its turn in a sweep on this machine; cancel the sweep")
    for process in pools:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
        output.print_result(f"process {process}: asked to save and end what runs, and to begin nothing more")
    for run in runs:
        if now and not run.waits_here:
            _cancel_local(run, now, output)


def describe_states(runs: Sequence[CancelCandidate]) -> str:
    """Describe the states of runs: one by one, or counted where there are many."""
    if len(runs) < _MAX_NAMED:
        return ", ".join(f"{run.status.point} is {run.status.state}" for run in runs)
    return ", ".join(f"{count} are {state}" for state, count in Counter(run.status.state for run in runs).most_common())


def _cancel_jobs(
    runs: Sequence[CancelCandidate], now: bool, ask: RunClient, output: CommandOutput
) -> tuple[list[RunPoint], frozenset[Path]]:
    """Cancel jobs: first those that wait, so that none of them starts on the nodes of one that ends.

    Returns the pending points, some of which may just have started, and the runs whose jobs continue for other points.
    """
    for run in runs:
        if run.facts.slurm_error is not None:
            raise UserError(f"{run.status.point}: {run.facts.slurm_error}; try again")
    # A packed job has points that were not named: only the step of a named one may be ended.
    shared = _list_runs_with_shared_jobs(runs, ask)
    # Before any signal: the batch script looks for the marker as soon as its ranks end.
    _mark_cancelled(runs, shared, now)
    unshared = [run for run in runs if run not in shared]
    waiting = list(dict.fromkeys(job for run in unshared for job in run.jobs(running=False)))
    running = list(dict.fromkeys(job for run in unshared for job in run.jobs(running=True)))
    steps = [step for run in shared for step in find_job_steps(run.facts, ask)]
    if now:
        cancel_jobs([], waiting + running + steps, ask)
    else:
        cancel_jobs(["--state=PENDING"], [job for job in waiting if "_" not in job], ask)
        # With a filter, one element that waits stands for all of its array that do (Slurm 22.05). One that begins at
        # this moment gets SIGTERM, and has KillWait to save.
        cancel_jobs([], [job for job in waiting if "_" in job], ask)
        cancel_jobs(["--signal=USR2"], running + steps, ask)
    for line in _describe_cancelled(waiting, [*running, *steps], now):
        output.print_result(line)
    for run in shared:
        what = "will not begin" if run.status.state.waiting else "asked to save and end"
        output.print_result(f"{run.status.point}: {what}")
    waited = [run.facts.point for run in unshared if run.status.state.waiting]
    return waited, frozenset(run.facts.point.run for run in shared)


def _describe_cancelled(waiting: Sequence[str], running: Sequence[str], now: bool) -> list[str]:
    many = [f"{len(waiting)} jobs that waited: cancelled"]
    waited = [f"job {job}: cancelled" for job in waiting] if len(waiting) < _MAX_NAMED else many
    return [*waited, *(f"job {job}: {'cancelled' if now else 'asked to save and end'}" for job in running)]


def _list_runs_with_shared_jobs(runs: Sequence[CancelCandidate], ask: RunClient) -> list[CancelCandidate]:
    """Return the points whose job also has other points that are to go on."""
    packed = [run for run in runs if run.facts.point.packed]
    if not packed:
        return []
    directories = {run.facts.point.run for run in packed}
    sweeps = {run.facts.point.sweep.path: run.facts.point.sweep for run in packed if run.facts.point.sweep}
    jobs = {job for run in packed for job in run.facts.jobs}
    others = [
        point
        for sweep in sweeps.values()
        for point in list_points_of_sweep(sweep)
        if point.run not in directories and point.placed and point.placed.job in jobs
    ]
    going_on = {job for facts in gather_facts(others, ask) if not decide_state(facts).state.ended for job in facts.jobs}
    return [run for run in packed if going_on & set(run.facts.jobs)]


def _mark_cancelled(runs: Sequence[CancelCandidate], shared: Sequence[CancelCandidate], now: bool) -> None:
    """Leave the cancel marker for the batch script, which then does not requeue, and an event for `status`.

    What has not begun has no run directory: the sweep's ledger gets its event.
    """
    waiting: dict[Path, dict[str, str]] = {}
    for run in runs:
        point = run.facts.point
        if not point.run.exists() and point.sweep is not None:
            waiting.setdefault(point.sweep.ledger, {})[point.name] = run.facts.jobs[-1]
            if run not in shared:
                continue
            # Its job goes on for other points, so that the marker is what keeps this one from being started.
            (point.run / "logs").mkdir(mode=0o700, parents=True)
            point.run.chmod(0o700)
        for job in run.facts.jobs:
            cancel_marker_path(point.run, job).touch(0o600)
        attempt = -1 if run.status.attempt is None else run.status.attempt
        for job in run.facts.jobs:
            append_event(point.run / "events.jsonl", "cancel", attempt, job_id=job, now=now)
    for path, points in waiting.items():
        sweep_directory.append_ledger_event(path, "cancel", points=points)


def _cancel_local(run: CancelCandidate, now: bool, output: CommandOutput) -> None:
    """Signal the controller of the local pool, which passes it on; under other launchers, one rank is enough."""
    newest = run.facts.newest
    begun = newest.begun if newest else None
    if newest is None or begun is None or not run.facts.alive:
        why = run.status.reason or "it is unknown who runs it"
        raise UserError(f"{run.status.point}: {why}; nothing was cancelled")
    append_event(run.facts.point.run / "events.jsonl", "cancel", newest.number, now=now)
    with suppress(ProcessLookupError):
        if not now:
            # The signal that Slurm sends before a time limit, too: save and end.
            os.kill(begun.process, signal.SIGUSR2)
        elif begun.launcher == "local":
            os.killpg(begun.process, signal.SIGKILL)  # the pool began a session of its own
        else:
            os.kill(begun.process, signal.SIGKILL)
    what = "killed" if now else "asked to save and end"
    output.print_result(f"{run.status.point}: {what} (process {begun.process})")
