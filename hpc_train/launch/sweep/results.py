"""`hpc-train results SWEEP|RUN`: what was swept and what came of it, a row a point."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.launch.clients import ask
from hpc_train.launch.state.points import Point, find
from hpc_train.launch.status import survey
from hpc_train.launch.sweep.frozen import SweepFolder, read_points
from hpc_train.launch.sweep.metrics import best_value, final_values, is_higher_better, read_steps

if TYPE_CHECKING:
    from rich.table import Table

Value = str | int | float | bool | None
_DEFAULTS = ("validation_loss", "loss")
_SHOWN = ("step", "loss", "validation_loss", "tokens_per_second")
_WIDE = 4096


@dataclass(frozen=True)
class Wanted:
    """What of the results, and how."""

    metric: str | None = None
    """None: validation_loss where there is one, else loss."""
    best: bool = False
    json: bool = False
    csv: str | None = None
    plot: str | None = None


@dataclass(frozen=True)
class Row:
    """One point."""

    point: str
    state: str
    swept: dict[str, Value]
    final: dict[str, Any]
    """The last step's line of metrics.jsonl, and of what not every step has its last value; {} before the first."""
    best: float | None = None


@dataclass(frozen=True)
class Results:
    """All rows, and what they are judged by."""

    rows: list[Row]
    metric: str

    @property
    def keys(self) -> list[str]:
        """What was swept."""
        return list(dict.fromkeys(key for row in self.rows for key in row.swept))

    def value(self, row: Row) -> float | None:
        """The metric, of the last step that has it."""
        found = row.final.get(self.metric)
        return float(found) if isinstance(found, (int, float)) else None

    @property
    def winner(self) -> Row | None:
        """The point with the best last value."""
        valued = [(value, row) for row in self.rows if (value := self.value(row)) is not None]
        if not valued:
            return None
        choose = max if is_higher_better(self.metric) else min
        return choose(valued, key=lambda pair: pair[0])[1]


def results_command(target: str, wanted: Wanted) -> int:
    """Print or write the results; returns the exit code.

    Raises UserError, one line, for a metric that no point has and for a file that cannot be written.
    """
    points = find(target, ask)
    results = gather_results(points, wanted.metric, wanted.best)
    if wanted.plot is not None:
        from hpc_train.launch.sweep.plot import draw, draw_run

        if len(points) == 1:
            draw_run(read_steps(points[0].run / "metrics.jsonl"), wanted.metric, points[0].name, Path(wanted.plot))
        else:
            draw(results, Path(wanted.plot))
    if wanted.json:
        print(json.dumps([_json(results, row, wanted.best) for row in results.rows]))
    elif wanted.csv is not None:
        _write_csv(results, wanted)
    elif wanted.plot is None or sys.stdout.isatty():
        from rich.console import Console

        # Where nobody looks at a screen, a line is a line.
        Console(width=None if sys.stdout.isatty() else _WIDE).print(_table(results, wanted.best))
    return EXIT_DONE


def gather_results(points: Sequence[Point], metric: str | None = None, best: bool = False) -> Results:
    """The rows of these points. best: read all steps. Raises UserError for a metric that no point has."""
    swept = _swept(points)
    finals = [final_values(point.run / "metrics.jsonl") for point in points]
    metric = metric or next((name for name in _DEFAULTS if any(name in final for final in finals)), _DEFAULTS[-1])
    if any(finals) and not any(metric in final for final in finals):
        known = ", ".join(sorted({name for final in finals for name in final}))
        raise UserError(f"--metric {metric}: no point has it; there are {known}")
    return Results(
        [
            Row(
                status.point,
                str(status.state),
                swept.get(point.name, {}),
                final,
                best_value(point.run / "metrics.jsonl", metric) if best else None,
            )
            for point, status, final in zip(points, survey(points), finals, strict=True)
        ],
        metric,
    )


def _swept(points: Sequence[Point]) -> dict[str, dict[str, Value]]:
    """Point -> swept key -> value, as it was given."""
    sweeps: dict[Path, SweepFolder] = {point.sweep.path: point.sweep for point in points if point.sweep}
    return {
        frozen.id: dict(_pair(text) for text in frozen.overrides)
        for sweep in sweeps.values()
        for frozen in read_points(sweep)
    }


def _pair(text: str) -> tuple[str, Value]:
    key, _, value = text.partition("=")
    return key.lstrip("+~"), _plain(value)


def _plain(text: str) -> Value:
    """A number as a number, the rest as it was written."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "null": None}.get(text, text.strip("'\""))


def _json(results: Results, row: Row, best: bool) -> dict[str, Any]:
    extra = {"best": row.best} if best else {}
    own = {"metric": results.metric, "value": results.value(row)}
    return {"point": row.point, "state": row.state, "overrides": row.swept, **own, **extra, "final": row.final}


def _write_csv(results: Results, wanted: Wanted) -> None:
    if wanted.csv == "-":
        _csv(results, wanted.best, sys.stdout)
        return
    assert wanted.csv is not None
    try:
        with Path(wanted.csv).open("w", newline="") as file:
            _csv(results, wanted.best, file)
    except OSError as error:
        raise UserError(f"--csv {wanted.csv}: {error.strerror}") from error


def _csv(results: Results, best: bool, file: TextIO) -> None:
    names = list(dict.fromkeys(name for row in results.rows for name in row.final))
    writer = csv.writer(file, lineterminator="\n")
    extra = [f"best_{results.metric}"] if best else []
    writer.writerow(["point", "state", *results.keys, *names, *extra])
    for row in results.rows:
        values = [row.swept.get(key, "") for key in results.keys] + [row.final.get(name, "") for name in names]
        writer.writerow([row.point, row.state, *values, *([row.best] if best else [])])


def _table(results: Results, best: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    known = {name for row in results.rows for name in row.final}
    columns = [name for name in dict.fromkeys([*_SHOWN, results.metric]) if name in known]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("point", "state", *results.keys, *columns, *([f"best {results.metric}"] if best else [])):
        shown.add_column(name, no_wrap=True, overflow="fold")
    winner = results.winner if len(results.rows) > 1 else None
    for row in results.rows:
        cells = [row.swept.get(key) for key in results.keys] + [row.final.get(name) for name in columns]
        cells += [row.best] if best else []
        style = "bold green" if row is winner else ""
        shown.add_row(*(Text(text, style=style) for text in (row.point, row.state, *map(_cell, cells))))
    return shown


def _cell(value: Value) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "-" if value is None else str(value)
