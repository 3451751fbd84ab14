"""What Slurm says of one job, whichever of its commands said it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpc_train.cluster.slurm.hostlist import expand
from hpc_train.errors import UserError

_NOTHING = ("", "None", "(null)", "N/A", "None assigned")
UNKNOWN_JOB = "Invalid job id specified"
"""slurmctld's answer for a job that it has forgotten, or has never known."""


@dataclass(frozen=True)
class Record:
    """One job, or one element of an array."""

    job_id: str
    """`12`, or `12_3` of an array."""
    raw_id: str
    """The number that Slurm itself gave it; srun knows array elements by this one only."""
    state: str
    """Slurm's word."""
    source: str
    nodes: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None


def exit_code(text: str) -> int | None:
    """Slurm's `code:signal` as a shell would say it: 128 + n where signal n ended the job; None if it is neither."""
    match = re.fullmatch(r"(\d{1,5}):(\d{1,3})", text.strip())
    if match is None:
        return None
    code, number = int(match[1]), int(match[2])
    return 128 + number if number else code


def nodes(text: str) -> tuple[str, ...]:
    """The names of a host list; () for Slurm's words for none."""
    if text in _NOTHING:
        return ()
    try:
        return tuple(expand(text))
    except UserError:
        return (text,)


def word(text: str) -> str:
    """A value, or "" for Slurm's words for none."""
    return "" if text in _NOTHING else text
