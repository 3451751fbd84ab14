"""Stage a rank's tensors in memory and write them as one shard file, compressed or not.

Compressed tensors are chunked datasets, shuffled and deflated, which every HDF5 tool reads. Threads compress the chunks
in place, so that a save takes no more memory; this destroys the staged image. HDF5 then places the chunks.
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
    MemoryExtent,
    WriteStream,
    write_image,
    write_stream,
)
from hpc_train.checkpoint.save.local_stage import LocalFile, LocalStage
from hpc_train.checkpoint.save.staging import (
    FloatSpan,
    StagingBuffer,
    StagingLayout,
    StreamingCheck,
    are_spans_finite,
    make_staging_layout,
)
from hpc_train.checkpoint.save.tensor_copy import FusedStaging, TensorCopy, can_fuse_staging, start_copy
from hpc_train.checkpoint.storage.file_system import (
    DEFAULT_POLICY,
    WritePolicy,
    checksum_bytes,
    open_descriptor,
    write_durable_file,
)
from hpc_train.interfaces import TensorShard

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
        batches = (chunks[at : at + _BATCH] for at in range(0, len(chunks), _BATCH))
        for _ in pool.map(lambda batch: _compress(batch, level), batches):
            pass
    # HDF5 writes its structure into a file in memory. Only where it put each chunk is needed; the chunks themselves go
    # straight from their own memory to the disk.
    with make_anonymous_file(partial(_lay_out, datasets, level)) as (places, content):
        extents = [MemoryExtent(place, part.data) for place, part in zip(places, _parts(datasets), strict=True)]
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
    zeros = memoryview(bytes(max((len(part.data) for part in _parts(datasets)), default=0)))
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
            found = _find_chunk_places(chunked)
            places += [found[part.chunk.at] for part in dataset.parts if part.chunk is not None]
            for place, part in zip(places[-len(dataset.parts) :], dataset.parts, strict=True):
                _punch_hole(content, place, len(part.data))
    return places


def _find_chunk_places(dataset: Any) -> dict[tuple[int, ...], int]:
    """Return the byte of the file of every chunk, by the index of its first element."""
    found: dict[tuple[int, ...], int] = {}

    def keep(chunk: Any) -> None:
        found[tuple(chunk.chunk_offset)] = chunk.byte_offset

    dataset.chunk_iter(keep)
    return found


def _punch_hole(file: int, begin: int, size: int) -> None:
    """Free the memory of a part of a file in memory."""
    fallocate = ctypes.CDLL(None).fallocate
    fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(begin), ctypes.c_int64(size))


def _parts(datasets: Sequence[_Dataset]) -> list[_Part]:
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


_SHARD_FORM = attrgetter("name", "shape", "dtype", "offset")
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_ShardForms = tuple[list[Any], ...]
"""Columns of what decides where shards go in a file; one object for each shard would take longer to make."""


@dataclass(frozen=True)
class StagedShard:
    """The image of a rank's shard file, in memory or on a disk of the node."""

    image: memoryview | LocalFile
    size: int
    layout: FileLayout
    finite: bool | None = None
    """Whether it has neither NaN nor infinity; None: not checked yet."""
    copy: TensorCopy | None = None
    """The copy into the image, which may not be complete."""
    fused: FusedStaging | None = None
    """The copy into the image while the file is written."""
    check: StreamingCheck | None = None
    """Check for NaN and infinity while the file is written."""
    float_spans: Sequence[FloatSpan] = ()
    """Floating-point tensors of the image."""
    level: int = 0
    """zlib level; 0: not compressed."""
    buffers: GatherBuffers = field(default_factory=GatherBuffers)
    """Buffers for compressing."""

    def is_finite(self) -> bool:
        """Return whether there is neither NaN nor infinity in it."""
        if self.finite is not None:
            return self.finite
        if self.check is not None and self.check.is_finite:
            return True
        assert isinstance(self.image, memoryview)
        return are_spans_finite(self.image, self.float_spans)


