"""Read the progress of a run from the end of its metrics.jsonl: last values, best value, and the age of the last step.

Reading from the end makes a run of a million steps as fast to read as one of ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.launch.state.attempts import open_if_regular
from hpc_train.launch.state.run_facts import RunFacts
from hpc_train.launch.state.state_names import RunStatus, State
from hpc_train.launch.state.step_age import StepAge, measure_step_age
from hpc_train.regular_files import parse_json_object, read_json
from hpc_train.training.records.warning_files import read_warnings
from hpc_train.units import format_age

_QUIET_SECONDS, _QUIET_STEPS = 60.0, 10.0
"""A run is called quiet after both: so many seconds without a step, and so many times its step time."""
_QUIET_START_SECONDS = 300.0
"""Seconds after which a run is called quiet before its first step, which imports, connects, loads and compiles."""
_RARE_VALUES = ("validation_loss", "noise_scale")
"""Values that only some steps have."""
_MAX_BYTES = 1 << 20
"""Bytes from the end of the file that are searched for them."""
_BLOCK_BYTES = 1 << 15
"""Bytes that are read at a time."""


def add_progress(status: RunStatus, facts: RunFacts) -> RunStatus:
    """Add the step, the loss, the warnings and, for a running run, the age of the last step to a status."""
    path = facts.point.run / "metrics.jsonl"
    last = read_final_values(path)
    step = _int_or_none(last.get("step"))
    loss, warnings = _float_or_none(last.get("loss")), _list_warnings(facts)
    status = replace(status, step=step, steps=facts.steps, loss=loss, warnings=warnings)
    status = replace(status, faults=facts.faults, skipped_steps=facts.skipped_steps, passed_over=facts.passed_over)
    if status.state is not State.RUNNING:
        return status
    unwatched = explain_unwatched(facts)
    status = replace(status, reason=": ".join(filter(None, (status.reason, unwatched))))
    age = _measure_step_age(path, facts)
    if age.seconds is None:
        return replace(status, reason=": ".join(filter(None, (status.reason, age.why_unknown))))
    quiet = _is_quiet(age.seconds, _float_or_none(last.get("step_seconds")))
    text = f"no step for {format_age(age.seconds)}"
    reason = ": ".join(filter(None, (status.reason, text))) if quiet else status.reason
    return replace(status, seconds_since_step=round(age.seconds, 1), reason=reason)


def explain_unwatched(facts: RunFacts) -> str:
    """Return why hanging ranks of a run would not be noticed; empty if they are watched."""
    if facts.newest is None or facts.newest.begun is None:
        return ""
    begun = facts.newest.begun
    if begun.launcher != "local" and begun.process:
        by = {"slurm": "srun", "mpi": "mpirun"}.get(begun.launcher, begun.launcher)
        return f"not watched: the ranks were started by {by} itself"
    if facts.point.packed:
        return "not watched: it shares its job with other points (launch.points_per_job)"
    try:
        watch = read_json(facts.point.run / "job.json")["config"]["resilience"]["watch"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # what is wrong with the file is said elsewhere
    return "" if watch else "not watched: resilience.watch=false"


def _list_warnings(facts: RunFacts) -> tuple[str, ...]:
    if facts.newest is None:
        return ()
    return tuple(str(warning) for warning in read_warnings(facts.point.run / "logs" / str(facts.newest.number)))


def _measure_step_age(path: Path, facts: RunFacts) -> StepAge:
    """Return the time since the last recorded step, or since the attempt began."""
    newest = facts.newest
    times = [newest.begun.time] if newest and newest.begun else []
    with suppress(OSError):
        times.append(path.stat().st_mtime)
    if newest is None or not times:
        return StepAge()
    return measure_step_age(facts.point.run / "logs" / str(newest.number), max(times))


def _is_quiet(age: float, step_seconds: float | None) -> bool:
    if step_seconds is None:
        return age > _QUIET_START_SECONDS
    return age > max(_QUIET_SECONDS, _QUIET_STEPS * step_seconds)


def _int_or_none(value: Any) -> int | None:
    return value if type(value) is int else None


def _float_or_none(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def read_final_values(path: Path) -> dict[str, Any]:
    """Return the last whole line, with the newest of the values that only some steps have; {} without any line."""
    values: dict[str, Any] = {}
    for record in _read_steps_backwards(path):
        if not values:
            values = record
        values |= {name: record[name] for name in _RARE_VALUES if name in record and name not in values}
        if all(name in values for name in _RARE_VALUES):
            break
    return values


def find_best_value(path: Path, metric: str) -> float | None:
    """Return the lowest value of all steps, or the highest where higher is better; None if no step has it."""
    opened = open_if_regular(path)
    if opened is None:
        return None
    values = []
    with opened as file:
        for line in file:
            value = _parse_step(line).get(metric)
            if isinstance(value, (int, float)):
                values.append(float(value))
    choose = max if is_higher_better(metric) else min
    return choose(values, default=None)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines, in order."""
    opened = open_if_regular(path)
    if opened is None:
        return []
    with opened as file:
        return [record for line in file if (record := _parse_step(line))]


def is_higher_better(metric: str) -> bool:
    """Whether a metric is a speed, not a loss."""
    return metric.endswith("per_second") or metric == "mfu"


def _read_steps_backwards(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a file, the last one first."""
    opened = open_if_regular(path)
    if opened is None:
        return
    with opened as file:
        at = size = file.seek(0, 2)
        rest = b""
        while at > 0 and size - at < _MAX_BYTES:
            step = min(_BLOCK_BYTES, at)
            at -= step
            file.seek(at)
            first, *lines = (file.read(step) + rest).split(b"\n")
            rest = first
            yield from (record for line in reversed(lines) if (record := _parse_step(line)))
        if at == 0 and (record := _parse_step(rest)):
            yield record


def _parse_step(line: bytes) -> dict[str, Any]:
    """Parse one line; {} for a line that a crash has torn off."""
    record = parse_json_object(line)
    return record if "step" in record else {}
