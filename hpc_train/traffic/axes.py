"""Flows of each technique: which collective, over which mesh axes, how many bytes in how many calls per step.

One section per technique, in the order of the mesh: data parallelism (DDP's buckets, compression, fully_shard,
parameter servers), tensor, context and pipeline parallelism, and the few scalars that every step sums over all ranks.
The functions take sizes and counts only; flows.py computes these from a run. tests/traffic compares every flow with
what the trainer really sends.
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
    """One kind of collective in a step, as every group of its axes runs it."""

    axes: tuple[str, ...]
    """Mesh axes whose ranks form the groups: ("tp",), or ("dp_shard", "cp") if both form one group."""
    collective: Collective
    bytes: float
    """Size of one call as nccl-tests defines it. all_reduce, broadcast and reduce: the buffer; all_gather and
    reduce_scatter: all ranks' parts together; all_to_all: all that a rank sends, including its own part; send_recv: the
    message to the next rank of the axis."""
    calls: float
    """Calls in a step; on a pipeline, those of the stage that makes most."""
    what: str
    """The content: gradients, parameters, activations, ..."""
    ring: bool = True
    """send_recv: whether the last rank of the axis sends to the first (ring attention) or not (a pipeline)."""


FIRST_BUCKET_BYTES = 1 * MIB
"""Size of DistributedDataParallel's first bucket if the user sets none: small, so that it is sent early."""
BUCKET_MIB = 25
"""Size of the other buckets, and of fully_shard's groups if parameters stay gathered."""


def ddp_buckets(sizes: Iterable[float], limit_mib: float | None) -> list[float]:
    """Return the bytes of each bucket of DistributedDataParallel.

    sizes: bytes of every gradient, in the order in which they are ready. limit_mib: parallel.bucket_mib. A bucket is
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
    """Return how many groups of whole blocks fully_shard gathers together if parameters stay gathered.

    block, ends: bytes of one block, and of the parameters in no block. 0: everything, ends included, is one group.
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
    """Equal groups of parameters; one collective gathers or reduces a group."""

    what: str
    numbers: float
    """Elements of one group on a tp rank, padded to equal shards; the mean if groups differ."""
    groups: int
    uses: ParameterUses


def count_block_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> ParameterUses:
    """Count how often blocks are gathered and reduced. split: micro-batches whose backward is split."""
    zero = ZERO_STAGE[strategy]
    return ParameterUses(
        count_block_gathers(zero, reshard, pp, micro_batches, split), count_reductions(zero, micro_batches)
    )


def count_end_uses(strategy: str, reshard: bool, pp: int, micro_batches: int, split: int = 0) -> ParameterUses:
    """Count how often the parameters in no block are gathered and reduced."""
    zero = ZERO_STAGE[strategy]
    return ParameterUses(
        count_end_gathers(zero, reshard, pp, micro_batches, split), count_reductions(zero, micro_batches)
    )


def ddp_flows(axes: Axes, buckets: Sequence[float]) -> list[Flow]:
    """Return the flows of ddp: each bucket of gradients once per step. buckets: bytes of each."""
    if not axes:
        return []
    return [Flow(axes, "all_reduce", sum(buckets) / len(buckets), len(buckets), "gradients")]


