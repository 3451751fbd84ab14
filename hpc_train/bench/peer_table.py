"""A result of `bench step --peers` for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hpc_train.bench.against import PeerResult


def show(result: PeerResult, console: Console | None = None) -> None:
    """Print all sides, each pair in words, and the peers that are not installed."""
    console = console or Console(width=None if Console().is_terminal else 140)
    console.print(_sides(result), highlight=False)
    for pair in result.pairs:
        ratio = pair.ratio
        console.print(
            f"{pair.ours} is {ratio.wall:.3f} times as fast as {pair.peer} "
            f"(90 %: {ratio.low:.3f} - {ratio.high:.3f}; CPU time {ratio.cpu:.3f})",
            highlight=False,
        )
    if result.missing:
        console.print(f"not installed: {', '.join(result.missing)}", highlight=False)


def _sides(result: PeerResult) -> Table:
    title = (
        f"{result.model}, {result.ranks} ranks on {result.device}, {result.tokens_per_step:,} tokens a step; "
        f"{result.rounds} interleaved rounds of {result.steps} steps a side"
    )
    table = Table("side", title=title, title_justify="left")
    for column in ("ms a step (quartiles)", "tokens/s", "CPU ms", "kept MiB", f"speed of {result.base}"):
        table.add_column(column, justify="right")
    for side in result.sides:
        low, high = side.quartiles
        table.add_row(
            side.name,
            f"{side.seconds * 1e3:.1f} ({low * 1e3:.1f} - {high * 1e3:.1f})",
            f"{side.tokens_per_second:,.0f}",
            f"{side.cpu_seconds * 1e3:.1f}",
            f"{side.kept_mib:.1f}",
            f"{result.over_base[side.name]:.3f}",
        )
    return table
