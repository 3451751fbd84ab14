"""Cancel runs: pending jobs never start, running ones save and end, and nothing is requeued.

scancel by itself gives the ranks KillWait (30 s by default) to save. Here they get the signal that also comes
before a time limit, and have launch.cancel_seconds; the batch script finds the cancel marker and ends the job
instead of requeueing it. A rank that hangs never reaches the end of its step, where stop requests are checked, and
its peers wait for it: after launch.cancel_seconds the ranks are asked for their stacks, so that those that do not
answer can be named, and then killed. If even that does not end them, their job or controller is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.launch.command_output import CommandOutput
from hpc_train.launch.rank_stacks import STACK_SIGNAL, collect_stacks, describe_stacks
from hpc_train.launch.slurm.slurm_cli import Backoff, RunClient, run_client
from hpc_train.launch.state.attempts import AttemptStart, cancel_marker_path
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.run_facts import RunFacts, gather_facts
from hpc_train.launch.state.run_lookup import RunPoint, find_points, list_points_of_sweep
from hpc_train.launch.state.state_names import RunStatus, State, from_slurm_state
from hpc_train.launch.sweep import sweep_directory
from hpc_train.processes import is_process_alive, list_child_processes
from hpc_train.regular_files import read_json
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


_DEFAULT_SECONDS = 120
"""Seconds for a run whose job.json cannot be read."""
ANSWER_SECONDS = {True: 6.0, False: 3.0}
"""Seconds to wait for the ranks' stacks, by whether it is a Slurm job (True) or local (False)."""
_GRACE_SECONDS = {True: 45.0, False: 5.0}
"""Seconds from then until the batch script (Slurm sends TERM, then KILL after KillWait) or controller must end."""
_MAX_JOBS_PER_CALL = 200
"""Jobs of one call of scancel: it signals them one by one, and run_client gives it 30 s."""
_ALREADY_ENDED = ("already completing", "already completed", "Invalid job id", "not running")
"""Parts of scancel's messages about a job or step that there is nothing left to cancel of."""
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


def select_jobs_in_state(facts: RunFacts, running: bool) -> list[str]:
    """Return a run's running jobs, or its waiting ones."""
    states = {record.job_id: from_slurm_state(record.state) for record in facts.records}
    return [job for job in facts.jobs if job in states and (states[job] is State.RUNNING) == running]


def find_job_steps(facts: RunFacts, ask: RunClient) -> list[str]:
    """Return the job step of a point that runs beside others; it has the point's name."""
    jobs = select_jobs_in_state(facts, running=True)
    if not jobs:
        return []
    answer = ask(["squeue", "--steps", "--noheader", f"--jobs={','.join(jobs)}", "--format=%i|%j"])
    rows = (line.strip().partition("|") for line in answer.out.splitlines())
    return [step for step, _, name in rows if name == facts.point.name]


def cancel_jobs(options: Sequence[str], jobs: Sequence[str], ask: RunClient) -> None:
    """Cancel these jobs. Raises UserError, unless they have already ended."""
    for first in range(0, len(jobs), _MAX_JOBS_PER_CALL):
        answer = ask(["scancel", *options, *jobs[first : first + _MAX_JOBS_PER_CALL]])
        # A job that has ended by itself meanwhile is as good as cancelled.
        if answer.code and not any(word in answer.err for word in _ALREADY_ENDED):
            raise UserError(f"scancel: {answer.reason}")


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


def address_ranks(
    facts: RunFacts, begun: AttemptStart, shared: bool, ask: RunClient
) -> Callable[[signal.Signals], None]:
    """Return a function that sends a signal to the ranks. shared: other points run in the same job."""
    if not facts.jobs:
        return partial(_signal_ranks, begun)
    ids = find_job_steps(facts, ask) if shared else select_jobs_in_state(facts, running=True)
    return partial(_signal_jobs, ids, ask)


def _signal_jobs(ids: Sequence[str], ask: RunClient, number: signal.Signals) -> None:
    """Send a signal to the ranks, not to the batch script."""
    cancel_jobs([f"--signal={number.name.removeprefix('SIG')}"], ids, ask)


def _signal_ranks(begun: AttemptStart, number: signal.Signals) -> None:
    """Send a signal to the children of the local controller.

    For other launchers only the recorded process is known, and it need not answer.
    """
    if begun.launcher == "local":
        processes = list_child_processes(begun.process)
    else:
        # SIGUSR1, which asks ranks for their stacks, would end a launcher that does not handle it.
        processes = [begun.process] if number == signal.SIGKILL else []
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


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
