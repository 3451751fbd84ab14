"""Ask squeue, scontrol and sacct about jobs: their command lines, and parsers of their output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpc_train.cluster.hostlist import expand_hostlist
from hpc_train.errors import UserError

_EMPTY_WORDS = ("", "None", "(null)", "N/A", "None assigned")
"""Slurm's words for no value."""
UNKNOWN_JOB = "Invalid job id specified"
"""slurmctld's answer for a job that it has forgotten, or has never known."""
_SQUEUE_FORMAT = "%i|%A|%T|%N|%r"
"""Job id, the number that Slurm gave it, state, nodes and reason; the reason comes last, as it may hold a bar."""
_SCONTROL_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")
_SACCT_FIELDS = "JobID,JobIDRaw,State,ExitCode,NodeList"


@dataclass(frozen=True)
class JobRecord:
    """One job, or one element of an array."""

    job_id: str
    """`12`, or `12_3` of an array."""
    raw_id: str
    """The number that Slurm itself gave it; srun knows array elements by this one only."""
    state: str
    """Slurm's word."""
    source: str
    """The client that said so."""
    nodes: tuple[str, ...] = ()
    reason: str = ""
    exit_code: int | None = None


def parse_exit_code(text: str) -> int | None:
    """Convert Slurm's `code:signal` to a shell's exit code (128 + n for signal n); None for other texts."""
    match = re.fullmatch(r"(\d{1,5}):(\d{1,3})", text.strip())
    if match is None:
        return None
    code, number = int(match[1]), int(match[2])
    return 128 + number if number else code


def parse_nodes(text: str) -> tuple[str, ...]:
    """Expand a host list into node names; () for Slurm's words for none."""
    if text in _EMPTY_WORDS:
        return ()
    try:
        return tuple(expand_hostlist(text))
    except UserError:
        return (text,)


def parse_word(text: str) -> str:
    """Return the text, or "" for Slurm's words for none."""
    return "" if text in _EMPTY_WORDS else text


def squeue_command(job_ids: Iterable[str]) -> list[str]:
    """Return the squeue command for all these jobs; it prints a line for each element of an array."""
    ids = ",".join(job_ids)
    return [
        "squeue",
        "--noheader",
        "--array",
        "--all",
        # Also jobs that have ended, as long as slurmctld remembers them (MinJobAge, 300 s by default).
        "--states=all",
        f"--jobs={ids}",
        f"--format={_SQUEUE_FORMAT}",
    ]


def parse_squeue(text: str) -> list[JobRecord]:
    """Parse what squeue printed; lines of another form are skipped."""
    records = []
    for line in text.splitlines():
        # 12_[3-9] stands for elements of an array that have no record of their own yet.
        fields = [field.strip() for field in line.split("|", 4)]
        if len(fields) == 5 and fields[0] and "[" not in fields[0]:
            job_id, raw, state, where, reason = fields
            records.append(JobRecord(job_id, raw, state, "squeue", parse_nodes(where), parse_word(reason)))
    return records


def scontrol_command(job_id: str) -> list[str]:
    """Return the scontrol command for one job or for a whole array; scontrol takes one id a call."""
    return ["scontrol", "-o", "show", "job", job_id]


def parse_scontrol(text: str) -> list[JobRecord]:
    """Parse what `scontrol -o show job` printed, a line for each job."""
    shown = (parse_scontrol_fields(line) for line in text.splitlines() if line.startswith("JobId="))
    return [_scontrol_record(values) for values in shown if "[" not in values.get("ArrayTaskId", "")]


def parse_scontrol_fields(line: str) -> dict[str, str]:
    """Split one line of scontrol into keys and values. Values may contain blanks; of equal keys the first counts."""
    fields: dict[str, str] = {}
    keys = list(_SCONTROL_KEY.finditer(line))
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        fields.setdefault(key[1], line[key.end() : following.start() if following else None].strip())
    return fields


def _scontrol_record(values: Mapping[str, str]) -> JobRecord:
    raw, task = values["JobId"], values.get("ArrayTaskId")
    job_id = f"{values['ArrayJobId']}_{task}" if task and task.isdecimal() and "ArrayJobId" in values else raw
    return JobRecord(
        job_id=job_id,
        raw_id=raw,
        state=values.get("JobState", ""),
        source="scontrol",
        nodes=parse_nodes(values.get("NodeList", "")),
        reason=parse_word(values.get("Reason", "")),
        exit_code=parse_exit_code(values.get("ExitCode", "")),
    )


def sacct_command(job_ids: Iterable[str]) -> list[str]:
    """Return the sacct command for all these jobs: no steps, and only the newest run of a requeued job."""
    return [
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={','.join(job_ids)}",
        f"--format={_SACCT_FIELDS}",
    ]


def parse_sacct(text: str) -> list[JobRecord]:
    """Parse what sacct printed. Array elements that never started share one line, which is skipped."""
    records = []
    for line in text.splitlines():
        values = line.split("|")
        if len(values) == 5 and "[" not in values[0]:
            job_id, raw, state, code, where = values
            records.append(
                JobRecord(
                    job_id=job_id,
                    raw_id=raw,
                    state=state,
                    source="sacct",
                    nodes=parse_nodes(where),
                    reason="",
                    exit_code=parse_exit_code(code),
                )
            )
    return records
