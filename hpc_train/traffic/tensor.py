"""The axis tp: activations between split layers, of the loss, and gradients of what is not split.

The calls are those of parallel/tensor: Megatron's f and g (Shoeybi et al. 2019, arXiv:1909.08053), with split positions
those of Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.traffic.flow import Flow

AXES = ("tp",)
_CHUNK, _MOST_CHUNKS = 1 << 18, 4
"""Bytes and number of the pieces in which parallel/tensor/ring_matmul.py sends a shard."""


@dataclass(frozen=True)
class Calls:
    """Collectives over activations, of one micro-batch."""

    gathers: int = 0
    scatters: int = 0
    reductions: int = 0

    def __add__(self, other: Calls) -> Calls:
        gathers, scatters = self.gathers + other.gathers, self.scatters + other.scatters
        return Calls(gathers, scatters, self.reductions + other.reductions)

    def times(self, count: int) -> Calls:
        return Calls(self.gathers * count, self.scatters * count, self.reductions * count)


def block_calls(sequence: bool) -> Calls:
    """Of a block, forward and backward: into and out of attention, and of the feed-forward layer."""
    return Calls(gathers=4, scatters=4) if sequence else Calls(reductions=4)


def again_calls(sequence: bool, asynchronous: bool) -> Calls:
    """Of the recomputation of a block, which stops before the sum at its end, whose result nothing needs.

    Asynchronous, that sum is one with the product before it, whose input is needed.
    """
    if not sequence:
        return Calls(reductions=1)
    return Calls(gathers=2, scatters=2 if asynchronous else 1)


def end_calls(sequence: bool, vocabulary: bool) -> Calls:
    """Of the embedding, and as many of the head; vocabulary: they are split."""
    if vocabulary:
        return Calls(gathers=1, scatters=1) if sequence else Calls(reductions=1)
    return Calls(gathers=1) if sequence else Calls()


def exchanges(calls: Calls, hidden: float, micro_batches: int) -> list[Flow]:
    """hidden: bytes of all positions of a micro-batch, (B, T, hidden)."""
    kinds = ((calls.gathers, "all_gather"), (calls.scatters, "reduce_scatter"), (calls.reductions, "all_reduce"))
    return [Flow(AXES, kind, hidden, count * micro_batches, "activations") for count, kind in kinds if count]  # type: ignore[arg-type]


def ring_exchanges(calls: Calls, hidden: float, micro_batches: int, tp: int) -> list[Flow]:
    """The same where products overlap with messages: each gather and scatter is a ring, a few pieces a shard."""
    shard = hidden / tp
    pieces = max(1, min(_MOST_CHUNKS, int(shard // _CHUNK)))
    count = (calls.gathers + calls.scatters) * (tp - 1) * pieces * micro_batches
    return [Flow(AXES, "send_recv", shard / pieces, count, "activations")] if count else []


def loss_sums(tokens: float, item: int, micro_batches: int) -> list[Flow]:
    """A split vocabulary's cross entropy: the largest logit, then the normaliser and the logit of the target.

    tokens: of a micro-batch; item: bytes of what losses are computed in.
    """
    return [
        Flow(AXES, "all_reduce", tokens * item, micro_batches, "largest logits"),
        Flow(AXES, "all_reduce", 2 * tokens * item, micro_batches, "sums of the loss"),
    ]


def gradient_sums(sizes: Sequence[int], item: int, reductions: int) -> list[Flow]:
    """Gradients of parameters that all ranks hold, one call for each; sizes: their numbers of elements."""
    if not sizes:
        return []
    mean = sum(sizes) * item / len(sizes)
    return [Flow(AXES, "all_reduce", mean, len(sizes) * reductions, "gradients of what is not split")]
