"""A result as lines like those of nccl-tests, for eyes and scripts that know these."""

from __future__ import annotations

from itertools import groupby

from hpc_train.bench.collectives.result import Fit, Measurement, Result

_HEAD = (
    f"#{'size':>11} {'count':>12} {'type':>9} {'redop':>7} {'time':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>7}",
    f"#{'(B)':>11} {'(elements)':>12} {'':>9} {'':>7} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} {'':>7}",
)


def text(result: Result) -> str:
    """One block an axis, operation, algorithm and backend, then the constants; what is no measurement begins with #."""
    degrees = " x ".join(f"{axis} {size}" for axis, size in result.degrees.items())
    lines = [
        f"# hpc-train bench collectives: cluster {result.cluster}, {result.ranks} ranks on "
        f"{result.nodes} node{'s' * (result.nodes > 1)} ({result.device}), {degrees}",
        f"# placement: {result.placement}",
        f"# medians of {result.rounds} interleaved rounds, of the slowest rank; {result.date}",
    ]
    for title, rows in groupby(result.measurements, _title):
        lines += ["#", f"# {title}", *_HEAD, *map(_row, rows)]
    lines += ["#", *(f"# {_fit(fit)}" for fit in result.fits), *(f"# {note}" for note in result.notes)]
    lines.append(f"# Out of bounds values : {result.wrong} {'FAILED' if result.wrong else 'OK'}")
    lines.append(f"# Avg bus bandwidth    : {_average(result):.6g}")
    return "\n".join(lines)


def _title(row: Measurement) -> str:
    groups = "1 group" if row.groups == 1 else f"{row.groups} groups"
    how = "in place" if row.in_place else "out of place"
    own = "" if row.algorithm == "library" else " (ours, over point to point)"
    return f"{row.operation} {row.algorithm}{own} {row.backend}, {row.axis}: {groups} of {row.ranks} ranks, {how}"


def _row(row: Measurement) -> str:
    return (
        f"{row.size:12} {row.count:12} {row.type:>9} {row.redop:>7} {row.seconds * 1e6:10.2f} "
        f"{row.algbw:8.4g} {row.busbw:8.4g} {row.wrong:7}"
    )


def _fit(fit: Fit) -> str:
    if fit.latency is None or fit.bandwidth is None or fit.error is None:
        return f"level {fit.level} {fit.backend}: no bandwidth"
    return (
        f"level {fit.level} {fit.backend}: latency {fit.latency * 1e6:.2f} us, "
        f"bandwidth {fit.bandwidth / 1e9:.4g} GB/s, pairs {fit.pairs}, fit within {fit.error:.1%}"
    )


def _average(result: Result) -> float:
    bandwidths = [row.busbw for row in result.measurements]
    return sum(bandwidths) / len(bandwidths) if bandwidths else 0.0
