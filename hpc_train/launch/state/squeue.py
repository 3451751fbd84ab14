"""squeue: every job that slurmctld remembers, those that ended within MinJobAge included, in one call.

The format is -o's, whose letters have meant the same in every version; that of --json has not.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpc_train.launch.state.records import Record, nodes, word

_FORMAT = "%i|%A|%T|%N|%r"


def command(job_ids: Iterable[str]) -> list[str]:
    """The call for all of `job_ids`; the elements of an array come a line each."""
    wanted = ",".join(job_ids)
    return ["squeue", "--noheader", "--array", "--all", "--states=all", f"--jobs={wanted}", f"--format={_FORMAT}"]


def parse(text: str) -> list[Record]:
    """The jobs that squeue printed; a line of another form is nobody's."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|", 4)]
        if len(fields) == 5 and fields[0] and "[" not in fields[0]:
            job_id, raw, state, where, reason = fields
            found.append(Record(job_id, raw, state, "squeue", nodes(where), word(reason)))
    return found
