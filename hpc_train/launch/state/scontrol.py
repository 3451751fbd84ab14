"""scontrol show job: more of one job (of all elements of an array) than squeue prints, while slurmctld knows it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpc_train.launch.state.records import Record, exit_code, nodes, word

_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")


def command(job_id: str) -> list[str]:
    """scontrol takes one id a call; that of an array shows all its elements."""
    return ["scontrol", "-o", "show", "job", job_id]


def parse(text: str) -> list[Record]:
    """The jobs of `scontrol -o show job`, a line each."""
    shown = (fields(line) for line in text.splitlines() if line.startswith("JobId="))
    return [_record(values) for values in shown if "[" not in values.get("ArrayTaskId", "")]


def fields(line: str) -> dict[str, str]:
    """Key -> value of one line; values may hold blanks, and the first of two equal keys counts."""
    found: dict[str, str] = {}
    keys = list(_KEY.finditer(line))
    for key, following in zip(keys, [*keys[1:], None], strict=True):
        found.setdefault(key[1], line[key.end() : following.start() if following else None].strip())
    return found


def _record(values: Mapping[str, str]) -> Record:
    raw, task = values["JobId"], values.get("ArrayTaskId")
    job_id = f"{values['ArrayJobId']}_{task}" if task and task.isdecimal() and "ArrayJobId" in values else raw
    return Record(
        job_id,
        raw,
        values.get("JobState", ""),
        "scontrol",
        nodes(values.get("NodeList", "")),
        word(values.get("Reason", "")),
        exit_code(values.get("ExitCode", "")),
    )
