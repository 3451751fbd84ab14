"""Describe a candidate in a few words, as tables, pictures and log lines do.

Whatever a search can choose and is not the default has a word here; else two candidates would look alike.
"""

from __future__ import annotations

from hpc_train.config.parallel import AXES, resolve_degrees
from hpc_train.planner.candidate import Candidate
from hpc_train.planner.reliability.failure_rate import Percentiles

PART_LABELS = {
    "tensor": "exposed tp",
    "context": "exposed cp",
    "experts": "exposed ep",
    "data": "exposed dp",
    "pipeline": "exposed pp",
    "launch": "kernel launches",
    "checkpoint": "checkpoint stalls",
    "offload": "activations to host",
}
"""Labels for parts of a step whose field name in StepTime is unclear."""
_NO_DECIMALS_FROM = 1e3
"""Larger values are printed without decimals, and never as a power of ten."""


def describe_layout(candidate: Candidate) -> str:
    """Name the strategy and the degrees above 1: `zero3, dp_replicate 2 x dp_shard 8 x tp 4, ep 8`.

    ep stands apart, because it is a part of dp_shard x cp and no axis to multiply.
    """
    degrees = resolve_degrees(candidate.config.parallel, candidate.ranks)
    sizes = {name: getattr(degrees, name) for name in AXES}
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    experts = f", ep {candidate.config.parallel.ep}" if candidate.config.parallel.ep > 1 else ""
    return f"{candidate.config.parallel.strategy}{', ' if mesh else ''}{mesh}{experts}"


def describe_candidate(candidate: Candidate) -> str:
    """Describe the layout, the micro-batch and the techniques: `zero3, dp_shard 8, micro-batch 2, recompute full`."""
    techniques = describe_techniques(candidate)
    batch = f"micro-batch {candidate.config.train.micro_batch}"
    return ", ".join(filter(None, (describe_layout(candidate), batch, techniques)))


def describe_techniques(candidate: Candidate) -> str:
    """List the other techniques in use, such as schedule, recomputation and offload; empty if there are none."""
    parallel = candidate.config.parallel
    degrees = resolve_degrees(parallel, candidate.ranks)
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


def format_range(percentiles: Percentiles, digits: str = ".3g") -> str:
    """Format the range from p10 to p90: `12.5 - 14`."""
    ends = percentiles.p10, percentiles.p90
    return " - ".join(f"{value:,.0f}" if value >= _NO_DECIMALS_FROM else f"{value:{digits}}" for value in ends)
