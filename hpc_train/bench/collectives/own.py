"""Ring and binomial tree all-reduce of our own, over any backend's point to point messages.

So that ring and tree can be compared where a library does not let a program choose. Neither is cut into segments:
a library's own can be faster.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Wire(Protocol):
    """Messages between the ranks of one group."""

    size: int
    index: int
    """Of this rank in the group."""

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
        """Send and receive at the same time; returns when both are done. None: only the other."""


def ring_all_reduce(wire: Wire, buffer: Tensor, scratch: Tensor) -> None:
    """Add up `buffer` (n,) over the ranks, in place: reduce-scatter, then all-gather, around a ring.

    scratch: at least ceil(n / ranks) elements. 2 (ranks - 1) steps of n / ranks elements.
    Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 4.
    """
    ranks, me = wire.size, wire.index
    parts, to, source = buffer.tensor_split(ranks), (me + 1) % ranks, (me - 1) % ranks
    for step in range(ranks - 1):
        mine = parts[(me - step - 1) % ranks]
        incoming = scratch[: mine.numel()]
        wire.exchange(parts[(me - step) % ranks], to, incoming, source)
        mine += incoming
    for step in range(ranks - 1):
        wire.exchange(parts[(me + 1 - step) % ranks], to, parts[(me - step) % ranks], source)


def tree_all_reduce(wire: Wire, buffer: Tensor, scratch: Tensor) -> None:
    """Add up `buffer` (n,) over the ranks, in place: binomial trees up to the first rank and down again.

    scratch: at least n elements. 2 ceil(log2 ranks) steps of n elements.
    Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005.
    """
    ranks, me = wire.size, wire.index
    strides = [1 << bit for bit in range((ranks - 1).bit_length())]
    for stride in strides:
        if me % (2 * stride) == stride:
            wire.exchange(buffer, me - stride, None, me)
        elif me % (2 * stride) == 0 and me + stride < ranks:
            incoming = scratch[: buffer.numel()]
            wire.exchange(None, me, incoming, me + stride)
            buffer += incoming
    for stride in reversed(strides):
        if me % (2 * stride) == stride:
            wire.exchange(None, me, buffer, me - stride)
        elif me % (2 * stride) == 0 and me + stride < ranks:
            wire.exchange(buffer, me + stride, None, me)


OWN = {"ring": ring_all_reduce, "tree": tree_all_reduce}
