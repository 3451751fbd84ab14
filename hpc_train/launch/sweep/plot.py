"""Plot a sweep's metric over its values: one line; with a second value, a line for each; else points by rank.

For a single run: its curve over the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_train.errors import UserError
from hpc_train.launch.sweep.metrics import is_higher_better
from hpc_train.launch.sweep.results import Results, Row, Value

_DECADES = 10.0
"""Values whose largest is so many times the smallest get a logarithmic axis."""
_MOST_LINES, _MOST_BARS, _MOST_MARKED = 12, 60, 40
_CURVES = ("loss", "validation_loss")
"""Metrics drawn for a single run."""


def draw(results: Results, path: Path) -> None:
    """Raises UserError, one line, without matplotlib, without any value, and for a file that cannot be written."""
    rows = [row for row in results.rows if results.value(row) is not None]
    if not rows:
        raise UserError(f"--plot {path}: no point has a value of {results.metric} yet")
    keys = varied(rows, results.keys)
    lines = len({row.swept[keys[1]] for row in rows}) if len(keys) == 2 else 1
    as_bars = not keys or len(keys) > 2 or lines > _MOST_LINES
    figure = _figure(path, (7.0, max(2.5, 1.0 + 0.28 * min(len(rows), _MOST_BARS))) if as_bars else (6.4, 4.4))
    axes = figure.subplots()
    if as_bars:
        _bars(axes, results, rows, keys)
    else:
        _lines(axes, results, rows, keys)
    _save(figure, axes, path)


def draw_run(steps: Sequence[dict[str, Any]], metric: str | None, name: str, path: Path) -> None:
    """Draw one run over its steps: the loss, plus the validation loss if it was measured, or `metric`.

    steps: lines of metrics.jsonl. Raises UserError like `draw`.
    """
    figure = _figure(path, (6.4, 4.4))
    axes, drawn = figure.subplots(), 0
    for wanted in (metric,) if metric is not None else _CURVES:
        found = [(it["step"], it[wanted]) for it in steps if _is_number(it.get(wanted)) and _is_number(it["step"])]
        if found:
            style = {"marker": "o", "markersize": 4} if len(found) < _MOST_MARKED else {}
            axes.plot(*zip(*found, strict=True), label=wanted, **style)
            drawn += len(found)
    if not drawn:
        raise UserError(f"--plot {path}: the run has no step with a value of {metric or _CURVES[0]} yet")
    axes.set_xlabel("step")
    axes.set_title(name, fontsize=9)
    axes.legend(fontsize=8)
    _save(figure, axes, path)


def _figure(path: Path, size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--plot {path}: needs matplotlib; pip install 'hpc_train[plot]'") from None
    return Figure(figsize=size, layout="constrained")


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(True, alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error


def varied(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """The swept keys that have more than one value, the one with the most values (numbers before words) first."""

    def rank(key: str) -> tuple[bool, int]:
        values = {row.swept.get(key) for row in rows}
        return (not all(map(_is_number, values)), -len(values))

    return sorted((key for key in keys if len({row.swept.get(key) for row in rows}) > 1), key=rank)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether equal distances on a logarithmic axis say more."""
    return min(values) > 0 and max(values) / min(values) >= _DECADES


def _lines(axes: Any, results: Results, rows: Sequence[Row], keys: Sequence[str]) -> None:
    """The first key across, a line for each value of the second."""
    across, *second = keys
    places = _places(rows, across)
    groups: dict[Value, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.swept[second[0]] if second else None, []).append(row)
    for value, members in sorted(groups.items(), key=lambda pair: _order(pair[0])):
        points = sorted((places[row.swept[across]], results.value(row)) for row in members)
        label = f"{second[0]}={value}" if second else None
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    numbers = [value for value in places.values() if isinstance(value, (int, float))]
    if all(_is_number(value) for value in places):
        if spans_decades(numbers):
            axes.set_xscale("log")
    else:
        axes.set_xticks(list(places.values()), [str(value) for value in places])
    _scale(axes, results, rows)
    axes.set_xlabel(across)
    axes.set_ylabel(results.metric)
    if second:
        axes.legend(fontsize=8)


def _places(rows: Sequence[Row], key: str) -> dict[Value, float]:
    """Where each value is on the axis: numbers at themselves, words side by side."""
    values = sorted({row.swept[key] for row in rows}, key=_order)
    if all(map(_is_number, values)):
        return {value: float(value) for value in values}  # type: ignore[arg-type]
    return {value: float(index) for index, value in enumerate(values)}


def _order(value: Value) -> tuple[bool, float, str]:
    if _is_number(value):
        return (False, float(value), "")  # type: ignore[arg-type]
    return (True, 0.0, str(value))


def _scale(axes: Any, results: Results, rows: Sequence[Row]) -> None:
    if spans_decades([results.value(row) or 0.0 for row in rows]):
        axes.set_yscale("log")


def _bars(axes: Any, results: Results, rows: Sequence[Row], keys: Sequence[str]) -> None:
    """The best on top."""
    ranked = sorted(rows, key=lambda row: results.value(row) or 0.0, reverse=is_higher_better(results.metric))
    shown = ranked[:_MOST_BARS]
    names = [", ".join(f"{key.split('.')[-1]}={row.swept.get(key)}" for key in keys) or row.point for row in shown]
    axes.barh(range(len(shown)), [results.value(row) for row in shown])
    axes.set_yticks(range(len(shown)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(results.metric + (f" (the best {_MOST_BARS} of {len(ranked)})" if len(ranked) > len(shown) else ""))
    if spans_decades([results.value(row) or 0.0 for row in shown]):
        axes.set_xscale("log")
