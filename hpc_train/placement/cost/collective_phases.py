"""Say which messages a collective consists of, and in which phases, under nccl and under gloo.

`nccl`: rings over the ranks of a group in rank order, in which NCCL numbers nodes too; its trees and NVLink SHARP
change the constant, but not which order is best, and NCCL chooses them itself. `gloo`: the algorithms of torch's
ProcessGroupGloo, from gloo's source and checked by counting bytes on a loopback device (the numbers in parentheses are
buffers of 4 MiB, sent by 4 ranks together):

    all_reduce       ring: reduce-scatter, then all-gather                   2 (n-1)/n of the buffer on an edge
    reduce_scatter   gloo: an all_reduce, of which each rank keeps a part    2 (n-1)/n     (6.01 buffers counted in all)
                     inside one node: an all_to_all and a sum, ours          1/n
                     nccl: ring                                              (n-1)/n
    all_gather       ring                                                    (n-1)/n       (3.01)
    all_to_all       every pair                                              1/n           (3.00)
    broadcast        gloo: binomial tree from the first rank                 1             (3.00)
                     nccl: a chain, in pieces                                1
    reduce           gloo: ring reduce-scatter, all parts to the first rank  (n-1)/n, 1/n  (3.76)
                     nccl: a chain, in pieces                                1
    send_recv        to the next rank of the axis                            1
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpc_train.traffic.axes import Flow

Backend = Literal["nccl", "gloo"]
EdgeKind = Literal["ring", "chain", "star", "tree", "pairs"]
"""ring: to the next rank, from the last to the first; chain: without that last one; star: from all to the first; tree:
from those that have the data to as many more; pairs: from each to every other."""


@dataclass(frozen=True)
class CollectivePhase:
    """The messages of one collective that are sent at the same time."""

    edges: EdgeKind
    fraction: float
    """Bytes on each edge, of the flow's bytes."""
    hops: int
    """Messages that wait for one another, each on the next edge; 1: the slowest edge alone decides."""
    round: int = 0
    """tree: the round, from 0."""


def list_phases(flow: Flow, ranks: int, backend: Backend, *, inside: bool = False) -> tuple[CollectivePhase, ...]:
    """List the phases of one call in a group of `ranks` ranks, in order; none in a group of one.

    inside: every group is inside one node.
    """
    if ranks == 1:
        return ()
    part = (ranks - 1) / ranks
    rounds = math.ceil(math.log2(ranks))
    ring = CollectivePhase("ring", part, ranks - 1)
    # An all_reduce is a reduce-scatter and an all-gather: the ring is gone round twice.
    both = CollectivePhase("ring", 2 * part, 2 * (ranks - 1))
    # The messages of a rank go out one after the other, although to different ranks.
    pairs = CollectivePhase("pairs", 1 / ranks, ranks - 1)
    pieces = CollectivePhase("chain", 1.0, ranks - 1)
    gloo = backend == "gloo"
    match flow.collective:
        case "all_reduce":
            return (both,)
        case "reduce_scatter":
            exchanged = pairs if inside else both  # see parallel/reduce_scatter.py
            return (exchanged,) if gloo else (ring,)
        case "all_gather":
            return (ring,)
        case "all_to_all":
            return (pairs,)
        case "broadcast":
            return tuple(CollectivePhase("tree", 1.0, 1, number) for number in range(rounds)) if gloo else (pieces,)
        case "reduce":
            return (ring, CollectivePhase("star", 1 / ranks, 1)) if gloo else (pieces,)
        case "send_recv":
            return (CollectivePhase("ring" if flow.ring else "chain", 1.0, 1),)


def list_edges(edges: EdgeKind, ranks: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (from, to), indices within a group, of every message of a phase.

    number: the round of a tree. `pairs` are counted, never listed.
    """
    all_ranks = np.arange(ranks)
    match edges:
        case "ring":
            return all_ranks, np.roll(all_ranks, -1)
        case "chain":
            return all_ranks[:-1], all_ranks[1:]
        case "star":
            return all_ranks[1:], np.zeros(ranks - 1, np.int64)
        case "tree":
            # In each round all ranks that have the data pass it on to one more; the last round may have fewer to reach.
            senders = np.arange(min(2**number, ranks - 2**number))
            return senders, senders + 2**number
        case "pairs":
            raise AssertionError("pairs are counted, not listed")
