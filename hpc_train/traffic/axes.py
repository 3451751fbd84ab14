"""Traffic of each mesh axis in one step, as Flows: which collective, over which axes, how many bytes in how many calls.

One section a technique, in the order of the mesh: data parallelism (DDP's buckets, what compression makes of them, what
fully_shard gathers and reduces, parameter servers), tensor, context and pipeline parallelism, and the few bytes that
every step sums over all ranks. Each function takes sizes and counts only; traffic.flows takes these from a run.
tests/traffic compares every one with what the trainer really sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from hpc_train.traffic.sharding import ZERO_STAGE, count_block_gathers, count_end_gathers, count_reductions
from hpc_train.units import MIB

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]


@dataclass(frozen=True)
class Flow:
    """One kind of collective of one step, as every group of an axis runs it."""

    axes: tuple[str, ...]
    """Mesh axes whose ranks form the groups: ("tp",), or ("dp_shard", "cp") where both are one group."""
    collective: Collective
    bytes: float
    """Of one call, by the definition of nccl-tests: all_reduce, broadcast and reduce: the buffer; all_gather and
    reduce_scatter: the whole of it, all ranks' parts together; all_to_all: what a rank sends in all, its own part
    counted; send_recv: the message to the next rank of the axis."""
    calls: float
    """Of one step; on a pipeline, the most that any stage makes."""
    what: str
    """What is moved: gradients, parameters, activations, ..."""
    ring: bool = True
    """send_recv: whether the last rank of the axis sends to the first (ring attention) or not (a pipeline)."""


FIRST_BUCKET_BYTES = 1 * MIB
"""Bytes of the first bucket of DistributedDataParallel where the user names no size, so that it leaves early."""
BUCKET_MIB = 25
"""MiB of the others, and of what fully_shard groups where parameters stay gathered."""


def ddp_buckets(sizes: Iterable[float], limit_mib: float | None) -> list[float]:
    """Bytes of each bucket of DistributedDataParallel.

    sizes: bytes of every gradient in the order in which they are ready. limit_mib: parallel.bucket_mib. A bucket is
    closed by the gradient that fills it.
    """
    limits = [FIRST_BUCKET_BYTES, BUCKET_MIB * MIB] if limit_mib is None else [limit_mib * MIB]
    found: list[float] = []
    filled = 0.0
    for size in sizes:
        filled += size
        if filled >= limits[min(len(found), len(limits) - 1)]:
            found.append(filled)
            filled = 0.0
    return [*found, filled] if filled else found


def fsdp_groups(block: float, blocks: int, ends: float, limit_mib: float | None) -> int:
    """Groups of whole blocks that fully_shard gathers together, of a part of the model whose parameters stay gathered.

    block, ends: bytes of one block and of what is in none. 0: everything is one group, together with the ends.
    """
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
    """Groups of parameters that are alike: each is gathered, and reduced, by one collective."""

    what: str
    numbers: float
    """Of one such group: what one rank of tp holds, filled up to equal shards; the mean where groups differ."""
    groups: int
    uses: ParameterUses


def count_block_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> ParameterUses:
    """Count the uses of the parameters of blocks. split: micro-batches whose backward is split."""
    zero = ZERO_STAGE[strategy]
    return ParameterUses(
        count_block_gathers(zero, reshard, pp, micro_batches, split), count_reductions(zero, micro_batches)
    )


def count_end_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> ParameterUses:
    """Count the uses of the parameters in no block."""
    zero = ZERO_STAGE[strategy]
    return ParameterUses(
        count_end_gathers(zero, reshard, pp, micro_batches, split), count_reductions(zero, micro_batches)
    )


def ddp_flows(axes: Axes, buckets: Sequence[float]) -> list[Flow]:
    """Return ddp's flows: every bucket of gradients once a step. buckets: bytes of each."""
    if not axes:
        return []
    return [Flow(axes, "all_reduce", sum(buckets) / len(buckets), len(buckets), "gradients")]


def fsdp_flows(
    shard: Axes, replicate: Axes, shards: int, groups: Sequence[ShardGroup], compute: int, reduce: int
) -> list[Flow]:
    """fully_shard over the axes `shard`, of `shards` ranks together, and copies over the axes `replicate`.

    compute, reduce: bytes of a gathered parameter and of a reduced gradient. Over copies a shard is reduced once.
    """
    flows = []
    for group in groups:
        if shard and group.numbers:
            gathered, scattered = group.groups * group.uses.gathers, group.groups * group.uses.reductions
            flows.append(Flow(shard, "all_gather", group.numbers * compute, gathered, f"parameters of {group.what}"))
            flows.append(Flow(shard, "reduce_scatter", group.numbers * reduce, scattered, f"gradients of {group.what}"))
        if replicate and group.numbers:
            size = group.numbers * reduce / shards
            flows.append(Flow(replicate, "all_reduce", size, group.groups, f"gradients of {group.what}"))
    return flows


_SCALE = 8
"""Bytes in which ranks agree on the largest gradient of a bucket, for fp16."""


