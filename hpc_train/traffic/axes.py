"""Count the communication of each technique: which collective, over which mesh axes, bytes and calls per step.

One section per technique, in the order of the mesh: data parallelism (DDP's buckets, compression, fully_shard,
parameter servers), tensor, context and pipeline parallelism, and the few scalars that every step sums over all ranks.
The functions take sizes and counts only; flows.py computes these from a run. tests/traffic compares every flow with
what the trainer really sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    found: list[float] = []
    filled = 0.0
    for size in sizes:
        filled += size
        if filled >= limits[min(len(found), len(limits) - 1)]:
            found.append(filled)
            filled = 0.0
    return [*found, filled] if filled else found


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
            flows.append(Flow(shard, "all_gather", group.numbers * compute, gathered, f"parameters of {group.what}"))
            flows.append(Flow(shard, "reduce_scatter", group.numbers * reduce, scattered, f"gradients of {group.what}"))
        if replicate and group.numbers:
            # HSDP reduces over the copies only in the last micro-batch, and only this rank's shard.
            size = group.numbers * reduce / shards
            flows.append(Flow(replicate, "all_reduce", size, group.groups, f"gradients of {group.what}"))
    return flows


_SCALE_BYTES = 8
"""Bytes of the largest gradient of a bucket, on which ranks agree before they cast the bucket to fp16."""


def cast_flows(axes: Axes, numbers: float, calls: int, scaled: bool) -> list[Flow]:
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


TENSOR_AXES = ("tp",)
MIN_CHUNK_BYTES = 1 << 18
"""Minimum bytes of a chunk in parallel/tensor/ring_matmul.py: below it, latency costs more than overlap gains."""
MOST_CHUNKS = 4
"""Chunks that it cuts a shard into, at most, because small products run slowly."""


@dataclass(frozen=True)
class TensorCalls:
    """Number of collectives over activations in one micro-batch."""

    gathers: int = 0
    scatters: int = 0
    reductions: int = 0

    def __add__(self, other: TensorCalls) -> TensorCalls:
        gathers, scatters = self.gathers + other.gathers, self.scatters + other.scatters
        return TensorCalls(gathers, scatters, self.reductions + other.reductions)

    def times(self, count: int) -> TensorCalls:
        return TensorCalls(self.gathers * count, self.scatters * count, self.reductions * count)


def count_block_calls(sequence: bool) -> TensorCalls:
    """Count the calls of one block, forward and backward. sequence: whether tp splits positions.

    Attention and the feed-forward layer each sum once forward and once backward (Shoeybi et al. 2019,
    arXiv:1909.08053). With split positions, each sum becomes a gather before and a scatter after the layer pair.
    """
    return TensorCalls(gathers=4, scatters=4) if sequence else TensorCalls(reductions=4)


def count_recompute_calls(sequence: bool, asynchronous: bool) -> TensorCalls:
    """Count the additional calls of a block that is recomputed.

    torch stops recomputing when it has all that backward needs, which is before the last sum of the block. With
    asynchronous tensor parallelism that sum cannot be left out: it is one operator with the product before it.
    """
    if not sequence:
        return TensorCalls(reductions=1)
    return TensorCalls(gathers=2, scatters=2 if asynchronous else 1)


def count_half_block_calls(sequence: bool) -> TensorCalls:
    """Count the calls of attention alone, or of a mixture of experts alone, forward and backward."""
    return TensorCalls(gathers=2, scatters=2) if sequence else TensorCalls(reductions=2)


def count_half_recompute_calls(sequence: bool) -> TensorCalls:
    """Count the additional calls of an attention that is recomputed, with what follows it."""
    return TensorCalls(gathers=1, scatters=1) if sequence else TensorCalls(reductions=1)


def count_entry_calls(sequence: bool, blocks: int, recomputed: int) -> TensorCalls:
    """Count the calls that bring the input of the attention of `blocks` blocks to the heads of each rank, and back."""
    return TensorCalls(blocks + recomputed, blocks) if sequence else TensorCalls(reductions=blocks)


def count_last_recompute_calls(sequence: bool) -> TensorCalls:
    """Count the additional calls of a mixture of experts that is recomputed: all before its last sum."""
    return TensorCalls(gathers=1) if sequence else TensorCalls()


def count_end_calls(sequence: bool, vocabulary: bool) -> TensorCalls:
    """Count the calls of the embedding, or of the head, which has as many. vocabulary: whether tp splits them."""
    if vocabulary:
        return TensorCalls(gathers=1, scatters=1) if sequence else TensorCalls(reductions=1)
    return TensorCalls(gathers=1) if sequence else TensorCalls()


def list_tensor_flows(calls: TensorCalls, hidden: float, micro_batches: int) -> list[Flow]:
    """Return the flows of activations over tp. hidden: bytes of a micro-batch's hidden states (B, T, hidden)."""
    kinds = ((calls.gathers, "all_gather"), (calls.scatters, "reduce_scatter"), (calls.reductions, "all_reduce"))
    return [Flow(TENSOR_AXES, kind, hidden, count * micro_batches, "activations") for count, kind in kinds if count]  # type: ignore[arg-type]


