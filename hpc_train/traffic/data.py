"""The data-parallel axes: gradients, and what the zero strategies gather (Rajbhandari et al. 2020, arXiv:1910.02054).

Volumes are those of parallel/zero/shard.py, by the rule of parallel/support/sharding.py, and of
parallel/ddp/replicate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.parallel.support.sharding import ZERO, block_gathers, end_gathers, reductions
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


def block_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> Uses:
    """Count the uses of the parameters of blocks. split: micro-batches whose backward is split."""
    zero = ZERO[strategy]
    return Uses(block_gathers(zero, reshard, pp, micro_batches, split), reductions(zero, micro_batches))


def end_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> Uses:
    """Count the uses of the parameters in no block."""
    zero = ZERO[strategy]
    return Uses(end_gathers(zero, reshard, pp, micro_batches, split), reductions(zero, micro_batches))


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
