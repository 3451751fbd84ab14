"""Ask Slurm about many jobs at once: one squeue for all, scontrol and sacct only for what that leaves open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpc_train.launch.clients import Ask, Said
from hpc_train.launch.state import sacct, scontrol, squeue
from hpc_train.launch.state.records import UNKNOWN_JOB, Record
from hpc_train.launch.state.states import State, ours

_MOST_SHOWN = 16
"""Calls of scontrol in one poll: it takes one job (or array) a call."""


@dataclass(frozen=True)
class Polled:
    """Slurm's answers."""

    records: dict[str, Record] = field(default_factory=dict)
    """By job id as the user knows it."""
    silent: str | None = None
    """Why slurmctld could not be asked; None: it answered, and what is not in `records` it does not know."""


def poll(job_ids: Iterable[str], ask: Ask) -> Polled:
    """What Slurm knows of these jobs; asks nothing if there are none."""
    wanted = list(dict.fromkeys(job_ids))
    if not wanted:
        return Polled()
    said = ask(squeue.command(_bases(wanted)))
    answered = said.code == 0 or UNKNOWN_JOB in said.err
    records = {record.job_id: record for record in squeue.parse(said.out)}
    if answered:
        records |= _shown(wanted, records, ask)
    missing = [job for job in wanted if job not in records or _bare(records[job])]
    if missing:
        for record in sacct.parse(ask(sacct.command(_bases(missing))).out):
            if record.job_id not in records or _bare(records[record.job_id]):
                records[record.job_id] = record
    return Polled({job: records[job] for job in wanted if job in records}, None if answered else _why(said))


def _why(said: Said) -> str:
    return f"Slurm does not answer: {said.reason}"


def _bases(job_ids: Sequence[str]) -> list[str]:
    """Arrays are asked for as wholes: a thousand elements are one word."""
    return list(dict.fromkeys(job.partition("_")[0] for job in job_ids))


def _bare(record: Record) -> bool:
    """Whether it says that a job failed, and not how."""
    return record.exit_code is None and ours(record.state).ended and ours(record.state) is not State.DONE


def _shown(wanted: Sequence[str], records: dict[str, Record], ask: Ask) -> dict[str, Record]:
    """The same records with their exit codes, of jobs that ended badly."""
    bare = [job for job in wanted if job in records and _bare(records[job])]
    found: dict[str, Record] = {}
    for base in _bases(bare)[:_MOST_SHOWN]:
        found |= {record.job_id: record for record in scontrol.parse(ask(scontrol.command(base)).out)}
    return {job: found[job] for job in bare if job in found}
