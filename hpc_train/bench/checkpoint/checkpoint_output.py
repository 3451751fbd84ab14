"""Print the result of `bench checkpoint` as tables and plot it as a bar chart."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpc_train.bench.checkpoint.checkpoint import (
    BASE_SIDES,
    LOAD_COLD,
    LOAD_WARM,
    OPERATIONS,
    OUR_SIDE,
    RESHARD_COLUMNS,
    RESHARD_TO_FEWER,
    RESHARD_TO_MORE,
    SAVE,
    STALL,
    VERIFY,
    CheckpointBenchResult,
    OperationResult,
    SettingResult,
    SpeedRatio,
)
from hpc_train.errors import UserError

_OPERATION_DESCRIPTIONS = {
    SAVE: "save, until on the disk",
    STALL: "stall of a background save",
    LOAD_COLD: "load, page cache cold",
    LOAD_WARM: "load, page cache warm",
    VERIFY: "verify",
    RESHARD_TO_MORE: "load by rows on all ranks what one saved",
    RESHARD_TO_FEWER: "load on one rank what all saved by rows",
    RESHARD_COLUMNS: "load by columns what was saved by rows",
}


def print_checkpoint_result(result: CheckpointBenchResult) -> None:
    """Print a table for every directory and number of ranks, and a sentence on the speed of our side."""
    console = Console(width=None if Console().is_terminal else 140)
    for setting in result.settings:
        console.print(_make_setting_table(setting, result), highlight=False)
        for name, why in setting.missing.items():
            console.print(f"left out: {name}: {why}", highlight=False)
        console.print(_format_verdict(setting), highlight=False)


def _make_setting_table(setting: SettingResult, result: CheckpointBenchResult) -> Table:
    table = Table(title=_format_title(setting, result), title_justify="left")
    table.add_column("side", no_wrap=True)
    for column in ("seconds (quartiles)", "GiB/s", "CPU s/GiB", *(f"x {base}" for base in BASE_SIDES), "x read"):
        table.add_column(column, justify="right")
    for operation in OPERATIONS:
        rows = [line for line in setting.lines if line.operation == operation]
        if rows:
            table.add_section()
            table.add_row(_OPERATION_DESCRIPTIONS[operation], style="bold")
        for line in rows:
            table.add_row(*_format_row(line))
    return table


def _format_title(setting: SettingResult, result: CheckpointBenchResult) -> str:
    before, after = setting.load_average
    return (
        f"{setting.directory} ({setting.file_system}), {setting.ranks} ranks, {setting.gib:.2f} GiB in "
        f"{setting.tensors} tensors; {result.options.rounds} interleaved rounds; {result.cpus} CPUs, load "
        f"{before:.1f} before, {after:.1f} after"
    )


def _format_row(line: OperationResult) -> list[str]:
    low, high = line.quartiles
    ratios = [line.over.get(base) for base in BASE_SIDES]
    return [
        line.side,
        f"{line.seconds:.3f} ({low:.3f} - {high:.3f})",
        f"{line.gib_per_second:.2f}",
        f"{line.cpu_seconds_per_gib:.3f}",
        *(_format_ratio(ratio) if ratio else "" for ratio in ratios),
        f"{line.read:.2f}" if line.read is not None else "",
    ]


def _format_ratio(ratio: SpeedRatio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"


def _format_verdict(setting: SettingResult) -> str:
    """Return a sentence on the speed of our side."""
    parts = []
    for line in setting.lines:
        if line.side == OUR_SIDE and line.over:
            times = ", ".join(f"{ratio.median:.2f}x {base}" for base, ratio in line.over.items())
            read = f", reads {line.read:.2f}x the bytes needed" if line.read is not None else ""
            parts.append(f"{line.operation} {times}{read}")
    return f"{OUR_SIDE}: {'; '.join(parts)}."


def plot_checkpoint_result(result: CheckpointBenchResult, path: Path) -> None:
    """Plot a bar chart: rows are directories and numbers of ranks, columns operations.

    Raises UserError if the file cannot be written.
    """
    from matplotlib.figure import Figure

    columns = [name for name in OPERATIONS if any(line.operation == name for line in _list_bars(result))]
    figure = Figure(figsize=(3.6 * len(columns), 2.8 * len(result.settings)), layout="constrained")
    grid = figure.subplots(len(result.settings), len(columns), squeeze=False)
    for axes_row, setting in zip(grid, result.settings, strict=True):
        for axes, operation in zip(axes_row, columns, strict=True):
            _draw_bars(axes, [line for line in setting.lines if line.operation == operation])
            axes.set_title(operation, fontsize=9)
        axes_row[0].set_ylabel(_format_axis_label(setting), fontsize=8)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error


def _list_bars(result: CheckpointBenchResult) -> list[OperationResult]:
    return [line for setting in result.settings for line in setting.lines]


def _format_axis_label(setting: SettingResult) -> str:
    return f"{setting.file_system}, {setting.ranks} ranks\n{setting.gib:.2f} GiB, {setting.tensors} tensors"


def _side_name(row: OperationResult) -> str:
    return row.side if row.read is None else f"{row.side}\nreads {row.read:.2f}x"


def _list_bar_heights(row: OperationResult) -> tuple[float, float]:
    low, high = row.quartiles
    gib = row.gib_per_second * row.seconds
    return gib / high, gib / low


def _draw_bars(axes: object, rows: list[OperationResult]) -> None:
    """Draw the sides of one operation: seconds for stalls, else GiB/s; whiskers are quartiles."""
    stall = bool(rows) and rows[0].operation == STALL
    values = [row.seconds if stall else row.gib_per_second for row in rows]
    ends = [row.quartiles if stall else _list_bar_heights(row) for row in rows]
    errors = [
        [value - low for value, (low, _) in zip(values, ends, strict=True)],
        [high - value for value, (_, high) in zip(values, ends, strict=True)],
    ]
    colors = ["tab:orange" if row.side == OUR_SIDE else "tab:gray" for row in rows]
    axes.barh([_side_name(row) for row in rows], values, xerr=errors, color=colors)  # type: ignore[attr-defined]
    axes.invert_yaxis()  # type: ignore[attr-defined]
    axes.set_xlabel("seconds" if stall else "GiB/s", fontsize=8)  # type: ignore[attr-defined]
    axes.tick_params(labelsize=7)  # type: ignore[attr-defined]
