"""Where the parts of a compressed file are: in its image, as it was before, and in the file.

The manifest tells places in images, which equal layouts have in common, whatever the data. What became of an image when
it was compressed is told by a table of its parts, which lies behind the digests of the file (see digests.Table).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.image import Row
from hpc_train.checkpoint.pattern import LARGEST

LENGTH = 256 << 10
"""Bytes of a chunk, at most. Larger ones code no better, and a reader of a few rows would inflate more."""
LEAST = 4096
"""Bytes of a tensor that is worth it."""
LEAST_STORED = 8
"""Minimum bytes that a part takes in a file."""
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


def chunk_spans(shape: Sequence[int], item: int, chunk: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first byte, bytes) within the dataset for its chunks, in memory order; at most `most` chunks."""
    return ((it.begin, it.size) for it in islice(_chunks(tuple(shape), item, chunk), most))


def chunks_of(row: Row, chunk: Sequence[int]) -> Iterator[Chunk]:
    """In the order of memory."""
    return _chunks(row.local_shape, row.dtype.itemsize, chunk)


def _chunks(shape: tuple[int, ...], item: int, chunk: Sequence[int]) -> Iterator[Chunk]:
    dim = next((d for d, rows in enumerate(chunk) if rows > 1), len(shape) - 1)
    inner, begin = prod(shape[dim + 1 :]) * item, 0
    for outer in product(*(range(size) for size in shape[:dim])):
        for at in range(0, shape[dim], chunk[dim]):
            size = min(chunk[dim], shape[dim] - at) * inner
            yield Chunk((*outer, at, *(0,) * (len(shape) - dim - 1)), begin, size)
            begin += size


def check_parts(parts: Parts, size: int, inflated: int) -> None:
    """Raise CheckpointError unless a file of `size` bytes with an image of `inflated` bytes can have these parts.

    Parts must lie in the order of the image, share no bytes of the image or of the file, and inflate to a bounded size.
    """
    if any(len(parts) and not 0 <= parts[name].min() <= parts[name].max() <= LARGEST for name in PART.names or ()):
        raise CheckpointError("a part of a compressed file has a number that is negative or too large")
    ends, stored_ends = parts["begin"] + parts["size"], parts["at"] + parts["stored"]
    coded, order = parts["whole"] > 0, np.argsort(parts["at"], kind="stable")
    wrong = (parts["size"] == 0) | (ends > inflated) | (stored_ends > size)
    wrong |= ~coded & (parts["stored"] != parts["size"])
    wrong |= coded & ((parts["whole"] > LENGTH) | (parts["size"] > parts["whole"]))
    wrong |= coded & ((parts["item"] == 0) | (parts["whole"] % np.maximum(parts["item"], 1) != 0))
    wrong[1:] |= ends[:-1] > parts["begin"][1:]
    wrong[1:] |= stored_ends[order][:-1] > parts["at"][order][1:]
    if wrong.any():
        raise CheckpointError("a part of a compressed file does not lie where there is room for it")


def covers(parts: Parts, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each pair whether the parts cover all bytes [begin, end) of the image."""
    if not len(parts):
        return np.zeros(len(begin), dtype=np.bool_)
    stops = parts["begin"] + parts["size"]
    gaps = np.flatnonzero(parts["begin"][1:] != stops[:-1]) + 1
    first, last = parts["begin"][np.concatenate([[0], gaps])], stops[np.concatenate([gaps - 1, [len(parts) - 1]])]
    run = np.searchsorted(first, begin, "right") - 1
    found: NDArray[np.bool_] = (run >= 0) & (end <= last[np.maximum(run, 0)])
    return found


def within(parts: Parts, begin: int, end: int) -> Parts:
    """Those that have bytes [begin, end) of the image."""
    first = np.searchsorted(parts["begin"] + parts["size"], begin, "right")
    found: Parts = parts[first : np.searchsorted(parts["begin"], end, "left")]
    return found


def stored_within(parts: Parts, begin: int, end: int) -> Parts:
    """Those that have bytes [begin, end) of the file."""
    found: Parts = parts[(parts["at"] < end) & (parts["at"] + parts["stored"] > begin)]
    return found
