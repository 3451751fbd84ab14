"""Write one shard file: its tensors are staged in memory first, and written later, compressed or as they are.

Compressed tensors are chunked datasets, shuffled and deflated, which every HDF5 tool reads. Threads compress the
chunks where they lie, so that a save takes no more memory, but the staged image is lost. HDF5 then says where each
chunk belongs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hpc_train.checkpoint.format.block_digests import (
    PART_DTYPE,
    DatasetChunk,
    PartTable,
    choose_chunk_shape,
    deflate_chunk,
    digest_table_path,
    encode_digest_table,
    iterate_chunks,
)
from hpc_train.checkpoint.format.hdf5_layout import (
    DatasetRow,
    DatasetWriter,
    ShardImage,
    find_gaps,
    make_anonymous_file,
    make_image,
    make_row,
    name_datasets,
    open_hdf5,
)
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.shard_layout import FileLayout, make_file_layout, seal_table
from hpc_train.checkpoint.save.file_writer import (
    GatherBuffers,
    GatherSource,
    LocalFile,
    LocalStage,
    MemoryExtent,
    WriteStream,
    write_image,
    write_stream,
)
from hpc_train.checkpoint.save.staging import (
    FloatSpan,
    FusedStaging,
    StagingBuffer,
    StagingLayout,
    StreamingCheck,
    TensorCopy,
    are_spans_finite,
    can_fuse_staging,
    make_staging_layout,
    start_copy,
)
from hpc_train.checkpoint.storage.file_system import (
    DEFAULT_POLICY,
    WritePolicy,
    checksum_bytes,
    open_descriptor,
    write_durable_file,
)
from hpc_train.interfaces import TensorShard

_THREADS = 2
_BATCH = 16
"""Chunks that a thread takes at a time."""
_UNFILTERED = 0b11
"""HDF5's mask of a chunk that went through neither filter."""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
"""Of fallocate(2)."""


class RowInMemory(NamedTuple):
    """A row in memory."""

    row: DatasetRow
    place: int
    """Byte of the image that it is a part of."""
    data: memoryview


class CompressedFile(NamedTuple):
    """A file that was written."""

    size: int
    digests: list[int]
    parts: PartTable


@dataclass
class _Part:
    """A chunk, or all of a tensor that has none."""

    begin: int
    """Byte of the image."""
    data: memoryview
    """As it lies in memory; then as it is stored."""
    size: int
    """Of what it was."""
    chunk: DatasetChunk | None = None
    whole: int = 0
    """See chunks.PART."""


@dataclass
class _Dataset:
    """A row and what is stored of it."""

    row: DatasetRow
    chunk: tuple[int, ...] | None
    parts: list[_Part]


def write_compressed_file(
    path: Path, rows: Sequence[RowInMemory], level: int, how: WritePolicy, buffers: GatherBuffers
) -> CompressedFile:
    """Write a new file, on the disk when this returns. The memory of the rows is overwritten.

    Raises OSError, and as image.make_image does.
    """
    datasets = [_dataset(row) for row in rows]
    with ThreadPoolExecutor(_THREADS) as pool:
        chunks = [(it, part) for it in datasets if it.chunk for part in it.parts]
        batches = (chunks[at : at + _BATCH] for at in range(0, len(chunks), _BATCH))
        for _ in pool.map(lambda batch: _compress(batch, level), batches):
            pass
    with make_anonymous_file(partial(_lay_out, datasets, level)) as (places, content):
        extents = [MemoryExtent(place, part.data) for place, part in zip(places, _parts(datasets), strict=True)]
        size = os.fstat(content.fileno()).st_size
        image = ShardImage(size, (), tuple(find_gaps(content, sorted((it.begin, it.end) for it in extents), size)))
    digests = write_stream(path, WriteStream(GatherSource(extents, image, buffers).read, size), how)
    return CompressedFile(size, digests, _table(datasets, places))


def _dataset(it: RowInMemory) -> _Dataset:
    chunk = choose_chunk_shape(it.row)
    if chunk is None:
        return _Dataset(it.row, None, [_Part(it.place, it.data, len(it.data))] if it.data else [])
    parts = (
        _Part(it.place + one.begin, it.data[one.begin : one.begin + one.size], one.size, one)
        for one in iterate_chunks(it.row, chunk)
    )
    return _Dataset(it.row, chunk, list(parts))


