"""A fused matrix over ranks: what each stores, and where that is in the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.errors import UserError
from hpc_train.shard_rectangles import FusedParts


def lay_out(parts: FusedParts) -> list[int]:
    """The indices in the whole in the order in which ranks store them: rank by rank, part by part."""
    begins = np.cumsum([0, *parts.sizes[:-1]])
    order = []
    for rank in range(parts.ranks):
        for begin, size in zip(begins, parts.sizes, strict=True):
            share = size // parts.ranks
            order += range(begin + rank * share, begin + (rank + 1) * share)
    return order


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4), st.data())
def test_runs_of_a_range_are_what_the_ranks_store(shares: list[int], ranks: int, data: st.DataObject) -> None:
    parts = FusedParts(0, tuple(share * ranks for share in shares), ranks)
    begin = data.draw(st.integers(0, parts.total))
    length = data.draw(st.integers(0, parts.total - begin))
    found = [0] * length
    for stored, first, run in parts.list_runs(begin, length):
        found[stored - begin : stored - begin + run] = range(first, first + run)
    assert found == lay_out(parts)[begin : begin + length]


def test_rectangles_of_q_k_and_v() -> None:
    parts = FusedParts(1, (8, 4, 4), 2)
    assert parts.find_rectangles((3, 8), (2, 8)) == [
        (0, (3, 4), (2, 4)),
        (4, (3, 10), (2, 2)),
        (6, (3, 14), (2, 2)),
    ]
    # Half of the second rank's part, as fully_shard leaves it.
    assert parts.find_rectangles((0, 10), (5, 3)) == [(0, (0, 6), (5, 2)), (2, (0, 10), (5, 1))]


def test_optimizer_state_with_an_entry_for_a_block() -> None:
    parts = FusedParts(1, (128, 64, 64), 2)
    assert parts.fit((7, 256)) == parts
    assert parts.fit((7, 8)) == FusedParts(1, (4, 2, 2), 2)
    assert parts.fit((7, 1)) is None
    assert parts.fit(()) is None
    with pytest.raises(UserError, match="one entry for 64 numbers, which would be of two parts of a fused matrix over"):
        parts.fit((7, 4))
