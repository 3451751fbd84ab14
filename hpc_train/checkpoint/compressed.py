"""A shard file whose tensors are compressed: chunked datasets, shuffled and deflated, which every HDF5 tool reads.

Threads compress the chunks of an image where they lie, so that a save takes no more memory, but the image is none any
more. Then HDF5 says where each belongs, as it does for tensors that are not compressed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc_train.checkpoint.chunks import PART, Chunk, Parts, chunk_shape, chunks_of
from hpc_train.checkpoint.deflate import deflate
from hpc_train.checkpoint.files import opened
from hpc_train.checkpoint.image import Image, Row, Writer, dataset_names, gaps, nameless, open_hdf5
from hpc_train.checkpoint.packing import Buffers, Extent, Packing
from hpc_train.checkpoint.storage.policy import Behaviour
from hpc_train.checkpoint.stream import Stream, write_stream

_THREADS = 2
_BATCH = 16
"""Chunks that a thread takes at a time."""
_UNFILTERED = 0b11
"""HDF5's mask of a chunk that went through neither filter."""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
"""Of fallocate(2)."""


class Lying(NamedTuple):
    """A row in memory."""

    row: Row
    place: int
    """Byte of the image that it is a part of."""
    data: memoryview


class Compressed(NamedTuple):
    """A file that was written."""

    size: int
    digests: list[int]
    parts: Parts


@dataclass
class _Part:
    """A chunk, or all of a tensor that has none."""

    begin: int
    """Byte of the image."""
    data: memoryview
    """As it lies in memory; then as it is stored."""
    size: int
    """Of what it was."""
    chunk: Chunk | None = None
    whole: int = 0
    """See chunks.PART."""


@dataclass
class _Dataset:
    """A row and what is stored of it."""

    row: Row
    chunk: tuple[int, ...] | None
    parts: list[_Part]


def write_compressed(path: Path, rows: Sequence[Lying], level: int, how: Behaviour, buffers: Buffers) -> Compressed:
    """Write a new file, on the disk when this returns. The memory of the rows is overwritten.

    Raises OSError, and as image.make_image does.
    """
    datasets = [_dataset(row) for row in rows]
    with ThreadPoolExecutor(_THREADS) as pool:
        chunks = [(it, part) for it in datasets if it.chunk for part in it.parts]
        batches = (chunks[at : at + _BATCH] for at in range(0, len(chunks), _BATCH))
        for _ in pool.map(lambda batch: _compress(batch, level), batches):
            pass
    with nameless(partial(_lay_out, datasets, level)) as (places, content):
        extents = [Extent(place, part.data) for place, part in zip(places, _parts(datasets), strict=True)]
        size = os.fstat(content.fileno()).st_size
        image = Image(size, (), tuple(gaps(content, sorted((it.begin, it.end) for it in extents), size)))
    digests = write_stream(path, Stream(Packing(extents, image, buffers).read, size), how)
    return Compressed(size, digests, _table(datasets, places))


def _dataset(it: Lying) -> _Dataset:
    chunk = chunk_shape(it.row)
    if chunk is None:
        return _Dataset(it.row, None, [_Part(it.place, it.data, len(it.data))] if it.data else [])
    parts = (
        _Part(it.place + one.begin, it.data[one.begin : one.begin + one.size], one.size, one)
        for one in chunks_of(it.row, chunk)
    )
    return _Dataset(it.row, chunk, list(parts))


def _compress(batch: Sequence[tuple[_Dataset, _Part]], level: int) -> None:
    """Chunks, in their own memory. One that gets no smaller stays as it is, one that must grow has its own."""
    for dataset, part in batch:
        item = dataset.row.dtype.itemsize
        whole = prod(dataset.chunk or ()) * item
        stream = deflate(part.data, item, whole, level)
        if stream is None:
            continue
        part.whole = whole
        if len(stream) > len(part.data):
            part.data = memoryview(stream)
        else:
            part.data = part.data[: len(stream)]
            part.data[:] = stream


def _lay_out(datasets: Sequence[_Dataset], level: int, path: Path) -> list[int]:
    """Where every part is stored. HDF5 writes zeros there, which are taken away again, as they are not wanted."""
    zeros = memoryview(bytes(max((len(part.data) for part in _parts(datasets)), default=0)))
    names = dataset_names(it.row.name for it in datasets)
    places: list[int] = []
    with opened(path, os.O_RDWR) as content, open_hdf5(path, "w", interval=1) as file:
        writer = Writer(file)
        for name, it in zip(names, datasets, strict=True):
            if it.chunk is None:
                place = writer.create(name, it.row)
                places += [place] * len(it.parts)
                continue
            chunked = writer.create_chunked(name, it.row, it.chunk, level)
            for part in it.parts:
                assert part.chunk is not None
                mask = 0 if part.whole else _UNFILTERED
                chunked.write_direct_chunk(part.chunk.at, zeros[: len(part.data)], mask)
            found = _chunk_places(chunked)
            places += [found[part.chunk.at] for part in it.parts if part.chunk is not None]
            for place, part in zip(places[-len(it.parts) :], it.parts, strict=True):
                _give_back(content, place, len(part.data))
    return places


def _chunk_places(dataset: Any) -> dict[tuple[int, ...], int]:
    """Byte of the file of every chunk, by its first element."""
    found: dict[tuple[int, ...], int] = {}

    def keep(chunk: Any) -> None:
        found[tuple(chunk.chunk_offset)] = chunk.byte_offset

    dataset.chunk_iter(keep)
    return found


def _give_back(file: int, begin: int, size: int) -> None:
    """The memory of a part of a file in memory."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(size))


def _parts(datasets: Sequence[_Dataset]) -> list[_Part]:
    return [part for it in datasets for part in it.parts]


def _table(datasets: Sequence[_Dataset], places: Sequence[int]) -> Parts:
    rows = [
        (part.begin, part.size, len(part.data), part.whole, it.row.dtype.itemsize)
        for it in datasets
        for part in it.parts
    ]
    table = np.zeros(len(rows), PART)
    for name, column in zip(("begin", "size", "stored", "whole", "item"), zip(*rows, strict=True), strict=False):
        table[name] = column
    table["at"] = places
    ordered: Parts = table[np.argsort(table["begin"])]
    return ordered
