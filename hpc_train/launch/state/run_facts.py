"""Gather all facts about a point before its state is decided: its own files first, then Slurm's answers."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_train.launch.recovery.failures import SRUN_ERRORS, find_first_error
from hpc_train.launch.slurm.job_records import JobRecord
from hpc_train.launch.slurm.polling import poll_jobs
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.state.attempts import Attempt, read_attempts, read_tail_text
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.launch.state.state_names import State, parse_ending
from hpc_train.launch.state.step_age import LARGEST_SKEW_SECONDS
from hpc_train.processes import is_process_alive
from hpc_train.regular_files import parse_json_object
from hpc_train.resilience.load_history import PASSED_OVER, find_passed_over

_LOG_TAIL_BYTES = 1 << 16
_EVENTS_WITH_STEP = ("start", "resume", "checkpoint", PASSED_OVER)
_EVENTS_WITH_HOSTS = ("disagree", "slow_node")


@dataclass(frozen=True)
class RunFacts:
    """The facts about one point at one moment."""

    point: RunPoint
    attempts: tuple[Attempt, ...] = ()
    jobs: tuple[str, ...] = ()
    """Slurm's jobs of the last submission, a chain's in order; () of a run without Slurm."""
    faults: tuple[str, ...] = ()
    """Faults from which the run recovered automatically, since its last submission."""
    skipped_steps: int = 0
    """Steps whose update was skipped; one that was done again counts each time."""
    passed_over: tuple[int, ...] = ()
    """Steps whose checkpoints are passed over, as their load ended the ranks."""
    failure: str = ""
    """Reason in the newest attempt's failure event."""
    cancelled: bool = False
    """Whether `hpc-train cancel` was asked for one of `jobs`, or for the newest attempt of a run without Slurm."""
    steps: int | None = None
    """Steps of the whole run, as reported by the newest attempt that began."""
    ending: State | None = None
    """How the last job ended, according to slurmstepd's lines in its log."""
    cancel_note: str = ""
    """Note by `hpc-train cancel` about ranks it had to kill, in the newest attempt."""
    alive: bool | None = None
    """Whether the process that holds the ranks (of a sweep's point that has not begun: the pool) lives; None if that
    cannot be seen from here."""
    seconds_since_write: float | None = None
    """Seconds since anything of the run was written; of runs on another machine."""
    records: tuple[JobRecord, ...] = ()
    """Slurm's records of `jobs`."""
    slurm_error: str | None = None
    """Why Slurm could not be asked."""

    @property
    def newest(self) -> Attempt | None:
        """Return the newest attempt of the last submission; without Slurm, the newest of all."""
        attempts = [
            attempt
            for attempt in self.attempts
            if not self.jobs or attempt.begun is None or attempt.begun.job_id in self.jobs
        ]
        return attempts[-1] if attempts else None


def gather_facts(points: Sequence[RunPoint], ask: RunClient) -> list[RunFacts]:
    """Gather the facts of all points, with one poll for all that have not recorded their own end.

    The files of a run whose job Slurm does not know are read again: it may have ended just now.
    """
    first = [read_files(point) for point in points]
    polled = poll_jobs(_list_open_jobs(first), ask)
    complete = []
    for facts in first:
        records = tuple(polled.records[job] for job in facts.jobs if job in polled.records)
        if facts.jobs and not _has_ended(facts) and any(_is_over(record) for record in records or (None,)):
            # Read again after Slurm said that the job is over: the run may have recorded its end between the two.
            facts = read_files(facts.point)
        complete.append(replace(facts, records=records, slurm_error=polled.slurm_error))
    return complete


def _is_over(record: JobRecord | None) -> bool:
    return record is None or record.state not in ("RUNNING", "PENDING")


def read_files(point: RunPoint) -> RunFacts:
    """Read the facts that the run itself has left."""
    attempts = read_attempts(point.run)
    events = _merge_events(point.events, read_events(point.run))
    facts = RunFacts(point, attempts, _find_latest_jobs(attempts, events))
    if (newest := facts.newest) is None:
        pool = point.placed
        alive = is_process_alive(pool.process, pool.started, pool.machine) if pool and not pool.job else None
        return replace(facts, cancelled=_was_cancelled(facts.jobs, None, events), alive=alive)
    begun = newest.begun
    return replace(
        facts,
        steps=_read_total_steps(events),
        ending=_find_ending_in_log(facts),
        faults=_list_faults(events),
        skipped_steps=sum(event["event"] == "skipped" for event in events),
        passed_over=tuple(sorted(find_passed_over(events))),
        failure="" if newest.result and newest.result.exit_code == 0 else _read_failure(point.run, newest, events),
        cancelled=_was_cancelled(facts.jobs, newest, events),
        cancel_note=_find_cancel_note(newest, events),
        alive=is_process_alive(begun.process, begun.started, begun.machine) if begun else None,
        seconds_since_write=_measure_seconds_since_write(point.run),
    )


def _read_failure(run: Path, newest: Attempt, events: Iterable[dict[str, Any]]) -> str:
    """Return the failure that the batch script has recorded, else the first one that the ranks have left."""
    for event in events:
        if event["event"] == "failure" and event["attempt"] == newest.number:
            return str(event.get("why", ""))
    error = find_first_error(run / "logs" / str(newest.number))
    return error.line if error else ""