def cast_flows(axes: Axes, numbers: float, calls: int, scaled: bool) -> list[Flow]:
    """Return the flows of gradients sent in two bytes each (fp16, bf16)."""
    sent = [Flow(axes, "all_reduce", 2 * numbers / calls, calls, "gradients in two bytes")]
    return sent + ([Flow(axes, "all_reduce", _SCALE, calls, "largest gradients")] if scaled else [])


def powersgd_flows(axes: Axes, shapes: Sequence[tuple[int, ...]], rank: int, calls: int, item: int) -> list[Flow]:
    """Return PowerSGD's flows: two products a matrix, of `rank` columns, if they are less than it; all else in full."""
    first = second = 0
    for rows, *others in shapes:
        columns = _product(others)
        if others and rank * (rows + columns) < rows * columns:
            first, second = first + rank * rows, second + rank * columns
        else:
            first += rows * columns
    sent = [Flow(axes, "all_reduce", first * item / calls, calls, "first factors")]
    return sent + ([Flow(axes, "all_reduce", second * item / calls, calls, "second factors")] if second else [])


def topk_flows(axes: Axes, numbers: float, ratio: float, ranks: int, calls: int, item: int) -> list[Flow]:
    """Return the flows of top-k: every rank gathers the values of all and, in four bytes, their places."""
    each = max(1.0, ratio * numbers / calls) * ranks
    return [
        Flow(axes, "all_gather", each * item, calls, "largest gradients"),
        Flow(axes, "all_gather", each * 4, calls, "their places"),
    ]


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


_ADAM = 3
"""Parameters and the two moments of AdamW: what a worker fetches and puts back where it updates by itself."""


