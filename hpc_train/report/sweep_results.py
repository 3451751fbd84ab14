"""The results of a sweep: overrides and final metrics of each point, and the point that did best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.job_state import decide_state
from hpc_train.launch.state.progress import add_progress, find_best_value, is_higher_better, read_final_values
from hpc_train.launch.state.run_facts import gather_facts
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.launch.sweep.sweep_directory import SweepDirectory, read_points
from hpc_train.near_names import suggest_names

Value = str | int | float | bool | None
_DEFAULT_METRICS = ("validation_loss", "loss")
_DECADES = 10.0
"""Values whose largest is so many times the smallest get a logarithmic axis."""


@dataclass(frozen=True)
class PointResult:
    """Overrides and final metrics of one point."""

    point: str
    state: str
    swept: dict[str, Value]
    final: dict[str, Any]
    """The last step's line of metrics.jsonl, and of what not every step has its last value; {} before the first."""
    best: float | None = None


@dataclass(frozen=True)
class SweepResults:
    """Results of all points, and the metric that ranks them."""

    rows: list[PointResult]
    metric: str

    @property
    def keys(self) -> list[str]:
        """Return the swept keys."""
        return list(dict.fromkeys(key for row in self.rows for key in row.swept))

    def get_value(self, row: PointResult) -> float | None:
        """Return the metric at the last step that has it."""
        value = row.final.get(self.metric)
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def winner(self) -> PointResult | None:
        """Return the point with the best final value."""
        valued = [(value, row) for row in self.rows if (value := self.get_value(row)) is not None]
        if not valued:
            return None
        choose = max if is_higher_better(self.metric) else min
        return choose(valued, key=lambda pair: pair[0])[1]


def gather_results(points: Sequence[RunPoint], metric: str | None = None, best: bool = False) -> SweepResults:
    """Gather the results of the points. best: read all steps. Raises UserError for a metric that no point has."""
    swept = _read_swept_values(points)
    finals = [read_final_values(point.run / "metrics.jsonl") for point in points]
    metric = metric or next(
        (name for name in _DEFAULT_METRICS if any(name in final for final in finals)), _DEFAULT_METRICS[-1]
    )
    if any(finals) and not any(metric in final for final in finals):
        names = {name for final in finals for name in final}
        raise UserError(f"--metric {metric}: no point has it; {suggest_names(metric, names)}")
    statuses = [add_progress(decide_state(facts), facts) for facts in gather_facts(points, run_client)]
    return SweepResults(
        [
            PointResult(
                status.point,
                str(status.state),
                swept.get(point.name, {}),
                final,
                find_best_value(point.run / "metrics.jsonl", metric) if best else None,
            )
            for point, status, final in zip(points, statuses, finals, strict=True)
        ],
        metric,
    )


def _read_swept_values(points: Sequence[RunPoint]) -> dict[str, dict[str, Value]]:
    """Point -> swept key -> value, as it was given."""
    sweeps: dict[Path, SweepDirectory] = {point.sweep.path: point.sweep for point in points if point.sweep}
    return {
        frozen.id: dict(_split_override(text) for text in frozen.overrides)
        for sweep in sweeps.values()
        for frozen in read_points(sweep)
    }


def _split_override(text: str) -> tuple[str, Value]:
    key, _, value = text.partition("=")
    return key.lstrip("+~"), _parse_value(value)


def _parse_value(text: str) -> Value:
    """Parse numbers, booleans and null; return other text unquoted."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "null": None}.get(text, text.strip("'\""))


def select_varied_keys(rows: Sequence[PointResult], keys: Sequence[str]) -> list[str]:
    """Return the swept keys with more than one value, numeric keys first, then by number of values."""

    def rank(key: str) -> tuple[bool, int]:
        values = {row.swept.get(key) for row in rows}
        return (not all(map(is_number, values)), -len(values))

    return sorted((key for key in keys if len({row.swept.get(key) for row in rows}) > 1), key=rank)


def is_number(value: object) -> bool:
    """Return whether a value can be drawn on an axis; true and false cannot."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether the values are better shown on a logarithmic axis."""
    return bool(values) and min(values) > 0 and max(values) / min(values) >= _DECADES
