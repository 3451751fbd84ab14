"""Read a run's progress from the end of its metrics.jsonl: step, loss, and how long ago that was."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_train.launch.state.facts import Facts
from hpc_train.launch.state.states import State, Status
from hpc_train.launch.sweep.metrics import final_values
from hpc_train.training.warning_files import read_warnings

_QUIET_SECONDS = 60.0
_QUIET_START_SECONDS = 300.0
_QUIET_STEPS = 10.0
"""A run is called quiet after _QUIET_SECONDS without a step, and at least this many times its step time."""


def with_progress(status: Status, facts: Facts) -> Status:
    """Add the step, the loss, the warnings and, for a running run, the age of the last step to a status."""
    path = facts.point.run / "metrics.jsonl"
    last = final_values(path)
    step = _whole(last.get("step"))
    loss, warnings = _number(last.get("loss")), _warnings(facts)
    status = replace(status, step=step, steps=facts.steps, loss=loss, warnings=warnings)
    if status.state is not State.RUNNING:
        return status
    age = _age(path, facts)
    if age is None:
        return status
    quiet = _is_quiet(age, _number(last.get("step_seconds")))
    said = f"no step for {readable_seconds(age)}"
    reason = ": ".join(filter(None, (status.reason, said))) if quiet else status.reason
    return replace(status, seconds_since_step=round(age, 1), reason=reason)


def readable_seconds(seconds: float) -> str:
    """Format seconds as `12 s`, `5 min`, `2.5 h`, `3.1 d`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def _warnings(facts: Facts) -> tuple[str, ...]:
    if facts.newest is None:
        return ()
    return tuple(str(warning) for warning in read_warnings(facts.point.run / "logs" / str(facts.newest.number)))


def _age(path: Path, facts: Facts) -> float | None:
    """Return seconds since the last recorded step, or since the attempt began; the file server's clock may differ."""
    newest = facts.newest
    times = [newest.begun.time] if newest and newest.begun else []
    with suppress(OSError):
        times.append(path.stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None


def _is_quiet(age: float, step_seconds: float | None) -> bool:
    if step_seconds is None:
        return age > _QUIET_START_SECONDS
    return age > max(_QUIET_SECONDS, _QUIET_STEPS * step_seconds)


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None
