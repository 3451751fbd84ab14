"""Results of `bench step` and `bench step --peers` as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from hpc_train.bench.step.step_peers import PeerResult
from hpc_train.bench.step.step_result import SideResult, StepResult, TimeRatio

_SIDE_DESCRIPTIONS = {
    "hpc_train": "the loop of `hpc-train train`, with metrics, noise scale and prefetch",
    "hpc_train_unrecorded": "the same with train.record_steps=false",
    "hand_written": "DDP, AdamW, clip_grad_norm_ with torch's defaults",
    "hand_written_tuned": "the same with fused AdamW and gradient_as_bucket_view",
    "hand_written_traceml": "that with torch's defaults, traced by TraceML",
}


def print_step_result(result: StepResult) -> None:
    """Print the sides, a sentence that compares with the reference side, and the start-up by part."""
    console = Console(width=None if Console().is_terminal else 140)
    table = Table(title=_format_title(result), title_justify="left")
    table.add_column("side")
    table.add_column("description")
    for column in ("ms per step (quartiles)", "tokens/s", "CPU ms", "kept MiB", "over ours (90 %)", "CPU"):
        table.add_column(column, justify="right")
    for side in result.sides:
        table.add_row(*_format_row(side, result.ratios.get(side.name)))
    console.print(table, highlight=False)
    console.print(_format_verdict(result), highlight=False)
    console.print(_format_startup(result.startup_seconds), highlight=False)


def _format_title(result: StepResult) -> str:
    return (
        f"{result.model}, {result.precision}, {result.strategy}, {result.ranks} ranks on {result.device}, "
        f"{result.tokens_per_step:,} tokens per step; "
        f"{result.rounds} interleaved rounds of {result.steps} steps per side"
    )


def _format_row(side: SideResult, ratio: TimeRatio | None) -> list[str]:
    low, high = side.quartiles
    return [
        side.name,
        _SIDE_DESCRIPTIONS[side.name],
        f"{side.seconds * 1e3:.1f} ({low * 1e3:.1f} - {high * 1e3:.1f})",
        f"{side.tokens_per_second:,.0f}",
        f"{side.cpu_seconds * 1e3:.1f}",
        f"{side.kept_mib:.1f}",
        f"{ratio.wall:.3f} ({ratio.low:.3f} - {ratio.high:.3f})" if ratio else "",
        f"{ratio.cpu:.3f}" if ratio else "",
    ]


def _format_verdict(result: StepResult) -> str:
    ratio = result.ratios[result.contract]
    verdict = (
        "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "neither faster nor slower beyond the noise"
    )
    return f"A step of {result.contract} takes {ratio.wall:.3f} times the wall time of ours: ours is {verdict}."


def _format_startup(parts: dict[str, float]) -> str:
    listed = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
    return f"Start-up of rank 0 to the end of its first step: {sum(parts.values()):.2f} s ({listed})."


def print_peer_result(result: PeerResult) -> None:
    """Print all sides, a sentence for each comparison, and the peers that are not installed."""
    console = Console(width=None if Console().is_terminal else 140)
    console.print(_make_sides_table(result), highlight=False)
    for pair in result.pairs:
        ratio = pair.ratio
        console.print(
            f"{pair.ours} is {ratio.wall:.3f} times as fast as {pair.peer} "
            f"(90 %: {ratio.low:.3f} - {ratio.high:.3f}; CPU time {ratio.cpu:.3f})",
            highlight=False,
        )
    if result.missing:
        console.print(f"not installed: {', '.join(result.missing)}", highlight=False)


def _make_sides_table(result: PeerResult) -> Table:
    title = (
        f"{result.model}, {result.ranks} ranks on {result.device}, {result.tokens_per_step:,} tokens per step; "
        f"{result.rounds} interleaved rounds of {result.steps} steps per side"
    )
    table = Table("side", title=title, title_justify="left")
    for column in ("ms per step (quartiles)", "tokens/s", "CPU ms", "kept MiB", f"speed of {result.base}"):
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
