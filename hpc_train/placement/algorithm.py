"""Which messages a collective is made of: what each formula of the cost stands for.

`nccl`: rings over the ranks of a group in rank order, which is the order NCCL numbers nodes in; its trees and its
NVLink SHARP change the constant, not the order that is best, and are NCCL's own choice. `gloo`: what torch's
ProcessGroupGloo runs, read in gloo's source and counted on a loopback device (bytes of 4 ranks and a buffer of 4 MiB):

    all_reduce       ring: reduce-scatter, then all-gather                   2 (n-1)/n of the buffer on an edge
    reduce_scatter   gloo: an all_reduce, of which each rank keeps a part    2 (n-1)/n     (6.01 buffers counted in all)
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

from hpc_train.traffic.flow import Flow

Backend = Literal["nccl", "gloo"]
Edges = Literal["ring", "chain", "star", "tree", "pairs"]


@dataclass(frozen=True)
class Phase:
    """Messages of one collective that are under way together."""

    edges: Edges
    fraction: float
    """Bytes on each edge, of the flow's bytes."""
    hops: int
    """Messages that wait for one another, each on the next edge; 1: the slowest edge alone decides."""
    round: int = 0
    """tree: the round, from 0."""


def phases(flow: Flow, ranks: int, backend: Backend) -> tuple[Phase, ...]:
    """The phases of one call in a group of `ranks` ranks, one after the other; none in a group of one."""
    if ranks == 1:
        return ()
    part = (ranks - 1) / ranks
    rounds = math.ceil(math.log2(ranks))
    ring = Phase("ring", part, ranks - 1)
    both = Phase("ring", 2 * part, 2 * (ranks - 1))
    pieces = Phase("chain", 1.0, ranks - 1)
    gloo = backend == "gloo"
    match flow.collective:
        case "all_reduce":
            return (both,)
        case "reduce_scatter":
            return (both,) if gloo else (ring,)
        case "all_gather":
            return (ring,)
        case "all_to_all":
            return (Phase("pairs", 1 / ranks, ranks - 1),)
        case "broadcast":
            return tuple(Phase("tree", 1.0, 1, number) for number in range(rounds)) if gloo else (pieces,)
        case "reduce":
            return (ring, Phase("star", 1 / ranks, 1)) if gloo else (pieces,)
        case "send_recv":
            return (Phase("ring" if flow.ring else "chain", 1.0, 1),)


def edge_indices(edges: Edges, ranks: int, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(from, to): indices within a group of every message of a phase; number: the round of a tree. Not for pairs."""
    all_ranks = np.arange(ranks)
    match edges:
        case "ring":
            return all_ranks, np.roll(all_ranks, -1)
        case "chain":
            return all_ranks[:-1], all_ranks[1:]
        case "star":
            return all_ranks[1:], np.zeros(ranks - 1, np.int64)
        case "tree":
            senders = np.arange(min(2**number, ranks - 2**number))
            return senders, senders + 2**number
        case "pairs":
            raise AssertionError("pairs are counted, not listed")
