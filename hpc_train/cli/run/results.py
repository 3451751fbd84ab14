"""`hpc-train results RUN`: show overrides and final metrics, a row per point, as a table, JSON, CSV or a plot.

The values are those of the last steps of metrics.jsonl. A plot shows the metric over one swept value, a line for
each value of a second one, or the points by rank.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.progress import is_higher_better, read_steps
from hpc_train.launch.state.run_lookup import find_points
from hpc_train.report.sweep_results import (
    PointResult,
    SweepResults,
    Value,
    gather_results,
    is_number,
    select_varied_keys,
    spans_decades,
)

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_COLUMNS = ("step", "loss", "validation_loss", "tokens_per_second")
_PIPE_WIDTH = 4096
"""Columns of a table that goes into a pipe or a file: no line is wrapped."""


@dataclass(frozen=True)
class ResultsOptions:
    """Options of `results`."""

    metric: str | None = None
    """None: validation_loss where there is one, else loss."""
    best: bool = False
    json: bool = False
    csv: str | None = None
    plot: str | None = None


def results_command(target: str, options: ResultsOptions) -> int:
    """Print or write the results, and return the exit code.

    Raises UserError for a metric that no point has and for a file that cannot be written.
    """
    points = find_points(target, run_client)
    results = gather_results(points, options.metric, options.best)
    if options.plot is not None:
        if len(points) == 1:
            plot_run(read_steps(points[0].run / "metrics.jsonl"), options.metric, points[0].name, Path(options.plot))
        else:
            plot_sweep(results, Path(options.plot))
    if options.json:
        print(json.dumps([_result_to_json(results, row, options.best) for row in results.rows]))
    elif options.csv is not None:
        _write_csv(results, options)
    elif options.plot is None or sys.stdout.isatty():
        from rich.console import Console

        # Off a terminal, a row must stay on one line for grep and awk.
        Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(_make_results_table(results, options.best))
    return EXIT_DONE


def _result_to_json(results: SweepResults, row: PointResult, best: bool) -> dict[str, Any]:
    extra = {"best": row.best} if best else {}
    metric_value = {"metric": results.metric, "value": results.get_value(row)}
    return {"point": row.point, "state": row.state, "overrides": row.swept, **metric_value, **extra, "final": row.final}


def _write_csv(results: SweepResults, options: ResultsOptions) -> None:
    if options.csv == "-":
        _print_csv(results, options.best, sys.stdout)
        return
    assert options.csv is not None
    try:
        with Path(options.csv).open("w", newline="") as file:
            _print_csv(results, options.best, file)
    except OSError as error:
        raise UserError(f"--csv {options.csv}: {error.strerror}") from error


def _print_csv(results: SweepResults, best: bool, file: TextIO) -> None:
    names = list(dict.fromkeys(name for row in results.rows for name in row.final))
    writer = csv.writer(file, lineterminator="\n")
    extra = [f"best_{results.metric}"] if best else []
    writer.writerow(["point", "state", *results.keys, *names, *extra])
    for row in results.rows:
        values = [row.swept.get(key, "") for key in results.keys] + [row.final.get(name, "") for name in names]
        writer.writerow([row.point, row.state, *values, *([row.best] if best else [])])


def _make_results_table(results: SweepResults, best: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    names = {name for row in results.rows for name in row.final}
    columns = [name for name in dict.fromkeys([*_SHOWN_COLUMNS, results.metric]) if name in names]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("point", "state", *results.keys, *columns, *([f"best {results.metric}"] if best else [])):
        table.add_column(name, no_wrap=True, overflow="fold")
    winner = results.winner if len(results.rows) > 1 else None
    for row in results.rows:
        cells = [row.swept.get(key) for key in results.keys] + [row.final.get(name) for name in columns]
        cells += [row.best] if best else []
        style = "bold green" if row is winner else ""
        table.add_row(*(Text(text, style=style) for text in (row.point, row.state, *map(_format_cell, cells))))
    return table


def _format_cell(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "-" if value is None else str(value)


_MAX_LINES, _MAX_BARS, _MAX_MARKED = 12, 60, 40
_CURVES = ("loss", "validation_loss")
"""Metrics drawn for a single run."""
_UNITS = {
    "loss": "nats a token",
    "validation_loss": "nats a token",
    "tokens_per_second": "tokens/s",
    "step_seconds": "s",
    "data_seconds": "s",
    "noise_scale": "sequences",
    "tokens": "tokens",
}


def plot_sweep(results: SweepResults, path: Path) -> None:
    """Plot the metric over the swept values. Raises UserError without matplotlib or values, or if writing fails."""
    rows = [row for row in results.rows if results.get_value(row) is not None]
    if not rows:
        raise UserError(f"--plot {path}: no point has a value of {results.metric} yet")
    keys = select_varied_keys(rows, results.keys)
    lines = len({row.swept[keys[1]] for row in rows}) if len(keys) == 2 else 1
    as_bars = not keys or len(keys) > 2 or lines > _MAX_LINES
    figure = _make_figure(path, (7.0, max(2.5, 1.0 + 0.28 * min(len(rows), _MAX_BARS))) if as_bars else (6.4, 4.4))
    axes = figure.subplots()
    if as_bars:
        _plot_bars(axes, results, rows, keys)
    else:
        _plot_lines(axes, results, rows, keys)
    _save_figure(figure, axes, path)


def plot_run(steps: Sequence[dict[str, Any]], metric: str | None, name: str, path: Path) -> None:
    """Draw one run over its steps: the loss, plus the validation loss if it was measured, or `metric`.

    steps: lines of metrics.jsonl. Raises UserError like `draw`.
    """
    figure = _make_figure(path, (6.4, 4.4))
    axes, drawn = figure.subplots(), 0
    for curve in (metric,) if metric is not None else _CURVES:
        points = [
            (record["step"], record[curve])
            for record in steps
            if is_number(record.get(curve)) and is_number(record["step"])
        ]
        if points:
            style = {"marker": "o", "markersize": 4} if len(points) < _MAX_MARKED else {}
            axes.plot(*zip(*points, strict=True), label=curve, **style)
            drawn += len(points)
    if not drawn:
        raise UserError(f"--plot {path}: the run has no step with a value of {metric or _CURVES[0]} yet")
    axes.set_xlabel("step")
    axes.set_ylabel(_describe_metric(metric or _CURVES[0]))
    axes.set_title(name, fontsize=9)
    values = [value for line in axes.lines for value in line.get_ydata()]
    if spans_decades(values):
        axes.set_yscale("log")
    axes.legend(fontsize=8)
    _save_figure(figure, axes, path)


def _describe_metric(metric: str) -> str:
    return f"{metric.replace('_', ' ')} ({_UNITS[metric]})" if metric in _UNITS else metric.replace("_", " ")


def _make_figure(path: Path, size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(f"--plot {path}: needs matplotlib; pip install 'hpc_train[plot]'") from None
    return Figure(figsize=size, layout="constrained")


def _save_figure(figure: Any, axes: Any, path: Path) -> None:
    axes.grid(True, alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error


def _plot_lines(axes: Any, results: SweepResults, rows: Sequence[PointResult], keys: Sequence[str]) -> None:
    """Plot over the first key, with a line for each value of the second."""
    across, *second = keys
    places = _choose_tick_positions(rows, across)
    groups: dict[Value, list[PointResult]] = {}
    for row in rows:
        groups.setdefault(row.swept[second[0]] if second else None, []).append(row)
    for value, members in sorted(groups.items(), key=lambda pair: _make_sort_key(pair[0])):
        points = sorted((places[row.swept[across]], results.get_value(row)) for row in members)
        label = f"{second[0]}={value}" if second else None
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
    numbers = [value for value in places.values() if isinstance(value, (int, float))]
    if all(is_number(value) for value in places):
        if spans_decades(numbers):
            axes.set_xscale("log")
        elif all(isinstance(value, int) for value in places):
            axes.xaxis.get_major_locator().set_params(integer=True)  # there is no layer between two
    else:
        axes.set_xticks(list(places.values()), [str(value) for value in places])
    _scale_metric_axis(axes, results, rows)
    axes.set_xlabel(across)
    axes.set_ylabel(_describe_metric(results.metric))
    if second:
        axes.legend(fontsize=8)


def _choose_tick_positions(rows: Sequence[PointResult], key: str) -> dict[Value, float]:
    """Place each value on the axis: numbers at their value, words side by side."""
    values = sorted({row.swept[key] for row in rows}, key=_make_sort_key)
    if all(map(is_number, values)):
        return {value: float(value) for value in values}  # type: ignore[arg-type]
    return {value: float(index) for index, value in enumerate(values)}


def _make_sort_key(value: Value) -> tuple[bool, float, str]:
    if is_number(value):
        return (False, float(value), "")  # type: ignore[arg-type]
    return (True, 0.0, str(value))


def _scale_metric_axis(axes: Any, results: SweepResults, rows: Sequence[PointResult]) -> None:
    if spans_decades([results.get_value(row) or 0.0 for row in rows]):
        axes.set_yscale("log")


def _plot_bars(axes: Any, results: SweepResults, rows: Sequence[PointResult], keys: Sequence[str]) -> None:
    """Plot one bar per point, best on top."""
    ranked = sorted(rows, key=lambda row: results.get_value(row) or 0.0, reverse=is_higher_better(results.metric))
    plotted = ranked[:_MAX_BARS]
    names = [", ".join(f"{key.split('.')[-1]}={row.swept.get(key)}" for key in keys) or row.point for row in plotted]
    axes.barh(range(len(plotted)), [results.get_value(row) for row in plotted])
    axes.set_yticks(range(len(plotted)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(
        _describe_metric(results.metric)
        + (f" (the best {_MAX_BARS} of {len(ranked)})" if len(ranked) > len(plotted) else "")
    )
    if spans_decades([results.get_value(row) or 0.0 for row in plotted]):
        axes.set_xscale("log")
