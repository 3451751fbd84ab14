"""The axis pp: what stages send to one another, and gradients of a tied embedding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hpc_train.traffic.flow import Flow

AXES = ("pp",)


def edges(placement: Sequence[int]) -> tuple[float, int]:
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


def between_stages(placement: Sequence[int], hidden: float, micro_batches: int) -> list[Flow]:
    """hidden: bytes of what goes from stage to stage with one micro-batch; its gradient takes as many back."""
    chain, rounds = edges(placement)
    flows = []
    for what in ("activations", "gradients of activations"):
        if chain:
            flows.append(Flow(AXES, "send_recv", hidden, chain * micro_batches, what, ring=False))
        if rounds:
            flows.append(Flow(AXES, "send_recv", hidden, rounds * micro_batches, what))
    return flows


def tied(size: float) -> list[Flow]:
    """The first and the last stage send each other their gradient of the embedding, of `size` bytes on a rank.

    Given as a round, of which only the step from the last rank to the first is really taken, both ways.
    """
    return [Flow(AXES, "send_recv", size, 1, "gradients of the tied embedding")]
