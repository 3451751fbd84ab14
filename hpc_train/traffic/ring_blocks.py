"""Compute which keys the ranks of ring attention see: the blocks of each rank, and the messages that a window saves.

A sequence is cut into chunks: one for each rank, or in balanced order two, of which rank r has chunks r and
2 cp - 1 - r. A window of w lets a query see its own position and the w - 1 before it. This is known before the first
message, so ranks exchange only keys that some query sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class ChunkPair:
    """A chunk of queries of one rank and a chunk of keys of another, both of the same length."""

    query: int
    """Index of the chunk among the rank's own: 0 or 1."""
    key: int
    """Index of the chunk among the other rank's own."""
    back: int
    """Positions from the first key to the first query."""


@dataclass(frozen=True)
class RingLayout:
    """How the positions of a sequence are spread over the ranks of a ring."""

    ranks: int
    length: int
    """Positions of a rank."""
    balanced: bool

    @property
    def chunk(self) -> int:
        """Positions of a chunk."""
        return self.length // 2 if self.balanced else self.length

    def list_chunks(self, rank: int) -> tuple[int, ...]:
        """List the chunks of a rank, in their order in the sequence."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    def list_pairs(self, rank: int, source: int, window: int | None) -> tuple[ChunkPair, ...]:
        """List the pairs of chunks in which a causal query of `rank` sees a key of `source`.

        window: positions that a query sees; None: all up to its own.
        """
        pairs = []
        for i, query in enumerate(self.list_chunks(rank)):
            for j, key in enumerate(self.list_chunks(source)):
                back = (query - key) * self.chunk
                nearest = max(0, back - self.chunk + 1)  # distance of the first query from the last key
                if key <= query and (window is None or nearest < window):
                    pairs.append(ChunkPair(i, j, back))
        return tuple(pairs)

    def list_shifts(self, window: int) -> tuple[int, ...]:
        """List the distances d > 0 at which some rank r sees keys of rank r - d: the messages of a pass."""
        ranks = range(self.ranks)
        return tuple(
            shift for shift in ranks[1:] if any(self.list_pairs(r, (r - shift) % self.ranks, window) for r in ranks)
        )


@lru_cache(maxsize=1024)
def count_messages(layout: RingLayout, window: int | None) -> float:
    """Return how many messages a rank sends in one pass of ring attention, on average over ranks."""
    if window is None:
        return layout.ranks - 1
    pairs = [(r, s) for r in range(layout.ranks) for s in range(layout.ranks) if r != s]
    return sum(bool(layout.list_pairs(r, s, window)) for r, s in pairs) / layout.ranks
