"""Ask Slurm about many jobs at once, with few calls.

One call of squeue lists every job that slurmctld remembers. scontrol and sacct are asked only about the remaining jobs,
and less and less often while nothing changes. Nothing here needs accounting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpc_train.launch.slurm.job_records import (
    UNKNOWN_JOB,
    JobRecord,
    parse_sacct,
    parse_scontrol,
    parse_squeue,
    sacct_command,
    scontrol_command,
    squeue_command,
)
from hpc_train.launch.slurm.slurm_cli import Answer, RunClient
from hpc_train.launch.state.state_names import State, from_slurm_state

_MAX_SCONTROL_CALLS = 16
"""Calls of scontrol in one poll: it takes one job (or array) a call."""
_MIN_SECONDS, _MAX_SECONDS = 2.0, 60.0
"""Seconds between two polls."""


@dataclass(frozen=True)
class PollResult:
    """Slurm's answers about many jobs."""

    records: dict[str, JobRecord] = field(default_factory=dict)
    """Job id, as the user knows it, to its record."""
    slurm_error: str | None = None
    """Why slurmctld could not be asked; None: it answered, and what is not in `records` it does not know."""


def poll_jobs(job_ids: Iterable[str], ask: RunClient) -> PollResult:
    """Ask Slurm about these jobs, with as few calls as possible; no call if there are none."""
    ids = list(dict.fromkeys(job_ids))
    if not ids:
        return PollResult()
    answer = ask(squeue_command(_whole_arrays(ids)))
    # That it knows none of these jobs is an answer; that it cannot be reached is not.
    answered = answer.code == 0 or UNKNOWN_JOB in answer.err
    records = {record.job_id: record for record in parse_squeue(answer.out)}
    if answered:
        records |= _complete_records(ids, records, ask)
    missing = [job for job in ids if job not in records or _lacks_exit_code(records[job])]
    # slurmctld forgets a job MinJobAge (300 s by default) after its end; the accounting keeps it, where there is one.
    if missing:
        for record in parse_sacct(ask(sacct_command(_whole_arrays(missing))).out):
            if record.job_id not in records or _lacks_exit_code(records[record.job_id]):
                records[record.job_id] = record
    return PollResult({job: records[job] for job in ids if job in records}, None if answered else _no_answer(answer))


def _no_answer(answer: Answer) -> str:
    return f"Slurm does not answer: {answer.reason}"


def _whole_arrays(job_ids: Sequence[str]) -> list[str]:
    """Replace array elements by their array: Slurm then gets one id instead of a thousand."""
    return list(dict.fromkeys(job.partition("_")[0] for job in job_ids))


def _lacks_exit_code(record: JobRecord) -> bool:
    """Whether a record says that a job failed, but not with which exit code."""
    return (
        record.exit_code is None
        and from_slurm_state(record.state).ended
        and from_slurm_state(record.state) is not State.DONE
    )


def _complete_records(ids: Sequence[str], records: dict[str, JobRecord], ask: RunClient) -> dict[str, JobRecord]:
    """Return the records of failed jobs that lack an exit code, with that code."""
    bare = [job for job in ids if job in records and _lacks_exit_code(records[job])]
    completed: dict[str, JobRecord] = {}
    for base in _whole_arrays(bare)[:_MAX_SCONTROL_CALLS]:
        completed |= {record.job_id: record for record in parse_scontrol(ask(scontrol_command(base)).out)}
    return {job: completed[job] for job in bare if job in completed}


@dataclass
class Backoff:
    """Seconds between polls: doubled from `least` to `most`, and `least` again when something has changed."""

    least: float = _MIN_SECONDS
    most: float = _MAX_SECONDS
    _next: float = 0.0

    def seconds(self, changed: bool) -> float:
        """Return how long to wait before the next poll. changed: whether the last poll showed a change."""
        self._next = self.least if changed or not self._next else min(self.most, 2 * self._next)
        return self._next
