"""sacct: what accounting remembers of jobs, where there is accounting."""

from __future__ import annotations

from collections.abc import Iterable

from hpc_train.launch.state.records import Record, exit_code, nodes

_FIELDS = "JobID,JobIDRaw,State,ExitCode,NodeList"


def command(job_ids: Iterable[str]) -> list[str]:
    """The call for all of `job_ids`: of a requeued job its newest run, steps left out."""
    return [
        "sacct",
        "--allocations",
        "--noheader",
        "--parsable2",
        f"--jobs={','.join(job_ids)}",
        f"--format={_FIELDS}",
    ]


def parse(text: str) -> list[Record]:
    """The jobs that sacct printed; array elements that were never started share a line, which is left out."""
    found = []
    for line in text.splitlines():
        values = line.split("|")
        if len(values) == 5 and "[" not in values[0]:
            job_id, raw, state, code, where = values
            found.append(Record(job_id, raw, state, "sacct", nodes(where), "", exit_code(code)))
    return found
