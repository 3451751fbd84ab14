"""Messages between ranks of any size arrive complete."""

from __future__ import annotations

from hpc_train.checkpoint.rank_consensus import gather_and_decide, run_on_rank_0
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

SIZES = (0, 1, 900, *range(1000, 1020), 5000, 100_000)
"""Bytes: some fit into one message, some just do not."""


def exchanged(world: World) -> list[tuple[list[bytes], bytes]]:
    """Of each size what all ranks have told, and what the first has."""
    return [
        (
            gather_and_decide(world, lambda of=size: bytes([world.rank]) * of * (world.rank + 1), list),  # type: ignore[misc]
            run_on_rank_0(world, lambda of=size: b"x" * of),  # type: ignore[misc]
        )
        for size in SIZES
    ]


def test_of_any_size() -> None:
    for found in run_ranks(exchanged, 3):
        for size, (of_all, of_first) in zip(SIZES, found, strict=True):
            assert of_all == [bytes([rank]) * size * (rank + 1) for rank in range(3)]
            assert of_first == b"x" * size
