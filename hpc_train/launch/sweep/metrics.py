"""metrics.jsonl from its end: the last values of a run that has a million steps are read as fast as those of ten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_train.launch.state.reading import open_regular

_BLOCK = 1 << 15
_MOST = 1 << 20
"""Bytes from the end in which a value is looked for that only some steps have."""
_RARE = ("validation_loss", "noise_scale")


def final_values(path: Path) -> dict[str, Any]:
    """The last whole line, and of the values that not every step has the last ones; {} without any line."""
    found: dict[str, Any] = {}
    for record in _from_the_end(path):
        if not found:
            found = record
        found |= {name: record[name] for name in _RARE if name in record and name not in found}
        if all(name in found for name in _RARE):
            break
    return found


def best_value(path: Path, metric: str) -> float | None:
    """The lowest value of all steps (the highest of what is better when it is high); None if no step has it."""
    opened = open_regular(path)
    if opened is None:
        return None
    values = []
    with opened as file:
        for line in file:
            value = _record(line).get(metric)
            if isinstance(value, (int, float)):
                values.append(float(value))
    choose = max if is_higher_better(metric) else min
    return choose(values, default=None)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines, in order."""
    opened = open_regular(path)
    if opened is None:
        return []
    with opened as file:
        return [record for line in file if (record := _record(line))]


def is_higher_better(metric: str) -> bool:
    """Speeds, not losses."""
    return metric.endswith("per_second") or metric == "mfu"


def _from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines, the last one first."""
    opened = open_regular(path)
    if opened is None:
        return
    with opened as file:
        at = size = file.seek(0, 2)
        rest = b""
        while at > 0 and size - at < _MOST:
            step = min(_BLOCK, at)
            at -= step
            file.seek(at)
            first, *lines = (file.read(step) + rest).split(b"\n")
            rest = first
            yield from (record for line in reversed(lines) if (record := _record(line)))
        if at == 0 and (record := _record(rest)):
            yield record


def _record(line: bytes) -> dict[str, Any]:
    """{} for a line that a crash has torn off."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and "step" in found else {}
