"""Count the communication of each technique: which collective, over which mesh axes, bytes and calls per step.

Here are a Flow, data parallelism (DDP's buckets, fully_shard, compression, parameter servers), and the few scalars that
every step sums over all ranks; what splits the model is in model_axes.py. The functions take sizes and counts only;
data_flows.py computes these from a run. tests/traffic compares every flow with what the trainer really sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from hpc_train.traffic.sharding import ZERO_STAGE, count_block_gathers, count_end_gathers, count_reductions
from hpc_train.units import MIB

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]


@dataclass(frozen=True)
class Flow:
    """All calls of one collective with one kind of content in a step, as every group of its axes makes them."""

    axes: tuple[str, ...]
    """Mesh axes whose ranks form the groups: ("tp",), or ("dp_shard", "cp") if both form one group; with expert
    parallelism ("ep",) and ("expert_shard",), into which dp_shard x cp is cut."""
    collective: Collective
    bytes: float
    """Size of one call as nccl-tests defines it. all_reduce, broadcast and reduce: the buffer; all_gather and
    reduce_scatter: all ranks' parts together; all_to_all: all that a rank sends, including its own part; send_recv: the
    message to the next rank of the axis."""
    calls: float
    """Calls per step; with a pipeline, on the stage that moves most bytes."""
    what: str
    """Content of the messages: gradients, parameters, activations, ..."""
    ring: bool = True
    """For send_recv: whether the last rank of the axis sends to the first (ring attention) or not (a pipeline)."""


FIRST_BUCKET_BYTES = 1 * MIB
"""Size of DistributedDataParallel's first bucket unless the user sets one: small, so that it is sent early.

torch calls it dist._DEFAULT_FIRST_BUCKET_BYTES; the 25 MiB below are the default of DistributedDataParallel's
bucket_cap_mb.
"""
BUCKET_MIB = 25
"""Size of the other buckets, and of fully_shard's groups if parameters stay gathered."""


def list_ddp_buckets(sizes: Iterable[float], limit_mib: float | None) -> list[float]:
    """Return the bytes of each bucket of DistributedDataParallel.

    sizes: bytes of every gradient, in the order in which they are ready. limit_mib: parallel.bucket_mib. The gradient
    that reaches the limit still belongs to the bucket, so buckets may be larger than the limit.
    """
    limits = [FIRST_BUCKET_BYTES, BUCKET_MIB * MIB] if limit_mib is None else [limit_mib * MIB]
    buckets: list[float] = []
    filled = 0.0
    for size in sizes:
        filled += size
        if filled >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(filled)
            filled = 0.0
    return [*buckets, filled] if filled else buckets


