"""What is sent of ddp's gradients where they are compressed (parallel/ddp/compression), after its warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.traffic.flow import Flow

Axes = tuple[str, ...]
_SCALE = 8
"""Bytes in which ranks agree on the largest gradient of a bucket, for fp16."""


def cast(axes: Axes, numbers: float, calls: int, scaled: bool) -> list[Flow]:
    """fp16, bf16: every number in two bytes."""
    sent = [Flow(axes, "all_reduce", 2 * numbers / calls, calls, "gradients in two bytes")]
    return sent + ([Flow(axes, "all_reduce", _SCALE, calls, "largest gradients")] if scaled else [])


def powersgd(axes: Axes, shapes: Sequence[tuple[int, ...]], rank: int, calls: int, item: int) -> list[Flow]:
    """Two products a matrix, of `rank` columns, where they are less than the matrix; all else in full."""
    first = second = 0
    for rows, *others in shapes:
        columns = _product(others)
        if others and rank * (rows + columns) < rows * columns:
            first, second = first + rank * rows, second + rank * columns
        else:
            first += rows * columns
    sent = [Flow(axes, "all_reduce", first * item / calls, calls, "first factors")]
    return sent + ([Flow(axes, "all_reduce", second * item / calls, calls, "second factors")] if second else [])


def topk(axes: Axes, numbers: float, ratio: float, ranks: int, calls: int, item: int) -> list[Flow]:
    """Values and, in four bytes, where they belong: every rank gathers those of all."""
    each = max(1.0, ratio * numbers / calls) * ranks
    return [
        Flow(axes, "all_gather", each * item, calls, "largest gradients"),
        Flow(axes, "all_gather", each * 4, calls, "their places"),
    ]


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