def _compress(batch: Sequence[tuple[_Dataset, _Part]], level: int) -> None:
    """Chunks, in their own memory. One that gets no smaller stays as it is, one that must grow has its own."""
    for dataset, part in batch:
        item = dataset.row.dtype.itemsize
        whole = prod(dataset.chunk or ()) * item
        stream = deflate_chunk(part.data, item, whole, level)
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
    names = name_datasets(it.row.name for it in datasets)
    places: list[int] = []
    with open_descriptor(path, os.O_RDWR) as content, open_hdf5(path, "w", interval=1) as file:
        writer = DatasetWriter(file)
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
                _punch_hole(content, place, len(part.data))
    return places


def _chunk_places(dataset: Any) -> dict[tuple[int, ...], int]:
    """Byte of the file of every chunk, by its first element."""
    found: dict[tuple[int, ...], int] = {}

    def keep(chunk: Any) -> None:
        found[tuple(chunk.chunk_offset)] = chunk.byte_offset

    dataset.chunk_iter(keep)
    return found


def _punch_hole(file: int, begin: int, size: int) -> None:
    """The memory of a part of a file in memory."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(size))


def _parts(datasets: Sequence[_Dataset]) -> list[_Part]:
    return [part for it in datasets for part in it.parts]


def _table(datasets: Sequence[_Dataset], places: Sequence[int]) -> PartTable:
    rows = [
        (part.begin, part.size, len(part.data), part.whole, it.row.dtype.itemsize)
        for it in datasets
        for part in it.parts
    ]
    table = np.zeros(len(rows), PART_DTYPE)
    for name, column in zip(("begin", "size", "stored", "whole", "item"), zip(*rows, strict=True), strict=False):
        table[name] = column
    table["at"] = places
    ordered: PartTable = table[np.argsort(table["begin"])]
    return ordered


_OF_PIECE = attrgetter("name", "shape", "dtype", "offset")
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_PieceForms = tuple[list[Any], ...]
"""What of pieces decides where they go, in columns, as an object a piece takes longer to make."""


@dataclass(frozen=True)
class StagedShard:
    """A shard file's image, in memory or on a disk of the node."""

    image: memoryview | LocalFile
    size: int
    held: FileLayout
    finite: bool | None = None
    """None: nobody has looked yet."""
    copying: TensorCopy | None = None
    """What fills the image, where that may still be under way."""
    filling: FusedStaging | None = None
    """What fills it while it is written."""
    looking: StreamingCheck | None = None
    """Sees whether it is finite, while it is written."""
    spans: Sequence[FloatSpan] = ()
    """What of it can have a NaN."""
    level: int = 0
    """At which it is to be compressed; 0: not."""
    buffers: GatherBuffers = field(default_factory=GatherBuffers)
    """For that."""

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it; see poison."""
        if self.finite is not None:
            return self.finite
        if self.looking is not None and self.looking.is_finite:
            return True
        assert isinstance(self.image, memoryview)
        return are_spans_finite(self.image, self.spans)


@dataclass
class ShardStager:
    """The memory for one rank's shard, and the image of the layout it last had."""

    threads: int = 2
    """That copy."""
    make: Callable[[Sequence[DatasetRow]], ShardImage] = make_image
    """section.make_section for a rank that shares its file."""
    level: int = 0
    """See Staged."""
    _arena: StagingBuffer = field(default_factory=StagingBuffer)
    _buffers: GatherBuffers = field(default_factory=GatherBuffers)
    _looks: _PieceForms = ()
    _slots: StagingLayout | None = None
    """Of tensors that look so."""

    def take(self, pieces: Sequence[TensorShard], overlap: bool = False, late: bool = False) -> StagedShard:
        """Copy the pieces. What was taken before is overwritten. overlap: see copying.begin. late: see filling.

        Raises CheckpointError for a dtype that HDF5 does not have and where memory is short.
        """
        tensors = [piece.local for piece in pieces]
        slots = self._slots_of(pieces, tensors)
        staged = StagedShard(slots.memory, slots.image.size, slots.held, spans=slots.spans)
        if late and not self.level and can_fuse_staging(tensors):
            filling = FusedStaging(slots, tensors)
            return replace(staged, filling=filling, looking=filling.looking)
        looking = StreamingCheck(slots) if self.make is make_image and not self.level else None
        copying = start_copy(slots, pieces, self.threads, overlap)
        return replace(staged, copying=copying, looking=looking, level=self.level, buffers=self._buffers)

    def _slots_of(self, pieces: Sequence[TensorShard], tensors: Sequence[Tensor]) -> StagingLayout:
        """Those of the last time, if the pieces are like them: making them takes longer than many a copy."""
        looks = list(map(_OF_PIECE, pieces)), list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors))
        if self._slots is None or looks != self._looks:
            self._slots = None  # it has a view of the memory
            rows = tuple(make_row(piece) for piece in pieces)
            image = self.make(rows)
            memory = self._arena.reserve(image.size)
            self._slots, self._looks = make_staging_layout(memory, image, make_file_layout(rows, image)), looks
        return self._slots

    def put_aside(self, staged: StagedShard, local: LocalStage) -> StagedShard:
        """The same on a disk of the node, and the memory to spare; unchanged where that cannot be used."""
        assert isinstance(staged.image, memoryview)
        with ThreadPoolExecutor(1) as pool:
            finite = pool.submit(staged.is_finite)
            copy = local.put(staged.image, staged.size)
            staged = replace(staged, finite=finite.result())
        if copy is None:
            return staged
        assert isinstance(staged.image, memoryview)
        self._slots = None
        staged.image.release()
        self._arena.spare()
        return replace(staged, image=copy, looking=None)