def count_fsdp_groups(block: float, blocks: int, ends: float, limit_mib: float | None) -> int:
    """Return the number of fully_shard groups if parameters stay gathered for the whole step.

    block: bytes of one block. ends: bytes of the parameters outside blocks. 0 means one group of everything, ends
    included. Otherwise each group is as many whole blocks as the limit has room for, and the ends are one more.
    """
    # Parameters that stay gathered gain nothing from one group per block: fewer, larger collectives are faster.
    limit = (BUCKET_MIB if limit_mib is None else limit_mib) * MIB
    if block * blocks + ends <= limit:
        return 0
    each = max(1, int(limit // block)) if block else blocks
    return -(-blocks // each)


Axes = tuple[str, ...]


@dataclass(frozen=True)
class ParameterUses:
    """How often in a step a group of parameters is gathered and its gradients are reduced."""

    gathers: int
    reductions: int


@dataclass(frozen=True)
class ShardGroup:
    """Equal groups of parameters; one collective gathers or reduces a group."""

    what: str
    numbers: float
    """Elements of one group on a tp rank, padded to equal shards; the mean if groups differ."""
    groups: int
    uses: ParameterUses
    eight_bits: float = 0.0
    """How many elements of `numbers` are gathered in 8 bits."""


def count_block_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> ParameterUses:
    """Count how often a step gathers and reduces each block. split: micro-batches whose backward is split."""
    zero = ZERO_STAGE[strategy]
    return ParameterUses(
        count_block_gathers(zero, reshard, pp, micro_batches, split), count_reductions(zero, micro_batches)
    )


def count_end_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> ParameterUses:
    """Count how often a step gathers and reduces the parameters outside blocks (embedding, last norm, head)."""
    zero = ZERO_STAGE[strategy]
    return ParameterUses(
        count_end_gathers(zero, reshard, pp, micro_batches, split), count_reductions(zero, micro_batches)
    )


def list_ddp_flows(axes: Axes, buckets: Sequence[float]) -> list[Flow]:
    """Return the flows of ddp, which all-reduces each bucket once per step. buckets: bytes of each."""
    if not axes:
        return []
    return [Flow(axes, "all_reduce", sum(buckets) / len(buckets), len(buckets), "gradients")]


def list_fsdp_flows(
    shard: Axes, replicate: Axes, shards: int, groups: Sequence[ShardGroup], compute: int, reduce: int
) -> list[Flow]:
    """Return the flows of fully_shard.

    shard: axes that parameters are sharded over, `shards` ranks in total. replicate: axes that hold copies of each
    shard. compute, reduce: bytes of one element of a gathered parameter, and of a gradient that is reduced.
    """
    flows = []
    for group in groups:
        if shard and group.numbers:
            gathered, scattered = group.groups * group.uses.gathers, group.groups * group.uses.reductions
            size = (group.numbers - group.eight_bits) * compute + group.eight_bits
            flows.append(Flow(shard, "all_gather", size, gathered, f"parameters of {group.what}"))
            flows.append(Flow(shard, "reduce_scatter", group.numbers * reduce, scattered, f"gradients of {group.what}"))
        if replicate and group.numbers:
            # HSDP reduces over the copies only in the last micro-batch, and only this rank's shard.
            size = group.numbers * reduce / shards
            flows.append(Flow(replicate, "all_reduce", size, group.groups, f"gradients of {group.what}"))
    return flows


_SCALE_BYTES = 8
"""Bytes of the largest gradient of a bucket, on which ranks agree before they cast the bucket to fp16."""


def list_cast_flows(axes: Axes, numbers: float, calls: int, scaled: bool) -> list[Flow]:
    """Return the flows of gradients that are cast to two bytes (fp16, bf16).

    numbers: elements of all gradients. calls: buckets. scaled: whether ranks agree on a scale first, as fp16 needs.
    """
    sent = [Flow(axes, "all_reduce", 2 * numbers / calls, calls, "gradients in two bytes")]
    return sent + ([Flow(axes, "all_reduce", _SCALE_BYTES, calls, "largest gradients")] if scaled else [])


def list_powersgd_flows(axes: Axes, shapes: Sequence[tuple[int, ...]], rank: int, calls: int, item: int) -> list[Flow]:
    """Return the flows of PowerSGD (Vogels et al. 2019, arXiv:1905.13727).

    Each matrix is sent as two factors with `rank` columns if these are smaller than the matrix; else it is sent whole.
    shapes: of all gradients. calls: buckets. item: bytes of an element.
    """
    first = second = 0
    for rows, *others in shapes:
        columns = math.prod(others)  # a tensor with more dimensions is compressed as a matrix [first, all others]
        if others and rank * (rows + columns) < rows * columns:
            first, second = first + rank * rows, second + rank * columns
        else:
            first += rows * columns
    sent = [Flow(axes, "all_reduce", first * item / calls, calls, "first factors")]
    return sent + ([Flow(axes, "all_reduce", second * item / calls, calls, "second factors")] if second else [])


def list_topk_flows(axes: Axes, numbers: float, ratio: float, ranks: int, calls: int, item: int) -> list[Flow]:
    """Return the flows of top-k compression: every rank gathers the largest gradients of all ranks and their indices.

    numbers: elements of all gradients. ratio: share that is sent. calls: buckets. item: bytes of a value.
    """
    each = max(1.0, ratio * numbers / calls) * ranks
    return [
        Flow(axes, "all_gather", each * item, calls, "largest gradients"),
        Flow(axes, "all_gather", each * 4, calls, "their places"),  # indices are int32
    ]


_ADAM_TENSORS = 3
"""Tensors that an asynchronous worker fetches and puts back for its update: parameters and AdamW's two moments."""


def list_server_flows(axes: Axes, mode: str, size: float, servers: int, ranks: int) -> list[Flow]:
    """Return the flows of parameter servers. size: bytes of all parameters.

    synchronous: every rank adds its gradient to each server's share and reads the new parameters.
    asynchronous: every rank reads the parameters, then fetches each share with its optimizer state and puts it back.
    peer: every rank reads the parameters of the ranks before and after it.
    parallel.server.hybrid, where one rank of a node does this for the whole node, is not taken into account.
    """
    if not axes:
        return []
    share = size / servers
    if mode == "peer":
        return [Flow(axes, "send_recv", size, min(2, ranks - 1), "parameters")]
    if mode == "synchronous":
        return [
            Flow(axes, "reduce", share, servers, "gradients"),
            Flow(axes, "broadcast", share, servers, "parameters"),
        ]
    return [
        Flow(axes, "reduce", _ADAM_TENSORS * share, servers, "parameters and optimizer state"),
        Flow(axes, "broadcast", (1 + _ADAM_TENSORS) * share, servers, "parameters and optimizer state"),
    ]


def list_scalar_flows(axes: tuple[str, ...], norm: bool) -> list[Flow]:
    """Return the small sums that every step makes. norm: whether the gradient norm needs a sum of its own."""
    if not axes:
        return []
    return [
        # Three int64 in one call (parallel.loss.StepTotals): targets, requests to stop, and the norm of the last step.
        Flow(axes, "all_reduce", 24, 1, "number of targets"),
        Flow(axes, "all_reduce", 8, 2 if norm else 1, "loss and gradient norm" if norm else "loss"),
    ]
