"""Count the communication of what splits the model: tensor, expert, context and pipeline parallelism.

One section per technique. The functions take sizes and counts only; model_flows.py computes these from a run,
and tests/traffic compares every flow with what the trainer really sends. Data parallelism is in axes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpc_train.traffic.axes import Flow

TENSOR_AXES = ("tp",)
MIN_CHUNK_BYTES = 1 << 18
"""Minimum bytes of a chunk in parallel/tensor/ring_exchange.py: below it, latency costs more than overlap gains."""
MAX_CHUNKS = 4
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


def count_recompute_calls(sequence: bool, asynchronous: bool, output_norms: bool) -> TensorCalls:
    """Count the additional calls of a block that is recomputed.

    torch stops recomputing when it has all that backward needs, which is before the last sum of the block. That sum
    cannot be left out where a norm of the block's result needs it, nor with asynchronous tensor parallelism, where it
    is one operator with the product before it.
    """
    if not sequence:
        return TensorCalls(reductions=2 if output_norms else 1)
    return TensorCalls(gathers=2, scatters=2 if asynchronous or output_norms else 1)


def count_half_block_calls(sequence: bool) -> TensorCalls:
    """Count the calls of attention alone, or of a mixture of experts alone, forward and backward."""
    return TensorCalls(gathers=2, scatters=2) if sequence else TensorCalls(reductions=2)


def count_half_recompute_calls(sequence: bool) -> TensorCalls:
    """Count the additional calls of an attention that is recomputed, with what follows it."""
    return TensorCalls(gathers=1, scatters=1) if sequence else TensorCalls(reductions=1)


def count_entry_calls(sequence: bool, blocks: int, recomputed: int) -> TensorCalls:
    """Count the calls that bring the input of the attention of `blocks` blocks to the heads of each rank, and back."""
    return TensorCalls(blocks + recomputed, blocks) if sequence else TensorCalls(reductions=blocks)


def count_last_recompute_calls(sequence: bool, output_norms: bool) -> TensorCalls:
    """Count the additional calls of a mixture of experts that is recomputed; see count_recompute_calls."""
    if not sequence:
        return TensorCalls(reductions=int(output_norms))
    return TensorCalls(gathers=1, scatters=int(output_norms))


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
    chunks = max(1, min(MAX_CHUNKS, int(shard // MIN_CHUNK_BYTES)))
    count = (calls.gathers + calls.scatters) * (tp - 1) * chunks * micro_batches
    return [Flow(TENSOR_AXES, "send_recv", shard / chunks, count, "activations")] if count else []


def list_norm_flows(tokens: float, item: int, passes: int) -> list[Flow]:
    """Return the sums over tp of the squares of queries and of keys, for norms over all heads.

    tokens: tokens of a micro-batch. item: bytes of an element. passes: forwards and backwards through attention in a
    step; a recomputed one counts as a forward.
    """
    return [Flow(TENSOR_AXES, "all_reduce", 2 * tokens * item, passes, "sums of squares of queries and keys")]


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
    heads_of_rank = heads // ranks
    wanted = [(rank * heads_of_rank + head) * kv_heads // heads for head in range(heads_of_rank)]
    distinct = sorted(set(wanted))
    each = heads_of_rank // len(distinct)
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