def server_flows(axes: Axes, mode: str, size: float, servers: int, ranks: int) -> list[Flow]:
    """size: bytes of all parameters.

    synchronous: every rank adds its gradient to each server's share and reads the new parameters. asynchronous: it
    reads the parameters, then fetches each share with its state and puts it back. peer: it reads the parameters of the
    ranks before and after it. `parallel.server.hybrid` lets one rank of a node do it for all; not counted.
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
        Flow(axes, "reduce", _ADAM * share, servers, "parameters and optimizer state"),
        Flow(axes, "broadcast", (1 + _ADAM) * share, servers, "parameters and optimizer state"),
    ]


TENSOR_AXES = ("tp",)
_CHUNK, _MOST_CHUNKS = 1 << 18, 4
"""Bytes and number of the pieces in which parallel/tensor/ring_matmul.py sends a shard."""


@dataclass(frozen=True)
class TensorCalls:
    """Collectives over activations, of one micro-batch."""

    gathers: int = 0
    scatters: int = 0
    reductions: int = 0

    def __add__(self, other: TensorCalls) -> TensorCalls:
        gathers, scatters = self.gathers + other.gathers, self.scatters + other.scatters
        return TensorCalls(gathers, scatters, self.reductions + other.reductions)

    def times(self, count: int) -> TensorCalls:
        return TensorCalls(self.gathers * count, self.scatters * count, self.reductions * count)


def count_block_calls(sequence: bool) -> TensorCalls:
    """Count the calls of a block, forward and backward: around attention and around the feed-forward layer."""
    return TensorCalls(gathers=4, scatters=4) if sequence else TensorCalls(reductions=4)


def count_recompute_calls(sequence: bool, asynchronous: bool) -> TensorCalls:
    """Count the calls of a recomputed block, which stops before the sum at its end: nothing needs its result.

    Asynchronous, that sum is one with the product before it, whose input is needed.
    """
    if not sequence:
        return TensorCalls(reductions=1)
    return TensorCalls(gathers=2, scatters=2 if asynchronous else 1)


def count_end_calls(sequence: bool, vocabulary: bool) -> TensorCalls:
    """Count the calls of the embedding, and as many of the head; vocabulary: they are split."""
    if vocabulary:
        return TensorCalls(gathers=1, scatters=1) if sequence else TensorCalls(reductions=1)
    return TensorCalls(gathers=1) if sequence else TensorCalls()


def tensor_flows(calls: TensorCalls, hidden: float, micro_batches: int) -> list[Flow]:
    """hidden: bytes of all positions of a micro-batch, (B, T, hidden)."""
    kinds = ((calls.gathers, "all_gather"), (calls.scatters, "reduce_scatter"), (calls.reductions, "all_reduce"))
    return [Flow(TENSOR_AXES, kind, hidden, count * micro_batches, "activations") for count, kind in kinds if count]  # type: ignore[arg-type]


def ring_tensor_flows(calls: TensorCalls, hidden: float, micro_batches: int, tp: int) -> list[Flow]:
    """Return the flows if products overlap with messages: each gather and scatter is a ring, a few pieces a shard."""
    shard = hidden / tp
    pieces = max(1, min(_MOST_CHUNKS, int(shard // _CHUNK)))
    count = (calls.gathers + calls.scatters) * (tp - 1) * pieces * micro_batches
    return [Flow(TENSOR_AXES, "send_recv", shard / pieces, count, "activations")] if count else []


def loss_flows(tokens: float, item: int, micro_batches: int) -> list[Flow]:
    """A split vocabulary's cross entropy: the largest logit, then the normaliser and the logit of the target.

    tokens: of a micro-batch; item: bytes of what losses are computed in.
    """
    return [
        Flow(TENSOR_AXES, "all_reduce", tokens * item, micro_batches, "largest logits"),
        Flow(TENSOR_AXES, "all_reduce", 2 * tokens * item, micro_batches, "sums of the loss"),
    ]


def gradient_flows(sizes: Sequence[int], item: int, reductions: int) -> list[Flow]:
    """Gradients of parameters that all ranks hold, one call for each; sizes: their numbers of elements."""
    if not sizes:
        return []
    mean = sum(sizes) * item / len(sizes)
    return [Flow(TENSOR_AXES, "all_reduce", mean, len(sizes) * reductions, "gradients of what is not split")]


def assign_kv_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[int, ...]:
    """The key and value heads that the query heads of a rank attend to, each for equally many of them in turn.

    One is listed again where that is the only way.
    """
    own = heads // ranks
    wanted = [(rank * own + head) * kv_heads // heads for head in range(own)]
    distinct = sorted(set(wanted))
    each = own // len(distinct)
    even = [head for head in distinct for _ in range(each)]
    return tuple(distinct if even == wanted else wanted)


CONTEXT_AXES = ("cp",)


def ring_attention_flows(cp: int, keys: float, item: int, forwards: int, backwards: int) -> list[Flow]:
    """Ring attention (Liu et al. 2023, arXiv:2310.01889).

    keys: numbers in the keys of a rank's positions, and as many in the values. item: bytes of one; gradients travel in
    four bytes at least. forwards, backwards: attentions of a step, those that are recomputed counted as forwards.
    """
    gradient = max(item, 4)
    return [
        Flow(CONTEXT_AXES, "send_recv", 2 * keys * item, (cp - 1) * (forwards + backwards), "keys and values"),
        Flow(CONTEXT_AXES, "send_recv", 2 * keys * gradient, (cp - 1) * backwards, "gradients of keys and values"),
    ]


def ulysses_flows(queries: float, keys: float, item: int, passes: int) -> list[Flow]:
    """All-to-all around attention (Jacobs et al. 2023, arXiv:2309.14509).

    queries, keys: numbers in what a rank has of each, heads that go to several ranks as often as they go. passes:
    forwards and backwards of a step, each four exchanges: q, k, v and the result.
    """
    return [
        Flow(CONTEXT_AXES, "all_to_all", queries * item, 2 * passes, "queries and results"),
        Flow(CONTEXT_AXES, "all_to_all", keys * item, 2 * passes, "keys and values"),
    ]


PIPELINE_AXES = ("pp",)


def count_edges(placement: Sequence[int]) -> tuple[float, int]:
    """(messages between neighbouring ranks, messages from the last rank to the first) of one micro-batch, one way.

    placement: the rank of each stage. The first is a mean over the pp - 1 pairs of neighbours; it leaves out one for
    each round of the second, in which every rank sends to the next. A V sends twice over each pair of neighbours.
    """
    ranks = max(placement) + 1
    hops = [after - before for before, after in pairwise(placement) if after != before]
    wraps = sum(hop == 1 - ranks for hop in hops)
    between = (len(hops) - wraps) / (ranks - 1)
    if wraps > between:
        return len(hops) / (ranks - 1), 0
    return between - wraps, wraps


def stage_flows(placement: Sequence[int], hidden: float, micro_batches: int) -> list[Flow]:
    """hidden: bytes of what goes from stage to stage with one micro-batch; its gradient takes as many back."""
    chain, rounds = count_edges(placement)
    flows = []
    for what in ("activations", "gradients of activations"):
        if chain:
            flows.append(Flow(PIPELINE_AXES, "send_recv", hidden, chain * micro_batches, what, ring=False))
        if rounds:
            flows.append(Flow(PIPELINE_AXES, "send_recv", hidden, rounds * micro_batches, what))
    return flows


def tied_embedding_flows(size: float) -> list[Flow]:
    """The first and the last stage send each other their gradient of the embedding, of `size` bytes on a rank.

    Given as a round, of which only the step from the last rank to the first is really taken, both ways.
    """
    return [Flow(PIPELINE_AXES, "send_recv", size, 1, "gradients of the tied embedding")]


def scalar_flows(axes: tuple[str, ...], norm: bool) -> list[Flow]:
    """The number of targets and of ranks asked to stop, the loss, and the gradient norm where it is not known."""
    if not axes:
        return []
    return [
        Flow(axes, "all_reduce", 16, 1, "number of targets"),
        Flow(axes, "all_reduce", 8, 2 if norm else 1, "loss and gradient norm" if norm else "loss"),
    ]