def list_ring_tensor_flows(calls: TensorCalls, hidden: float, micro_batches: int, tp: int) -> list[Flow]:
    """Return the flows of asynchronous tensor parallelism, which sends chunks of each shard round a ring."""
    shard = hidden / tp
    chunks = max(1, min(MOST_CHUNKS, int(shard // MIN_CHUNK_BYTES)))
    count = (calls.gathers + calls.scatters) * (tp - 1) * chunks * micro_batches
    return [Flow(TENSOR_AXES, "send_recv", shard / chunks, count, "activations")] if count else []


def list_loss_flows(tokens: float, item: int, micro_batches: int) -> list[Flow]:
    """Return the flows of the cross-entropy over a split vocabulary.

    tokens: tokens of a micro-batch. item: bytes of an element of the loss.
    """
    return [
        Flow(TENSOR_AXES, "all_reduce", tokens * item, micro_batches, "largest logits"),
        # The sum of exponentials and the logit of the target, two numbers per token in one call.
        Flow(TENSOR_AXES, "all_reduce", 2 * tokens * item, micro_batches, "sums of the loss"),
    ]


def list_gradient_flows(sizes: Sequence[int], item: int, reductions: int) -> list[Flow]:
    """Return the sums over tp of the gradients of parameters that every tp rank holds whole.

    sizes: elements of each; one call each. item: bytes of an element. reductions: times per step.
    """
    if not sizes:
        return []
    mean = sum(sizes) * item / len(sizes)
    return [Flow(TENSOR_AXES, "all_reduce", mean, len(sizes) * reductions, "gradients of what is not split")]


def assign_kv_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[int, ...]:
    """List the key and value heads that one tp rank computes, for grouped-query attention.

    Attention gives every listed head the same number of consecutive query heads of the rank. If the rank's query heads
    do not divide that way, heads are listed once for each query head.
    """
    own = heads // ranks
    wanted = [(rank * own + head) * kv_heads // heads for head in range(own)]
    distinct = sorted(set(wanted))
    each = own // len(distinct)
    even = [head for head in distinct for _ in range(each)]
    return tuple(distinct if even == wanted else wanted)


EXPERT_AXES, EXPERT_SHARD_AXES = ("ep",), ("expert_shard",)
"""Parts of dp_shard x cp: ranks that share the experts of a layer, and ranks that hold the same ones."""


def list_expert_flows(rows: float, hidden: int, item: int, experts: int, forwards: int, backwards: int) -> list[Flow]:
    """Return the all-to-all of tokens to the ranks of their experts and back.

    rows: tokens of a rank's micro-batch times the experts of each. hidden: elements of a row. item: bytes of an
    element. forwards, backwards: passes through layers of experts in a step; a recomputed one counts as a forward.
    Bytes are the mean over ranks, which routing does not change if no token is dropped: a rank sends its own tokens
    one way, and those of others, as many as the routing brought it, the other way.
    """
    return [
        Flow(EXPERT_AXES, "all_to_all", experts * 8, forwards, "numbers of tokens"),
        Flow(EXPERT_AXES, "all_to_all", rows * hidden * item, 2 * (forwards + backwards), "tokens and results"),
    ]


CONTEXT_AXES = ("cp",)


def list_ring_attention_flows(messages: float, keys: float, item: int, forwards: int, backwards: int) -> list[Flow]:
    """Return the flows of ring attention (Liu et al. 2023, arXiv:2310.01889).

    messages: of a rank in a pass, cp - 1 without a window (ring_blocks.count_messages). keys: elements of the keys of a
    rank's positions; there are as many values. item: bytes of an element. forwards, backwards: passes through attention
    in a step; a recomputed one counts as a forward.
    """
    if not messages:
        return []
    # Gradients of keys and values are added up while they go round the ring, in fp32 at least.
    gradient = max(item, 4)
    return [
        Flow(CONTEXT_AXES, "send_recv", 2 * keys * item, messages * (forwards + backwards), "keys and values"),
        Flow(CONTEXT_AXES, "send_recv", 2 * keys * gradient, messages * backwards, "gradients of keys and values"),
    ]


def list_ulysses_flows(queries: float, keys: float, item: int, passes: int) -> list[Flow]:
    """Return the flows of Ulysses: all-to-all around attention (Jacobs et al. 2023, arXiv:2309.14509).

    queries, keys: elements on a rank; a head that is sent to several ranks counts once for each. passes: forwards and
    backwards of a step. Each pass exchanges queries, keys, values and the result.
    """
    return [
        Flow(CONTEXT_AXES, "all_to_all", queries * item, 2 * passes, "queries and results"),
        Flow(CONTEXT_AXES, "all_to_all", keys * item, 2 * passes, "keys and values"),
    ]


PIPELINE_AXES = ("pp",)


def count_edges(placement: Sequence[int]) -> tuple[float, int]:
    """Count the forward messages of one micro-batch: (messages between neighbours, whole rounds of the ring).

    placement: the rank of each stage. In a round every rank sends to the next and the last one to the first. The first
    number is what remains, as a mean over the pp - 1 pairs of neighbouring ranks: 1 for a plain pipeline, 2 for a
    V-shaped one.
    """
    ranks = max(placement) + 1
    hops = [after - before for before, after in pairwise(placement) if after != before]
    wraps = sum(hop == 1 - ranks for hop in hops)
    between = (len(hops) - wraps) / (ranks - 1)
    if wraps > between:  # a placement from a file may jump back more often than it goes forward
        return len(hops) / (ranks - 1), 0
    return between - wraps, wraps


def list_stage_flows(placement: Sequence[int], hidden: float, micro_batches: int) -> list[Flow]:
    """Return the flows of activations and their gradients between stages. hidden: bytes of either for a micro-batch."""
    chain, rounds = count_edges(placement)
    flows = []
    for what in ("activations", "gradients of activations"):
        if chain:
            flows.append(Flow(PIPELINE_AXES, "send_recv", hidden, chain * micro_batches, what, ring=False))
        if rounds:
            flows.append(Flow(PIPELINE_AXES, "send_recv", hidden, rounds * micro_batches, what))
    return flows


def list_tied_embedding_flows(size: float) -> list[Flow]:
    """Return the exchange of a tied embedding's gradients between the first and the last stage.

    size: bytes of the gradient on a rank. It counts as one round of the ring, although only the messages between the
    last and the first rank are sent.
    """
    return [Flow(PIPELINE_AXES, "send_recv", size, 1, "gradients of the tied embedding")]


def list_scalar_flows(axes: tuple[str, ...], norm: bool) -> list[Flow]:
    """Return the small sums that every step makes. norm: whether the gradient norm needs a sum of its own."""
    if not axes:
        return []
    return [
        # Three int64 in one call (parallel.loss.StepTotals): targets, requests to stop, and the norm of the last step.
        Flow(axes, "all_reduce", 24, 1, "number of targets"),
        Flow(axes, "all_reduce", 8, 2 if norm else 1, "loss and gradient norm" if norm else "loss"),
    ]