def _measure_seconds_since_write(run: Path) -> float | None:
    """Return the seconds since a step was recorded or a heart beat; None where the clock here is behind the files'.

    They are by the file server's clock, which may differ.
    """
    # Modification times are what another machine can see of a run without asking its processes.
    times = [path.stat().st_mtime for path in (run / "metrics.jsonl", run / "checkpoints/lock") if path.exists()]
    age = time.time() - max(times) if times else None
    return None if age is None or age < -LARGEST_SKEW_SECONDS else max(0.0, age)


def read_events(run: Path) -> list[dict[str, Any]]:
    """Read the events of a run. Lines that are torn, or lack a field that is computed with, are passed over.

    The decision that follows a fault reads them, too: a line of another form must not end the run.
    """
    parsed = map(parse_json_object, read_tail_text(run / "events.jsonl").splitlines())
    return [event for event in parsed if _is_well_formed(event)]


def _is_well_formed(event: dict[str, Any]) -> bool:
    """Return whether an event says when, in which attempt, and what its kind has to say: a step, or nodes and why."""
    kind = event.get("event")
    if type(kind) is not str or not _is_number(event.get("time")) or type(event.get("attempt")) is not int:
        return False
    if kind in _EVENTS_WITH_STEP:
        return type(event.get("step")) is int
    hosts = event.get("hosts")
    # The list may be empty: if two copies differ, either of them may be wrong.
    return kind not in _EVENTS_WITH_HOSTS or (type(hosts) is list and "why" in event)


def _merge_events(of_sweep: Iterable[dict[str, Any]], of_run: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge what a sweep's ledger says of a run into the run's events, whose order stays as it was written.

    Clocks differ between machines and may be set, so that times alone could put a submission before an older one.
    """

    def read_time(event: dict[str, Any]) -> float:
        return float(event["time"])

    return list(heapq.merge(sorted(of_sweep, key=read_time), of_run, key=read_time))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _find_latest_jobs(attempts: Sequence[Attempt], events: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return the jobs of the last submission, or of what has begun to run here since."""
    submits = [number for number, event in enumerate(events) if event["event"] == "submit"]
    last = events[submits[-1]] if submits else None
    jobs = tuple(str(job) for job in last.get("job_ids") or [last["job_id"]]) if last else ()
    begun = attempts[-1].begun if attempts else None
    if begun is None or begun.job_id in jobs:
        return jobs
    if submits and _is_submitted_after(attempts[-1].number, begun.time, events, submits[-1]):
        return jobs
    return (begun.job_id,) if begun.job_id else ()


def _is_submitted_after(attempt: int, begun: float, events: Sequence[dict[str, Any]], submit: int) -> bool:
    """Return whether a submission came after the begin of an attempt.

    begun: seconds since 1970. submit: position of the submission in `events`. The order of the events decides; an
    attempt that has left none is compared by the clocks of the two machines.
    """
    of_attempt = [number for number, event in enumerate(events) if event["attempt"] == attempt]
    return of_attempt[0] < submit if of_attempt else bool(events[submit]["time"] > begun)


def _was_cancelled(jobs: Sequence[str], newest: Attempt | None, events: Iterable[dict[str, Any]]) -> bool:
    cancels = [event for event in events if event["event"] == "cancel"]
    if jobs:
        return any(event.get("job_id") in jobs for event in cancels)
    return newest is not None and any(event["attempt"] == newest.number for event in cancels)


def _list_faults(events: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    submitted = max((index for index, event in enumerate(events) if event["event"] == "submit"), default=0)
    restarts = [event for event in events[submitted:] if event["event"] == "restart"]
    acted = [event for event in restarts if event.get("action") in ("restarted", "requeued")]
    return tuple(str(event.get("signature", event.get("cause"))) for event in acted)


def _read_total_steps(events: Sequence[dict[str, Any]]) -> int | None:
    # The last one counts: a resumed run may have been given more steps.
    totals = [event.get("steps") for event in events if event["event"] in ("start", "resume")]
    return totals[-1] if totals and type(totals[-1]) is int else None


def _find_ending_in_log(facts: RunFacts) -> State | None:
    """Read the job's end from its log.

    If Slurm has no accounting, or it does not answer, this is the only trace of a time limit.
    """
    newest = facts.newest
    if newest is None or newest.begun is None or not newest.begun.job_id:
        return None
    if newest.result is not None and (newest.result.slurm or newest.result.exit_code == 0):
        return None
    job_log = facts.point.job_logs / f"job-{newest.begun.job_id}.log"
    srun_errors = facts.point.run / "logs" / str(newest.number) / SRUN_ERRORS
    return parse_ending(read_tail_text(srun_errors, _LOG_TAIL_BYTES)) or parse_ending(
        read_tail_text(job_log, _LOG_TAIL_BYTES)
    )


def _find_cancel_note(newest: Attempt, events: Iterable[dict[str, Any]]) -> str:
    cancels = [event for event in events if event["event"] == "cancel" and event["attempt"] == newest.number]
    return next((str(event["why"]) for event in reversed(cancels) if event.get("why")), "")


def _has_ended(facts: RunFacts) -> bool:
    """Whether the run has recorded that it is done, so that Slurm need not be asked."""
    return facts.newest is not None and facts.newest.result is not None and facts.newest.result.done


def _list_open_jobs(facts: Iterable[RunFacts]) -> list[str]:
    return [job for run in facts if not _has_ended(run) for job in run.jobs]