def fsdp_flows(
    shard: Axes, replicate: Axes, shards: int, groups: Sequence[ShardGroup], compute: int, reduce: int
) -> list[Flow]:
    """Return the flows of fully_shard over the axes `shard`, `shards` ranks in total, with replicas over `replicate`.

    compute, reduce: bytes of a gathered parameter and of a reduced gradient. A shard is reduced over replicas once.
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


_SCALE_BYTES = 8
"""Size of the largest gradient of a bucket, on which ranks agree before casting to fp16."""


def cast_flows(axes: Axes, numbers: float, calls: int, scaled: bool) -> list[Flow]:
    """Return the flows of gradients sent in two bytes each (fp16, bf16)."""
    sent = [Flow(axes, "all_reduce", 2 * numbers / calls, calls, "gradients in two bytes")]
    return sent + ([Flow(axes, "all_reduce", _SCALE_BYTES, calls, "largest gradients")] if scaled else [])


def powersgd_flows(axes: Axes, shapes: Sequence[tuple[int, ...]], rank: int, calls: int, item: int) -> list[Flow]:
    """Return the flows of PowerSGD: two factors of `rank` columns per matrix if they are smaller; the rest in full."""
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
    """Return the flows of top-k: every rank gathers the values of all ranks and their indices, four bytes each."""
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


_ADAM_TENSORS = 3
"""Parameters and AdamW's two moments, which a worker that updates by itself fetches and puts back."""


def server_flows(axes: Axes, mode: str, size: float, servers: int, ranks: int) -> list[Flow]:
    """Return the flows of parameter servers. size: bytes of all parameters.

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
        Flow(axes, "reduce", _ADAM_TENSORS * share, servers, "parameters and optimizer state"),
        Flow(axes, "broadcast", (1 + _ADAM_TENSORS) * share, servers, "parameters and optimizer state"),
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
    """Count the calls of a recomputed block. Recomputation stops before the last sum, whose result is not needed.

    With asynchronous tensor parallelism that sum is part of the product before it, whose input is needed.
    """
    if not sequence:
        return TensorCalls(reductions=1)
    return TensorCalls(gathers=2, scatters=2 if asynchronous else 1)


def count_end_calls(sequence: bool, vocabulary: bool) -> TensorCalls:
    """Count the calls of the embedding; the head has as many. vocabulary: whether they are split."""
    if vocabulary:
        return TensorCalls(gathers=1, scatters=1) if sequence else TensorCalls(reductions=1)
    return TensorCalls(gathers=1) if sequence else TensorCalls()


def tensor_flows(calls: TensorCalls, hidden: float, micro_batches: int) -> list[Flow]:
    """Return the flows of activations over tp. hidden: bytes of a micro-batch's hidden states (B, T, hidden)."""
    kinds = ((calls.gathers, "all_gather"), (calls.scatters, "reduce_scatter"), (calls.reductions, "all_reduce"))
    return [Flow(TENSOR_AXES, kind, hidden, count * micro_batches, "activations") for count, kind in kinds if count]  # type: ignore[arg-type]


