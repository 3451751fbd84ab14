"""Invented records of runs, with known times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpc_train.report.step_table import StepTable, read_step_table
from hpc_train.training.records.step_records import StepRecordFile, pack_record

EVEN = {"forward": 0.03, "backward": 0.06, "clip": 0.001, "update": 0.004, "data": 0.001, "save": 0.0, "evaluate": 0.0}
"""Seconds of a step on a rank that nothing blocks."""


def write_run(
    run: Path,
    ranks: int,
    steps: Sequence[int],
    change: Callable[[int, int], Mapping[str, Any]] = lambda rank, step: {},
    attempt: int = 0,
    ranks_per_node: int = 8,
) -> None:
    """Write the records of an attempt. change(rank, step): returns the fields that differ from EVEN."""
    logs = run / "logs" / str(attempt)
    logs.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        file = StepRecordFile(logs / f"steps-node-{rank // ranks_per_node}.bin", rank)
        for step in steps:
            values = {**EVEN, "resident": 500.0, "launch": 0.002, **change(rank, step)}
            values.setdefault("waits", [0.0] * 16)
            blocked = float(np.sum(values["waits"]))
            values.setdefault("blocked_backward", blocked)
            for name in ("blocked_forward", "blocked_clip", "blocked_rest"):
                values.setdefault(name, 0.0)
            values["backward"] += values["blocked_backward"]
            parts = ("forward", "backward", "clip", "update", "data", "save", "evaluate")
            values.setdefault("total", sum(values[name] for name in parts))
            file.append(
                pack_record({**values, "step": step, "steps": 1, "time": 1e9 + step, "tokens": 100}), step * 0.1
            )
        file.close()


def make_table(
    tmp_path: Path, ranks: int, change: Callable[[int, int], Mapping[str, Any]], steps: int = 40
) -> StepTable:
    """Write such a run, and read it."""
    write_run(tmp_path, ranks, range(1, steps + 1), change)
    table = read_step_table(tmp_path)
    assert table is not None
    return table


def waits(*seconds: float) -> np.ndarray[Any, Any]:
    """Return the waiting times of the first collectives of a step."""
    return np.array([*seconds, *[0.0] * (16 - len(seconds))])