@dataclass
class ShardStager:
    """Stages a rank's shard in memory that is reused from save to save."""

    threads: int = 2
    """Threads that copy."""
    make_layout: Callable[[Sequence[DatasetRow]], ShardImage] = make_image
    """Lays out the image: make_image, or make_section for a rank that shares its file."""
    level: int = 0
    """zlib level; 0: not compressed."""
    _staging_buffer: StagingBuffer = field(default_factory=StagingBuffer)
    _gather_buffers: GatherBuffers = field(default_factory=GatherBuffers)
    _forms: _ShardForms = ()
    _slots: StagingLayout | None = None
    """Layout of the last save, for shards of these forms."""

    def stage(self, shards: Sequence[TensorShard], overlap: bool = False, fuse: bool = False) -> StagedShard:
        """Copy the shards into the staging buffer, over those of the save before.

        overlap: see start_copy. fuse: see FusedStaging. Raises CheckpointError for a dtype that HDF5 does
        not have, and if memory is short.
        """
        tensors = [tensor_shard.local for tensor_shard in shards]
        slots = self._get_slots(shards, tensors)
        shard = StagedShard(slots.memory, slots.image.size, slots.file_layout, float_spans=slots.spans)
        if fuse and not self.level and can_fuse_staging(tensors):
            fused = FusedStaging(slots, tensors)
            return replace(shard, fused=fused, check=fused.check)
        # The check reads the image in file order as it is written. A section of a shared file and a compressed file are
        # not written like that, and are checked separately.
        check = StreamingCheck(slots) if self.make_layout is make_image and not self.level else None
        copy = start_copy(slots, shards, self.threads, overlap)
        return replace(shard, copy=copy, check=check, level=self.level, buffers=self._gather_buffers)

    def _get_slots(self, shards: Sequence[TensorShard], tensors: Sequence[Tensor]) -> StagingLayout:
        """Return the staging layout, the last one if the shards are alike: making it can take longer than the copy."""
        forms = list(map(_SHARD_FORM, shards)), list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors))
        if self._slots is None or forms != self._forms:
            self._slots = None  # its view of the memory would keep `reserve` from freeing it
            rows = tuple(make_row(tensor_shard) for tensor_shard in shards)
            image = self.make_layout(rows)
            memory = self._staging_buffer.reserve(image.size)
            self._slots, self._forms = make_staging_layout(memory, image, make_file_layout(rows, image)), forms
        return self._slots

    def move_to_local_disk(self, shard: StagedShard, local: LocalStage) -> StagedShard:
        """Copy the image to a disk of the node and free the memory; returns the shard unchanged if that fails."""
        assert isinstance(shard.image, memoryview)
        # After the copy the memory is freed, so NaN must be searched for now: in a thread beside the copy.
        with ThreadPoolExecutor(1) as pool:
            finite = pool.submit(shard.is_finite)
            copy = local.copy_from(shard.image, shard.size)
            shard = replace(shard, finite=finite.result())
        if copy is None:
            return shard
        assert isinstance(shard.image, memoryview)
        self._slots = None
        shard.image.release()
        self._staging_buffer.discard_contents()
        return replace(shard, image=copy, check=None)


def write_shard(
    directory: Path, name: str, shard: StagedShard, policy: WritePolicy = DEFAULT_POLICY
) -> tuple[ShardFile, FileLayout]:
    """Write and synchronise a shard file and its table of digests.

    name: path within the directory of the step; its folder must exist. Raises OSError, and CheckpointError for an image
    that was damaged on the disk of the node. Compressing overwrites the image.
    """
    if shard.level:
        return write_compressed_shard(directory, name, shard, shard.layout, shard.layout.places, shard.size, policy)
    path, image = directory / name, shard.image
    if isinstance(image, LocalFile):
        return write_digest_table(directory, name, shard.size, image.copy_to(path, policy), shard.layout), shard.layout
    if shard.check is None:
        digests = write_image(path, image, shard.size, policy)
        return write_digest_table(directory, name, shard.size, digests, shard.layout), shard.layout
    # The table of digests is written while the last blocks are still on their way. If the file system refuses direct
    # I/O late, the stream starts again and calls a second time, with the same digests.
    found: list[ShardFile] = []

    def write_table(digests: list[int]) -> None:
        if not found:
            found.append(write_digest_table(directory, name, shard.size, digests, shard.layout))

    write_stream(path, WriteStream(shard.check.read, shard.size, True, shard.check.digests, write_table), policy)
    return found[0], shard.layout


def write_compressed_shard(
    directory: Path,
    name: str,
    shard: StagedShard,
    layout: FileLayout,
    begins: Sequence[int],
    size: int,
    policy: WritePolicy,
) -> tuple[ShardFile, FileLayout]:
    """Write and synchronise a shard file with compressed tensors, and its table of digests.

    layout: rows of the file. begins: byte of the staged image at which the data of each row begins. size: bytes of the
    file's uncompressed image. Raises OSError and CheckpointError.
    """
    memory = shard.image
    assert isinstance(memory, memoryview)
    rows = (
        RowInMemory(row, place, memory[begin : begin + row.bytes])
        for row, place, begin in zip(layout.rows, layout.places, begins, strict=True)
    )
    found = write_compressed_file(directory / name, list(rows), shard.level, policy, shard.buffers)
    return write_digest_table(directory, name, found.size, found.digests, layout, found.parts, size), layout


def write_digest_table(
    directory: Path,
    name: str,
    size: int,
    digests: Sequence[int],
    layout: FileLayout,
    parts: PartTable | None = None,
    inflated: int | None = None,
) -> ShardFile:
    """Write and synchronise the table of digests of a shard file of `size` bytes; returns its manifest entry.

    layout: of the file. parts, inflated: of a compressed file (see PART_DTYPE and ShardFile). Raises OSError.
    """
    table = encode_digest_table(size, digests, seal_table(layout.seal, parts), parts)
    write_durable_file(digest_table_path(directory / name), table)
    return ShardFile(name, size, checksum_bytes(table), inflated=inflated)
