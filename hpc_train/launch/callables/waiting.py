"""Wait for jobs of functions: by the result files that they write, or, if a job leaves none, by its scheduler."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpc_train.launch.callables.calls import load_pickle
from hpc_train.launch.slurm.job_records import JobRecord
from hpc_train.launch.slurm.polling import Backoff, PollResult, poll_jobs
from hpc_train.launch.slurm.slurm_cli import RunClient
from hpc_train.launch.state.attempts import read_tail_text
from hpc_train.launch.state.state_names import State, from_slurm_state

_RESULT_SUFFIX = "_result.pkl"
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.05, 1.0
"""Seconds between two listings of the folder: few while results come, more and more while none does."""
_MAX_LOG_BYTES = 1 << 20
_LOG_LINES = 10
"""Part of the log that is shown of a job which left nothing else."""
_HELD_REASON = "JobHeld"
_OUT_OF_MEMORY = re.compile(r"oom-kill event|Out Of Memory")
"""Messages of slurmstepd and srun about a rank that the kernel killed for memory."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedJob:
    """A job that has been submitted."""

    job_id: str
    ranks: int = 1


@dataclass(frozen=True)
class JobEnd:
    """The end of a job: the value that its call returned, or the reason why there is none."""

    value: Any = None
    error: str = ""
    how: str | None = None
    """How it ended according to its source; None if it left a result of its own."""


class JobSource(Protocol):
    """Tells how jobs end."""

    @property
    def grace(self) -> float:
        """Seconds between the end of a job and the moment when its files must be visible here."""

    def find_ends(self, jobs: Collection[str], urgent: bool) -> Mapping[str, str]:
        """Return how each ended job ended, "" for success. urgent: a caller is waiting for these jobs now."""


@dataclass
class SlurmJobs:
    """The ends of Slurm jobs, asked for less and less often: only jobs that leave no result need it."""

    ask: RunClient
    grace: float = 5.0
    _backoff: Backoff = field(default_factory=Backoff)
    _last_poll: float = 0.0
    _next_poll: float = 0.0
    _last_ends: dict[str, str] = field(default_factory=dict)
    _last_logged: str = ""

    def __post_init__(self) -> None:
        self._next_poll = time.monotonic() + self._backoff.seconds(changed=False)

    def find_ends(self, jobs: Collection[str], urgent: bool) -> Mapping[str, str]:
        """Return the ends as of the last poll, which may be a minute old."""
        if urgent:
            self._next_poll = min(self._next_poll, self._last_poll + 1.0)
        if time.monotonic() >= self._next_poll:
            polled = poll_jobs(jobs, self.ask)
            ends = {job: why for job in jobs if (why := _describe_end(job, polled)) is not None}
            self._last_poll = time.monotonic()
            self._next_poll = self._last_poll + self._backoff.seconds(changed=ends != self._last_ends)
            self._last_ends = ends
            self._log_states(polled)
        return self._last_ends

    def _log_states(self, polled: PollResult) -> None:
        states = Counter(_format_state(record) for record in polled.records.values())
        text = polled.slurm_error or ", ".join(f"{count} {state}" for state, count in states.most_common())
        if text and text != self._last_logged:
            log.info(text + _advise_on_held_jobs(polled.records.values()))
            self._last_logged = text


def _advise_on_held_jobs(records: Collection[JobRecord]) -> str:
    """Return what to do about held jobs, as the end of a message."""
    held_jobs = sorted(
        {
            record.job_id.partition("_")[0]
            for record in records
            if from_slurm_state(record.state).waiting and _HELD_REASON in record.reason
        }
    )
    return f"; `scontrol release {','.join(held_jobs)}` lets them start, Ctrl-C cancels them" if held_jobs else ""


def _format_state(record: JobRecord) -> str:
    state = from_slurm_state(record.state)
    return f"{state} ({record.reason})" if state.waiting and record.reason else str(state)


