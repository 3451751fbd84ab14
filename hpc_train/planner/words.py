"""Numbers and layouts in a few words, for tables, pictures and log lines."""

from __future__ import annotations

from hpc_train.config.degrees import resolve
from hpc_train.planner.band import Band
from hpc_train.planner.candidate import Candidate

PART_WORDS = {
    "tensor": "tp, exposed",
    "context": "cp, exposed",
    "data": "dp, exposed",
    "pipeline": "pp, exposed",
    "launch": "kernel launches",
    "checkpoint": "checkpoint stalls",
    "offload": "activations to host",
}
"""Labels for parts of a step whose field name in estimate.Time is unclear."""
_WHOLE = 1e3
"""From here on no digits after the point, and none as a power of ten."""
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def layout(it: Candidate) -> str:
    """`zero3, dp_replicate 2 x dp_shard 8 x tp 4`: the strategy, and the degrees above 1."""
    degrees = resolve(it.config.parallel, it.ranks)
    sizes = {name: getattr(degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{it.config.parallel.strategy}{', ' if mesh else ''}{mesh}"


def techniques(it: Candidate) -> str:
    """What else is on: schedule, recomputation, offload; empty: nothing."""
    parallel = it.config.parallel
    degrees = resolve(parallel, it.ranks)
    words = []
    if degrees.pp > 1:
        virtual = parallel.pipeline.virtual_stages
        words.append(f"{parallel.pipeline.schedule}{f' v{virtual}' if virtual and virtual > 1 else ''}")
    if degrees.tp > 1 and not parallel.tensor.sequence:
        words.append("no sp")
    if degrees.tp > 1 and parallel.tensor.asynchronous:
        words.append("async tp")
    if parallel.recompute.mode != "none":
        every = parallel.recompute.every
        words.append(f"recompute {parallel.recompute.mode}{f' every {every}' if every > 1 else ''}")
    if degrees.cp > 1 and parallel.context.method != "ring":
        words.append(parallel.context.method)
    if parallel.recompute.offload:
        words.append("offload activations")
    if not parallel.reshard_after_forward:
        words.append("no reshard")
    words += [f"offload {name}" for name in ("optimizer", "parameters") if getattr(parallel.offload, name) != "none"]
    return ", ".join(words)


def seconds(value: float) -> str:
    """With three digits and a unit."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def amount(value: float) -> str:
    """With three digits and k, M or G."""
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def share(value: float | None) -> str:
    """In per cent; - where it is not known."""
    return "-" if value is None else f"{value:.1%}"


def ends(band: Band, digits: str = ".3g") -> str:
    """p10 - p90."""
    return " - ".join(f"{it:,.0f}" if it >= _WHOLE else f"{it:{digits}}" for it in (band.p10, band.p90))
