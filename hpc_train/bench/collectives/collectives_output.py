"""Print the result of `bench collectives` as tables or in the format of nccl-tests, and plot it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hpc_train.bench.collectives.collectives import CollectivesResult, LevelFit, Measurement

_OUR_ALGORITHMS = {"ring": "ring (ours)", "tree": "tree (ours)"}


def print_collectives_result(result: CollectivesResult) -> None:
    """Print the tables of collectives and levels, and the cases that were left out."""
    console = Console(width=None if Console().is_terminal else 140)
    console.print(_make_measurement_table(result), highlight=False)
    if result.fits:
        console.print(_make_level_table(result), highlight=False)
    if any(row.in_place for row in result.measurements):
        console.print("* in place: the backend has this operation in no other way.", highlight=False)
    if result.nodes > 1:
        console.print(f"placement: {result.placement}", highlight=False, markup=False)
    for note in result.notes:
        console.print(note, highlight=False, markup=False)


def _make_measurement_table(result: CollectivesResult) -> Table:
    table = Table(title=_format_title(result), title_justify="left")
    for column in ("axis", "operation", "algorithm", "backend"):
        table.add_column(column)
    for column in ("size", "us (quartiles)", "algorithm GB/s", "bus GB/s", "wrong"):
        table.add_column(column, justify="right")
    before: tuple[str, ...] = ()
    for row in result.measurements:
        names = _name_cells(row)
        if before and names != before:
            table.add_section()
        table.add_row(*(names if names != before else ("", "", "", "")), *_number_cells(row))
        before = names
    return table


def _format_title(result: CollectivesResult) -> str:
    degrees = " x ".join(f"{axis} {size}" for axis, size in result.degrees.items() if size > 1)
    return (
        f"{result.cluster}: {result.ranks} ranks on {result.nodes} node{'s' * (result.nodes > 1)} ({result.device}), "
        f"{degrees}; medians of {result.rounds} interleaved rounds, of the slowest rank"
    )


def _name_cells(row: Measurement) -> tuple[str, ...]:
    groups = f"{row.axis}: {row.groups} x {row.ranks} ranks"
    return groups, row.operation + "*" * row.in_place, _OUR_ALGORITHMS.get(row.algorithm, row.algorithm), row.backend


def _number_cells(row: Measurement) -> tuple[str, ...]:
    low, high = row.quartiles
    return (
        format_message_size(row.size),
        f"{_format_microseconds(row.seconds)} ({_format_microseconds(low)} - {_format_microseconds(high)})",
        f"{row.algbw:.4g}",
        f"{row.busbw:.4g}",
        str(row.wrong),
    )


def _format_microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def format_message_size(size: int) -> str:
    """Format a size in bytes, such as 64M, 1K or 1020."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def _make_level_table(result: CollectivesResult) -> Table:
    table = Table(title="Levels: a message takes latency + pairs x size / bandwidth", title_justify="left")
    table.add_column("level")
    table.add_column("backend")
    for column in ("pairs", "latency us", "bandwidth GB/s", "fit within"):
        table.add_column(column, justify="right")
    for fit in result.fits:
        table.add_row(fit.level, fit.backend, str(fit.pairs), *_format_constants(fit))
    return table


def _format_constants(fit: LevelFit) -> tuple[str, str, str]:
    if fit.latency is None or fit.bandwidth is None or fit.error is None:
        return "unknown", "unknown", ""
    return f"{fit.latency * 1e6:.1f}", f"{fit.bandwidth / 1e9:.4g}", f"{fit.error:.1%}"


_PLAIN_HEAD = (
    f"#{'size':>11} {'count':>12} {'type':>9} {'redop':>7} {'time':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>7}",
    f"#{'(B)':>11} {'(elements)':>12} {'':>9} {'':>7} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'':>7}",
)