def ring_tensor_flows(calls: TensorCalls, hidden: float, micro_batches: int, tp: int) -> list[Flow]:
    """Return the flows if products overlap with messages: each gather or scatter is a ring of pieces of a shard."""
    shard = hidden / tp
    pieces = max(1, min(_MOST_CHUNKS, int(shard // _CHUNK)))
    count = (calls.gathers + calls.scatters) * (tp - 1) * pieces * micro_batches
    return [Flow(TENSOR_AXES, "send_recv", shard / pieces, count, "activations")] if count else []


def loss_flows(tokens: float, item: int, micro_batches: int) -> list[Flow]:
    """Return the flows of the loss over a split vocabulary: largest logits, then normalisers and target logits.

    tokens: tokens of a micro-batch. item: bytes of a number in the loss.
    """
    return [
        Flow(TENSOR_AXES, "all_reduce", tokens * item, micro_batches, "largest logits"),
        Flow(TENSOR_AXES, "all_reduce", 2 * tokens * item, micro_batches, "sums of the loss"),
    ]


def gradient_flows(sizes: Sequence[int], item: int, reductions: int) -> list[Flow]:
    """Return the sums over tp of gradients of parameters that all ranks hold. sizes: elements, one call each."""
    if not sizes:
        return []
    mean = sum(sizes) * item / len(sizes)
    return [Flow(TENSOR_AXES, "all_reduce", mean, len(sizes) * reductions, "gradients of what is not split")]


def assign_kv_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[int, ...]:
    """List the key and value heads that the query heads of a rank attend to, each for equally many of them in turn.

    A head is listed more than once if there is no other way.
    """
    own = heads // ranks
    wanted = [(rank * own + head) * kv_heads // heads for head in range(own)]
    distinct = sorted(set(wanted))
    each = own // len(distinct)
    even = [head for head in distinct for _ in range(each)]
    return tuple(distinct if even == wanted else wanted)


CONTEXT_AXES = ("cp",)


def ring_attention_flows(cp: int, keys: float, item: int, forwards: int, backwards: int) -> list[Flow]:
    """Return the flows of ring attention (Liu et al. 2023, arXiv:2310.01889).

    keys: elements of the keys of a rank's positions; the values have as many. item: bytes of one; gradients travel in
    four bytes at least. forwards, backwards: attentions of a step, those that are recomputed counted as forwards.
    """
    gradient = max(item, 4)
    return [
        Flow(CONTEXT_AXES, "send_recv", 2 * keys * item, (cp - 1) * (forwards + backwards), "keys and values"),
        Flow(CONTEXT_AXES, "send_recv", 2 * keys * gradient, (cp - 1) * backwards, "gradients of keys and values"),
    ]


def ulysses_flows(queries: float, keys: float, item: int, passes: int) -> list[Flow]:
    """Return the flows of Ulysses: all-to-all around attention (Jacobs et al. 2023, arXiv:2309.14509).

    queries, keys: elements of each on a rank; heads that go to several ranks count as often as they are sent. passes:
    forwards and backwards of a step, each four exchanges: q, k, v and the result.
    """
    return [
        Flow(CONTEXT_AXES, "all_to_all", queries * item, 2 * passes, "queries and results"),
        Flow(CONTEXT_AXES, "all_to_all", keys * item, 2 * passes, "keys and values"),
    ]


PIPELINE_AXES = ("pp",)


def count_edges(placement: Sequence[int]) -> tuple[float, int]:
    """Count the messages of one micro-batch, one way: (between neighbouring ranks, from the last rank to the first).

    placement: the rank of each stage. The first number is a mean over the pp - 1 pairs of neighbours. A message from
    the last rank to the first is one of a round in which every rank sends to the next, so each such round is left out
    of the first number. A V-shaped placement sends twice between each pair of neighbours.
    """
    ranks = max(placement) + 1
    hops = [after - before for before, after in pairwise(placement) if after != before]
    wraps = sum(hop == 1 - ranks for hop in hops)
    between = (len(hops) - wraps) / (ranks - 1)
    if wraps > between:
        return len(hops) / (ranks - 1), 0
    return between - wraps, wraps


def stage_flows(placement: Sequence[int], hidden: float, micro_batches: int) -> list[Flow]:
    """Return the flows between stages. hidden: bytes of a micro-batch's activations; the gradients have as many."""
    chain, rounds = count_edges(placement)
    flows = []
    for what in ("activations", "gradients of activations"):
        if chain:
            flows.append(Flow(PIPELINE_AXES, "send_recv", hidden, chain * micro_batches, what, ring=False))
        if rounds:
            flows.append(Flow(PIPELINE_AXES, "send_recv", hidden, rounds * micro_batches, what))
    return flows


def tied_embedding_flows(size: float) -> list[Flow]:
    """Return the exchange of the tied embedding's gradients between first and last stage, `size` bytes on a rank.

    Counted as a ring round, of which only the message between the last and the first rank is sent, both ways.
    """
    return [Flow(PIPELINE_AXES, "send_recv", size, 1, "gradients of the tied embedding")]


def scalar_flows(axes: tuple[str, ...], norm: bool) -> list[Flow]:
    """Return the small sums of a step: targets beside stop requests and the last norm, loss, and a norm that needs one."""
    if not axes:
        return []
    return [
        Flow(axes, "all_reduce", 24, 1, "number of targets"),
        Flow(axes, "all_reduce", 8, 2 if norm else 1, "loss and gradient norm" if norm else "loss"),
    ]