def write_shard(
    directory: Path, name: str, staged: StagedShard, how: WritePolicy = DEFAULT_POLICY
) -> tuple[ShardFile, FileLayout]:
    """Write a shard file and its table of digests into a step's directory, and put both on the disk.

    name: path within the directory; its folder is there. Raises OSError, and CheckpointError for an image that was
    damaged on the disk of the node. An image that is compressed is none any more.
    """
    if staged.level:
        return write_compressed_shard(directory, name, staged, staged.held, staged.held.places, staged.size, how)
    path, image = directory / name, staged.image
    if isinstance(image, LocalFile):
        return write_digest_table(directory, name, staged.size, image.copy_to(path, how), staged.held), staged.held
    if staged.looking is None:
        digests = write_image(path, image, staged.size, how)
        return write_digest_table(directory, name, staged.size, digests, staged.held), staged.held
    found: list[ShardFile] = []

    def known(digests: list[int]) -> None:
        if not found:
            found.append(write_digest_table(directory, name, staged.size, digests, staged.held))

    write_stream(path, WriteStream(staged.looking.read, staged.size, True, staged.looking.digests, known), how)
    return found[0], staged.held


def write_compressed_shard(
    directory: Path,
    name: str,
    staged: StagedShard,
    held: FileLayout,
    begins: Sequence[int],
    size: int,
    how: WritePolicy,
) -> tuple[ShardFile, FileLayout]:
    """The same with tensors that are compressed; `held` says what is to be in it, and `size` the bytes of its image.

    begins: byte of what is staged at which each row's data lies. Raises OSError and CheckpointError.
    """
    memory = staged.image
    assert isinstance(memory, memoryview)
    lying = (
        RowInMemory(row, place, memory[begin : begin + row.bytes])
        for row, place, begin in zip(held.rows, held.places, begins, strict=True)
    )
    found = write_compressed_file(directory / name, list(lying), staged.level, how, staged.buffers)
    return write_digest_table(directory, name, found.size, found.digests, held, found.parts, size), held


def write_digest_table(
    directory: Path,
    name: str,
    size: int,
    digests: Sequence[int],
    held: FileLayout,
    parts: PartTable | None = None,
    inflated: int | None = None,
) -> ShardFile:
    """Put the table of a shard file of that size beside it, and on the disk. Raises OSError.

    held: contents of the file. parts, inflated: of a compressed file; see chunks and ShardFile.
    """
    table = encode_digest_table(size, digests, seal_table(held.seal, parts), parts)
    write_durable_file(digest_table_path(directory / name), table)
    return ShardFile(name, size, checksum_bytes(table), inflated=inflated)
