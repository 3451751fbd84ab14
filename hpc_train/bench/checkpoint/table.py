"""A result of `bench checkpoint` for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hpc_train.bench.checkpoint.result import (
    BASES,
    COLD,
    COLUMNS,
    FEWER,
    MORE,
    OPERATIONS,
    OURS,
    SAVE,
    STALL,
    VERIFY,
    WARM,
    Line,
    Ratio,
    Result,
    Setting,
)

_WHAT = {
    SAVE: "save, until on the disk",
    STALL: "stall of a background save",
    COLD: "load, page cache cold",
    WARM: "load, page cache warm",
    VERIFY: "verify",
    MORE: "load by rows on all ranks what one saved",
    FEWER: "load on one rank what all saved by rows",
    COLUMNS: "load by columns what was saved by rows",
}


def show(result: Result, console: Console | None = None) -> None:
    """Print a table for every directory and number of ranks, and ours in words."""
    console = console or Console(width=None if Console().is_terminal else 140)
    for setting in result.settings:
        console.print(_table(setting, result), highlight=False)
        for name, why in setting.missing.items():
            console.print(f"left out: {name}: {why}", highlight=False)
        console.print(_verdict(setting), highlight=False)


def _table(setting: Setting, result: Result) -> Table:
    table = Table(title=_title(setting, result), title_justify="left")
    table.add_column("side", no_wrap=True)
    for column in ("seconds (quartiles)", "GiB/s", "CPU s/GiB", *(f"x {base}" for base in BASES), "x read"):
        table.add_column(column, justify="right")
    for operation in OPERATIONS:
        rows = [line for line in setting.lines if line.operation == operation]
        if rows:
            table.add_section()
            table.add_row(_WHAT[operation], style="bold")
        for line in rows:
            table.add_row(*_row(line))
    return table


def _title(setting: Setting, result: Result) -> str:
    before, after = setting.load_average
    return (
        f"{setting.directory} ({setting.file_system}), {setting.ranks} ranks, {setting.gib:.2f} GiB in "
        f"{setting.tensors} tensors; {result.options.rounds} interleaved rounds; {result.cpus} CPUs, load "
        f"{before:.1f} before, {after:.1f} after"
    )


def _row(line: Line) -> list[str]:
    low, high = line.quartiles
    ratios = [line.over.get(base) for base in BASES]
    return [
        line.side,
        f"{line.seconds:.3f} ({low:.3f} - {high:.3f})",
        f"{line.gib_per_second:.2f}",
        f"{line.cpu_seconds_per_gib:.3f}",
        *(_ratio(ratio) if ratio else "" for ratio in ratios),
        f"{line.read:.2f}" if line.read is not None else "",
    ]


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} - {ratio.high:.2f})"


def _verdict(setting: Setting) -> str:
    """How fast ours is, in words."""
    parts = []
    for line in setting.lines:
        if line.side == OURS and line.over:
            times = ", ".join(f"{ratio.median:.2f}x {base}" for base, ratio in line.over.items())
            read = f", reads {line.read:.2f}x what is wanted" if line.read is not None else ""
            parts.append(f"{line.operation} {times}{read}")
    return f"{OURS}: {'; '.join(parts)}."
