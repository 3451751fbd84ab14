"""Write a shard file with compressed tensors: chunked datasets, shuffled and deflated, which every HDF5 tool reads.

Threads compress the chunks in place, so that a save takes no more memory; this destroys the staged image. HDF5 then
chooses the place of each chunk.
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

from hpc_train.checkpoint.format.compressed_chunks import (
    PART_DTYPE,
    DatasetChunk,
    PartTable,
    choose_chunk_shape,
    deflate_chunk,
    iterate_chunks,
)
from hpc_train.checkpoint.format.hdf5_layout import (
    DatasetRow,
    DatasetWriter,
    ShardImage,
    find_gaps,
    make_anonymous_file,
    name_datasets,
    open_hdf5,
)
from hpc_train.checkpoint.save.file_writer import (
    GatherBuffers,
    GatherSource,
    MemoryExtent,
    WriteStream,
    write_stream,
)
from hpc_train.checkpoint.storage.file_system import (
    WritePolicy,
    open_descriptor,
)

_THREADS = 2
"""Threads that compress; more would take cores from the training that runs at the same time."""
_BATCH = 16
"""Chunks that a thread takes at a time."""
_UNFILTERED = 0b11
"""HDF5's filter mask of a chunk that skipped both filters."""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
"""Flags of fallocate(2), which Python's os.posix_fallocate does not offer."""


class RowInMemory(NamedTuple):
    """A dataset row and its data in memory."""

    row: DatasetRow
    place: int
    """Byte of the image at which it begins."""
    data: memoryview


class CompressedFile(NamedTuple):
    """Size, digests and parts of a compressed file that was written."""

    size: int
    digests: list[int]
    parts: PartTable


@dataclass
class _Part:
    """A chunk, or a whole tensor that is not chunked."""

    begin: int
    """Byte of the image."""
    data: memoryview
    """Its elements; after compression the bytes to store."""
    size: int
    """Bytes before compression."""
    chunk: DatasetChunk | None = None
    whole: int = 0
    """Bytes of the whole chunk if it is compressed, else 0 (see PART_DTYPE)."""


@dataclass
class _Dataset:
    """A dataset row, its chunk shape and its parts."""

    row: DatasetRow
    chunk: tuple[int, ...] | None
    parts: list[_Part]


def write_compressed_file(
    path: Path, rows: Sequence[RowInMemory], level: int, policy: WritePolicy, buffers: GatherBuffers
) -> CompressedFile:
    """Write and synchronise a new file with compressed tensors. Overwrites the memory of the rows.

    Raises OSError, and as make_image does.
    """
    datasets = [_split_dataset(row) for row in rows]
    with ThreadPoolExecutor(_THREADS) as pool:
        chunks = [(dataset, part) for dataset in datasets if dataset.chunk for part in dataset.parts]
        batches = (chunks[first : first + _BATCH] for first in range(0, len(chunks), _BATCH))
        for _ in pool.map(lambda batch: _compress(batch, level), batches):
            pass
    # HDF5 writes its structure into a file in memory. Only where it put each chunk is needed; the chunks themselves go
    # straight from their own memory to the disk.
    with make_anonymous_file(partial(_lay_out, datasets, level)) as (places, content):
        extents = [MemoryExtent(place, part.data) for place, part in zip(places, _list_parts(datasets), strict=True)]
        size = os.fstat(content.fileno()).st_size
        image = ShardImage(
            size, (), tuple(find_gaps(content, sorted((extent.begin, extent.end) for extent in extents), size))
        )
    digests = write_stream(path, WriteStream(GatherSource(extents, image, buffers).read, size), policy)
    return CompressedFile(size, digests, _make_part_table(datasets, places))


def _split_dataset(source: RowInMemory) -> _Dataset:
    row, place, data = source
    shape = choose_chunk_shape(row)
    if shape is None:
        return _Dataset(row, None, [_Part(place, data, len(data))] if data else [])
    parts = (
        _Part(place + chunk.begin, data[chunk.begin : chunk.begin + chunk.size], chunk.size, chunk)
        for chunk in iterate_chunks(row, shape)
    )
    return _Dataset(row, shape, list(parts))


def _compress(batch: Sequence[tuple[_Dataset, _Part]], level: int) -> None:
    """Compress chunks in place.

    One that would not get smaller stays uncompressed; a padded one that grows gets memory of its own.
    """
    for dataset, part in batch:
        item = dataset.row.dtype.itemsize
        chunk_bytes = prod(dataset.chunk or ()) * item
        stream = deflate_chunk(part.data, item, chunk_bytes, level)
        if stream is None:
            continue
        # Recorded because a reader must know how much memory the chunk inflates to before it inflates it.
        part.whole = chunk_bytes
        if len(stream) > len(part.data):
            part.data = memoryview(stream)
        else:
            part.data = part.data[: len(stream)]
            part.data[:] = stream


def _lay_out(datasets: Sequence[_Dataset], level: int, path: Path) -> list[int]:
    """Write the HDF5 structure of the file; returns the byte at which each part is stored.

    HDF5 places a chunk only when it is written, so zeros are written, and their memory is freed again.
    """
    # One buffer of zeros serves all chunks: only where HDF5 puts them matters.
    zeros = memoryview(bytes(max((len(part.data) for part in _list_parts(datasets)), default=0)))
    names = name_datasets(dataset.row.name for dataset in datasets)
    places: list[int] = []
    with open_descriptor(path, os.O_RDWR) as content, open_hdf5(path, "w", interval=1) as file:
        writer = DatasetWriter(file)
        for name, dataset in zip(names, datasets, strict=True):
            if dataset.chunk is None:
                place = writer.create(name, dataset.row)
                places += [place] * len(dataset.parts)
                continue
            chunked = writer.create_chunked(name, dataset.row, dataset.chunk, level)
            for part in dataset.parts:
                assert part.chunk is not None
                mask = 0 if part.whole else _UNFILTERED
                chunked.write_direct_chunk(part.chunk.at, zeros[: len(part.data)], mask)
            places_of_chunks = _find_chunk_places(chunked)
            places += [places_of_chunks[part.chunk.at] for part in dataset.parts if part.chunk is not None]
            for place, part in zip(places[-len(dataset.parts) :], dataset.parts, strict=True):
                _punch_hole(content, place, len(part.data))
    return places


def _find_chunk_places(dataset: Any) -> dict[tuple[int, ...], int]:
    """Return the byte of the file of every chunk, by the index of its first element."""
    places: dict[tuple[int, ...], int] = {}

    def keep(chunk: Any) -> None:
        places[tuple(chunk.chunk_offset)] = chunk.byte_offset

    dataset.chunk_iter(keep)
    return places


def _punch_hole(file: int, begin: int, size: int) -> None:
    """Free the memory of a part of a file in memory."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(size))


def _list_parts(datasets: Sequence[_Dataset]) -> list[_Part]:
    return [part for dataset in datasets for part in dataset.parts]


def _make_part_table(datasets: Sequence[_Dataset], places: Sequence[int]) -> PartTable:
    rows = [
        (part.begin, part.size, len(part.data), part.whole, dataset.row.dtype.itemsize)
        for dataset in datasets
        for part in dataset.parts
    ]
    table = np.zeros(len(rows), PART_DTYPE)
    for name, column in zip(("begin", "size", "stored", "whole", "item"), zip(*rows, strict=True), strict=False):
        table[name] = column
    table["at"] = places
    # In order of the uncompressed bytes, by which readers search.
    ordered: PartTable = table[np.argsort(table["begin"])]
    return ordered