def format_nccl_tests(result: CollectivesResult) -> str:
    """Format the result like nccl-tests: a block for each axis, operation, algorithm and backend, then the levels.

    All lines but measurements begin with #.
    """
    degrees = " x ".join(f"{axis} {size}" for axis, size in result.degrees.items())
    lines = [
        f"# hpc-train bench collectives: cluster {result.cluster}, {result.ranks} ranks on "
        f"{result.nodes} node{'s' * (result.nodes > 1)} ({result.device}), {degrees}",
        f"# placement: {result.placement}",
        f"# medians of {result.rounds} interleaved rounds, of the slowest rank; {result.date}",
    ]
    for title, rows in groupby(result.measurements, _format_plain_title):
        lines += ["#", f"# {title}", *_PLAIN_HEAD, *map(_format_plain_row, rows)]
    lines += ["#", *(f"# {_format_plain_fit(fit)}" for fit in result.fits), *(f"# {note}" for note in result.notes)]
    lines.append(f"# Out of bounds values : {result.wrong} {'FAILED' if result.wrong else 'OK'}")
    lines.append(f"# Avg bus bandwidth    : {_average_bandwidth(result):.6g}")
    return "\n".join(lines)


def _format_plain_title(row: Measurement) -> str:
    groups = "1 group" if row.groups == 1 else f"{row.groups} groups"
    how = "in place" if row.in_place else "out of place"
    note = "" if row.algorithm == "library" else " (ours, over point to point)"
    return f"{row.operation} {row.algorithm}{note} {row.backend}, {row.axis}: {groups} of {row.ranks} ranks, {how}"


def _format_plain_row(row: Measurement) -> str:
    return (
        f"{row.size:12} {row.count:12} {row.type:>9} {row.redop:>7} {row.seconds * 1e6:10.2f} "
        f"{row.algbw:8.4g} {row.busbw:8.4g} {row.wrong:7}"
    )


def _format_plain_fit(fit: LevelFit) -> str:
    if fit.latency is None or fit.bandwidth is None or fit.error is None:
        return f"level {fit.level} {fit.backend}: no bandwidth"
    return (
        f"level {fit.level} {fit.backend}: latency {fit.latency * 1e6:.2f} us, "
        f"bandwidth {fit.bandwidth / 1e9:.4g} GB/s, pairs {fit.pairs}, fit within {fit.error:.1%}"
    )


def _average_bandwidth(result: CollectivesResult) -> float:
    bandwidths = [row.busbw for row in result.measurements]
    return sum(bandwidths) / len(bandwidths) if bandwidths else 0.0


_MARKS = {"library": "o", "ring": "s", "tree": "^"}


def plot_bandwidths(result: CollectivesResult, path: Path) -> None:
    """Plot bus bandwidths: a panel for each axis, a line for each operation, algorithm and backend.

    The suffix of the path chooses .png or .svg.
    """
    from matplotlib.figure import Figure

    axes = list(dict.fromkeys(row.axis for row in result.measurements))
    figure = Figure(figsize=(6.5 * len(axes), 5.2), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False, sharey=True)[0]
    for panel, axis in zip(panels, axes, strict=True):
        rows = [row for row in result.measurements if row.axis == axis]
        for name, line in groupby(rows, _plot_line):
            points = list(line)
            mark = _MARKS[points[0].algorithm]
            panel.plot([row.size for row in points], [row.busbw for row in points], marker=mark, label=name)
        sizes = sorted({row.size for row in rows if row.operation == rows[0].operation})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, [format_message_size(size) for size in sizes], rotation=45)
        panel.set_yscale("log")
        panel.set_title(f"{axis}: {rows[0].groups} x {rows[0].ranks} ranks")
        panel.set_xlabel("size (bytes)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("bus bandwidth (GB/s)")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    figure.suptitle(f"{result.cluster}, {result.ranks} ranks on {result.device}, {result.date[:10]}")
    figure.savefig(path)


def _plot_line(row: Measurement) -> str:
    note = "" if row.algorithm == "library" else f" {row.algorithm} (ours)"
    return f"{row.operation}{note} {row.backend}"
