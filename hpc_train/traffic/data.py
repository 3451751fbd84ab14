"""The data-parallel axes: gradients, and what the zero strategies gather (Rajbhandari et al. 2020, arXiv:1910.02054).

Volumes are those of parallel/zero/shard.py and parallel/ddp/replicate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.traffic.flow import Flow

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Uses:
    """How often in a step a group of parameters is gathered and its gradients are reduced."""

    gathers: int
    reductions: int


@dataclass(frozen=True)
class Group:
    """Groups of parameters that are alike: each is gathered, and reduced, by one collective."""

    what: str
    numbers: float
    """Of one such group: what one rank of tp holds, filled up to equal shards; the mean where groups differ."""
    groups: int
    uses: Uses


def block_uses(strategy: str, micro_batches: int, reshard: bool, pipeline: bool, split_backward: bool) -> Uses:
    """Of the parameters of blocks.

    A pipeline reduces once a step, and never frees what a backward has gathered before the end of the step, but each
    forward frees what it has gathered: every one of M forwards is followed by a gather, and one goes before the first.
    """
    if pipeline:
        again = strategy == "zero3" and reshard and not split_backward
        return Uses(micro_batches + 1 if again else 1, 1)
    if strategy == "zero3":
        return Uses(micro_batches * (2 if reshard else 1), micro_batches)
    return Uses(1, micro_batches if strategy == "zero2" else 1)


def end_uses(strategy: str, micro_batches: int, pipeline: bool) -> Uses:
    """Of what is in no block, which zero3 keeps from the end of forward to the beginning of backward."""
    if pipeline or strategy not in ("zero2", "zero3"):
        return Uses(1, 1)
    return Uses(micro_batches if strategy == "zero3" else 1, micro_batches)


def reduced(axes: Axes, buckets: Sequence[float]) -> list[Flow]:
    """ddp: every bucket of gradients once a step. buckets: bytes of each."""
    if not axes:
        return []
    return [Flow(axes, "all_reduce", sum(buckets) / len(buckets), len(buckets), "gradients")]


def sharded(
    shard: Axes, replicate: Axes, shards: int, groups: Sequence[Group], compute: int, reduce: int
) -> list[Flow]:
    """fully_shard over the axes `shard`, of `shards` ranks together, and copies over the axes `replicate`.

    compute, reduce: bytes of a gathered parameter and of a reduced gradient. Over copies a shard is reduced once.
    """
    flows = []
    for it in groups:
        if shard and it.numbers:
            gathered, scattered = it.groups * it.uses.gathers, it.groups * it.uses.reductions
            flows.append(Flow(shard, "all_gather", it.numbers * compute, gathered, f"parameters of {it.what}"))
            flows.append(Flow(shard, "reduce_scatter", it.numbers * reduce, scattered, f"gradients of {it.what}"))
        if replicate and it.numbers:
            size = it.numbers * reduce / shards
            flows.append(Flow(replicate, "all_reduce", size, it.groups, f"gradients of {it.what}"))
    return flows