def _describe_end(job: str, polled: PollResult) -> str | None:
    """Describe how a job ended; None if it has not, or if Slurm does not answer."""
    record = polled.records.get(job)
    if record is None:
        return "Slurm does not know the job any more: it was killed" if polled.slurm_error is None else None
    state = from_slurm_state(record.state)
    if not state.ended:
        return None
    if state == "DONE":
        return ""
    code = record.exit_code
    how = f"killed by signal {code - 128}" if code and code > 128 else f"exit code {code}" if code else ""
    return ": ".join(filter(None, (str(state), record.reason, how)))


def wait_for_jobs(
    started: Sequence[StartedJob], folder: Path, source: JobSource, fails: Callable[[Any], bool]
) -> dict[str, JobEnd]:
    """Wait for all jobs, and return the end of each by its id. fails: whether a call's own result is a failure."""
    unended, ends = {job.job_id: job for job in started}, {}
    noticed: dict[str, float] = {}
    pause = _MIN_PAUSE_SECONDS
    while unended:
        results = _list_results(folder)
        urgent = any(job.ranks > 1 and 0 in results.get(job.job_id, ()) for job in unended.values())
        reported_ends = source.find_ends(list(unended), urgent)
        before = len(unended)
        for job in list(unended.values()):
            if job.job_id in reported_ends:
                noticed.setdefault(job.job_id, time.monotonic())
            else:
                noticed.pop(job.job_id, None)  # requeued
            files_are_here = time.monotonic() - noticed.get(job.job_id, math.inf) >= source.grace
            end = _make_job_end(job, results.get(job.job_id, {}), reported_ends.get(job.job_id), files_are_here, fails)
            if end is not None:
                ends[job.job_id] = end if end.how is None else _explain_with_log(job, folder, end.how)
                del unended[job.job_id]
        pause = _MIN_PAUSE_SECONDS if len(unended) < before else min(_MAX_PAUSE_SECONDS, pause * 1.3)
        if unended:
            time.sleep(pause)
    return ends


def _list_results(folder: Path) -> dict[str, dict[int, Path]]:
    """Return the result file of each rank of each job, by one listing of the folder."""
    results: dict[str, dict[int, Path]] = {}
    for path in folder.iterdir():
        name = path.name
        if name.endswith(_RESULT_SUFFIX) and not name.startswith("."):
            job, _, rank = name.removesuffix(_RESULT_SUFFIX).rpartition("_")
            results.setdefault(job, {})[int(rank)] = path
    return results


def _make_job_end(
    job: StartedJob,
    results: Mapping[int, Path],
    reported_end: str | None,
    files_are_here: bool,
    fails: Callable[[Any], bool],
) -> JobEnd | None:
    """Return the end of one job, or None. reported_end: how it ended according to its source; None: it has not.

    Of a job of several ranks the first result does not tell how the others end.
    """
    if reported_end is None and (job.ranks > 1 or 0 not in results):
        return None
    # The highest rank first: ranks other than the first usually leave a file only if they failed.
    for rank in sorted(results, reverse=True):
        end = _read_result(results[rank])
        if job.ranks == 1 or not reported_end or end.error or fails(end.value):
            return end
    return JobEnd(how=reported_end or "it left no result") if files_are_here else None


def _read_result(path: Path) -> JobEnd:
    outcome, value = load_pickle(path)
    return JobEnd(value) if outcome == "success" else JobEnd(error=str(value))


def _explain_with_log(job: StartedJob, folder: Path, how: str) -> JobEnd:
    """Describe the end of a job that left no result by the last lines of its log."""
    path = folder / f"{job.job_id}_0_log.out"
    text = read_tail_text(path, _MAX_LOG_BYTES)
    lines = [line for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    log_end = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
    if _OUT_OF_MEMORY.search(log_end):
        how = State.OUT_OF_MEMORY + how.removeprefix(State.FAILED)
    return JobEnd(error=f"job {job.job_id}: {how}\nthe end of its log, {path}:\n{log_end}")
