"""Which bytes of which files a rank needs, in reads of some megabytes; adjacent small tensors share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from hpc_train.api import Piece
from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.holdings import Part
from hpc_train.checkpoint.rectangle import Rectangle

SPAN = 16 << 20
"""Bytes that one read takes at most, but for the last rows of a part and for the rest of its blocks."""


@dataclass(frozen=True)
class Copy:
    """A rectangle that lies in one file and belongs into one piece."""

    part: Part
    piece: Piece
    wanted: Rectangle
    """In the logical tensor."""
    begin: int
    """First byte of the file that has an element of it."""
    end: int
    """One past the last."""


@dataclass(frozen=True)
class Read:
    """Bytes of one file, whole blocks, and what they are for."""

    file: int
    begin: int
    end: int
    copies: tuple[Copy, ...]


def reads(copies: Iterable[Copy], sizes: Sequence[int]) -> list[Read]:
    """Reads that give every copy, file by file and in order. sizes: bytes of each file."""
    cut = [slab for copy in copies for slab in slabs(copy)]
    cut.sort(key=lambda it: (it.part.file, it.begin))
    found: list[Read] = []
    batch: list[Copy] = []
    for slab in cut:
        if batch and not _joins(batch, slab):
            found.append(_read(batch, sizes))
            batch = []
        batch.append(slab)
    if batch:
        found.append(_read(batch, sizes))
    return found


def copy_of(part: Part, piece: Piece, wanted: Rectangle) -> Copy:
    """The copy of a rectangle that both the part and the piece hold."""
    begin, end = span(part, wanted, piece.dtype.itemsize)
    return Copy(part, piece, wanted, begin, end)


def span(part: Part, wanted: Rectangle, itemsize: int) -> tuple[int, int]:
    """(first, one past the last) byte in the file of a rectangle of a part; what lies between may be others' too."""
    first = last = 0
    start = wanted.start_in(part.rectangle)
    for at, size, whole in zip(start, wanted.shape, part.rectangle.shape, strict=True):
        first, last = first * whole + at, last * whole + at + size - 1
    return part.place + first * itemsize, part.place + (last + 1) * itemsize


def slabs(copy: Copy) -> Iterator[Copy]:
    """The same in parts of some rows each, so that none spans much more than SPAN."""
    wanted = copy.wanted
    dim = next((d for d, size in enumerate(wanted.shape) if size > 1), None)
    if copy.end - copy.begin <= SPAN or dim is None:
        yield copy
        return
    row = prod(copy.part.rectangle.shape[dim + 1 :]) * copy.piece.dtype.itemsize
    rows = max(1, SPAN // row)
    for at in range(0, wanted.shape[dim], rows):
        size = min(rows, wanted.shape[dim] - at)
        part = copy_of(copy.part, copy.piece, _narrow(wanted, dim, at, size))
        yield from slabs(part) if size == 1 else [part]


def _narrow(it: Rectangle, dim: int, at: int, size: int) -> Rectangle:
    offset, shape = list(it.offset), list(it.shape)
    offset[dim], shape[dim] = offset[dim] + at, size
    return Rectangle(tuple(offset), tuple(shape))


def _joins(batch: list[Copy], slab: Copy) -> bool:
    first = batch[0]
    near = slab.begin - batch[-1].end <= BLOCK
    return first.part.file == slab.part.file and near and slab.end - first.begin <= SPAN


def _read(batch: list[Copy], sizes: Sequence[int]) -> Read:
    file = batch[0].part.file
    begin = min(it.begin for it in batch) // BLOCK * BLOCK
    end = min(-(-max(it.end for it in batch) // BLOCK) * BLOCK, sizes[file])
    return Read(file, begin, end, tuple(batch))
