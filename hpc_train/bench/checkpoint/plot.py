"""A result of `bench checkpoint` as bars."""

from __future__ import annotations

from pathlib import Path

from hpc_train.bench.checkpoint.result import OPERATIONS, OURS, STALL, Line, Result, Setting
from hpc_train.errors import UserError


def draw(result: Result, path: Path) -> None:
    """A row a directory and number of ranks, a column an operation. Raises UserError for a file that cannot be made."""
    from matplotlib.figure import Figure

    columns = [name for name in OPERATIONS if any(line.operation == name for line in _all(result))]
    figure = Figure(figsize=(3.6 * len(columns), 2.8 * len(result.settings)), layout="constrained")
    grid = figure.subplots(len(result.settings), len(columns), squeeze=False)
    for axes_row, setting in zip(grid, result.settings, strict=True):
        for axes, operation in zip(axes_row, columns, strict=True):
            _bars(axes, [line for line in setting.lines if line.operation == operation])
            axes.set_title(operation, fontsize=9)
        axes_row[0].set_ylabel(_label(setting), fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error


def _all(result: Result) -> list[Line]:
    return [line for setting in result.settings for line in setting.lines]


def _label(setting: Setting) -> str:
    return f"{setting.file_system}, {setting.ranks} ranks\n{setting.gib:.2f} GiB, {setting.tensors} tensors"


def _name(row: Line) -> str:
    return row.side if row.read is None else f"{row.side}\nreads {row.read:.2f}x"


def _speeds(row: Line) -> tuple[float, float]:
    low, high = row.quartiles
    gib = row.gib_per_second * row.seconds
    return gib / high, gib / low


def _bars(axes: object, rows: list[Line]) -> None:
    """Seconds of a stall, else GiB/s; whiskers are quartiles."""
    stall = bool(rows) and rows[0].operation == STALL
    values = [row.seconds if stall else row.gib_per_second for row in rows]
    ends = [row.quartiles if stall else _speeds(row) for row in rows]
    errors = [
        [value - low for value, (low, _) in zip(values, ends, strict=True)],
        [high - value for value, (_, high) in zip(values, ends, strict=True)],
    ]
    colors = ["tab:orange" if row.side == OURS else "tab:gray" for row in rows]
    axes.barh([_name(row) for row in rows], values, xerr=errors, color=colors)  # type: ignore[attr-defined]
    axes.invert_yaxis()  # type: ignore[attr-defined]
    axes.set_xlabel("seconds" if stall else "GiB/s", fontsize=8)  # type: ignore[attr-defined]
    axes.tick_params(labelsize=7)  # type: ignore[attr-defined]
