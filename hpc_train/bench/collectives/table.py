"""A result for a person: a table of measurements, one of the levels."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hpc_train.bench.collectives.result import Fit, Measurement, Result

_OURS = {"ring": "ring (ours)", "tree": "tree (ours)"}


def show(result: Result, console: Console | None = None) -> None:
    """Print both tables and what was left out."""
    console = console or Console(width=None if Console().is_terminal else 140)
    console.print(_measurements(result), highlight=False)
    if result.fits:
        console.print(_levels(result), highlight=False)
    if any(row.in_place for row in result.measurements):
        console.print("* in place: the backend has this operation in no other way.", highlight=False)
    if result.nodes > 1:
        console.print(f"placement: {result.placement}", highlight=False, markup=False)
    for note in result.notes:
        console.print(note, highlight=False, markup=False)


def _measurements(result: Result) -> Table:
    table = Table(title=_title(result), title_justify="left")
    for column in ("axis", "operation", "algorithm", "backend"):
        table.add_column(column)
    for column in ("size", "us (quartiles)", "algorithm GB/s", "bus GB/s", "wrong"):
        table.add_column(column, justify="right")
    before: tuple[str, ...] = ()
    for row in result.measurements:
        names = _names(row)
        if before and names != before:
            table.add_section()
        table.add_row(*(names if names != before else ("", "", "", "")), *_numbers(row))
        before = names
    return table


def _title(result: Result) -> str:
    degrees = " x ".join(f"{axis} {size}" for axis, size in result.degrees.items() if size > 1)
    return (
        f"{result.cluster}: {result.ranks} ranks on {result.nodes} node{'s' * (result.nodes > 1)} ({result.device}), "
        f"{degrees}; medians of {result.rounds} interleaved rounds, of the slowest rank"
    )


def _names(row: Measurement) -> tuple[str, ...]:
    groups = f"{row.axis}: {row.groups} x {row.ranks} ranks"
    return groups, row.operation + "*" * row.in_place, _OURS.get(row.algorithm, row.algorithm), row.backend


def _numbers(row: Measurement) -> tuple[str, ...]:
    low, high = row.quartiles
    return (
        size_text(row.size),
        f"{_us(row.seconds)} ({_us(low)} - {_us(high)})",
        f"{row.algbw:.4g}",
        f"{row.busbw:.4g}",
        str(row.wrong),
    )


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def size_text(size: int) -> str:
    """64M, 1K, 1020."""
    for unit, letter in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size % unit == 0:
            return f"{size // unit}{letter}"
    return str(size)


def _levels(result: Result) -> Table:
    table = Table(title="Levels: a message takes latency + pairs x size / bandwidth", title_justify="left")
    table.add_column("level")
    table.add_column("backend")
    for column in ("pairs", "latency us", "bandwidth GB/s", "fit within"):
        table.add_column(column, justify="right")
    for fit in result.fits:
        table.add_row(fit.level, fit.backend, str(fit.pairs), *_constants(fit))
    return table


def _constants(fit: Fit) -> tuple[str, str, str]:
    if fit.latency is None or fit.bandwidth is None or fit.error is None:
        return "unknown", "unknown", ""
    return f"{fit.latency * 1e6:.1f}", f"{fit.bandwidth / 1e9:.4g}", f"{fit.error:.1%}"
