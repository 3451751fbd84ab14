"""Where the parts of a compressed file are: in its image, as it was before, and in the file.

The manifest tells places in images, which equal layouts have in common, whatever the data. What became of an image when
it was compressed is told by a table of its parts, which lies behind the digests of the file (see digests.Table).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.image import Row

LENGTH = 256 << 10
"""Bytes of a chunk, at most. Larger ones code no better, and a reader of a few rows would inflate more."""
LEAST = 4096
"""Bytes of a tensor that is worth it."""
PART = np.dtype([(name, "<i8") for name in ("begin", "size", "at", "stored", "whole", "item")])
"""`size` bytes from `begin` of the image are `stored` bytes from `at` of the file: a stream that inflates to `whole`
bytes of elements of `item`, of which the first are meant; if whole is 0, the bytes as they are."""

Parts = NDArray[Any]
"""[parts] of PART, in the order of the image."""


class Chunk(NamedTuple):
    """Of a dataset; contiguous in it."""

    at: tuple[int, ...]
    """Its first element."""
    begin: int
    """The byte of the dataset at which it begins."""
    size: int
    """Bytes; fewer than of a whole one where the dataset ends."""


def chunk_shape(row: Row) -> tuple[int, ...] | None:
    """Of a dataset's chunks: rows of it, as many as go into LENGTH bytes, shared out evenly. None: it has none."""
    shape, item = row.local_shape, row.dtype.itemsize
    if row.bytes < LEAST or not shape:
        return None
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) * item <= LENGTH)
    most = max(1, LENGTH // (prod(shape[dim + 1 :]) * item))
    rows = -(-shape[dim] // -(-shape[dim] // most))
    return (1,) * dim + (rows,) + shape[dim + 1 :]


def chunks_of(row: Row, chunk: Sequence[int]) -> Iterator[Chunk]:
    """In the order of memory."""
    shape, item = row.local_shape, row.dtype.itemsize
    dim = next((d for d, rows in enumerate(chunk) if rows > 1), len(shape) - 1)
    inner, begin = prod(shape[dim + 1 :]) * item, 0
    for outer in product(*(range(size) for size in shape[:dim])):
        for at in range(0, shape[dim], chunk[dim]):
            size = min(chunk[dim], shape[dim] - at) * inner
            yield Chunk((*outer, at, *(0,) * (len(shape) - dim - 1)), begin, size)
            begin += size


def within(parts: Parts, begin: int, end: int) -> Parts:
    """Those that have bytes [begin, end) of the image."""
    first = np.searchsorted(parts["begin"] + parts["size"], begin, "right")
    found: Parts = parts[first : np.searchsorted(parts["begin"], end, "left")]
    return found


def stored_within(parts: Parts, begin: int, end: int) -> Parts:
    """Those that have bytes [begin, end) of the file."""
    found: Parts = parts[(parts["at"] < end) & (parts["at"] + parts["stored"] > begin)]
    return found
