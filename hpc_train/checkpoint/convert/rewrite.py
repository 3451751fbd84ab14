"""Write a step in one process and bounded memory, from tensors read a part at a time, and commit it as a save does.

TensorSource   tensors to read by name and rectangle (tensor_sources.py), or another library's files
cut_rows       cut the tensors over the files
BlockWriter    write a shard file whose bytes come in any order
write_step     write and commit the step
"""

from __future__ import annotations

import os
import resource
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from heapq import heapreplace
from pathlib import Path
from typing import Any

import torch

from hpc_train.checkpoint.convert.tensor_sources import TensorSource, make_blank_shard
from hpc_train.checkpoint.format.block_digests import (
    BLOCK_BYTES,
    count_blocks,
    digest_blocks,
    encode_digest_table,
    find_digest_table,
)
from hpc_train.checkpoint.format.hdf5_layout import (
    ALIGNMENT,
    DatasetRow,
    ShardImage,
    make_image,
    parse_dtype,
)
from hpc_train.checkpoint.format.manifest import Manifest, ShardFile
from hpc_train.checkpoint.format.rectangle import Rectangle, make_slices, split_slabs
from hpc_train.checkpoint.format.shard_layout import FileLayout, SavedTensor, gather_layouts, make_file_layout
from hpc_train.checkpoint.provenance import Origin
from hpc_train.checkpoint.save.commit_step import commit_step, prepare_directory
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.file_system import checksum_bytes, write_at_offset, write_durable_file
from hpc_train.checkpoint.storage.lock import Lock, take_lock
from hpc_train.checkpoint.storage.step_directory import (
    choose_sequence_number,
    find_steps,
    parse_step,
    shard_file_name,
    step_path,
    uncommitted_path,
)
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard

OnBytes = Callable[[int], object]
"""Takes the number of bytes done since the last call."""
Progress = Callable[[str, int], AbstractContextManager[OnBytes]]
"""Shows progress while its context is open, given a title and the total of bytes."""


def cut_rows(tensors: Sequence[SavedTensor], files: int, dim: int) -> list[list[DatasetRow]]:
    """Cut tensors over the files, evenly along `dim`; returns the rows of every file.

    A tensor without that dimension, too short in it, or too small to be worth cutting goes whole to the file with the
    fewest bytes so far.
    """
    rows: list[list[DatasetRow]] = [[] for _ in range(files)]
    loads = [(0, index) for index in range(files)]
    for tensor in tensors:
        bytes_of = tensor.rectangle.volume * tensor.itemsize
        if len(tensor.shape) > dim and tensor.shape[dim] >= files and bytes_of >= files * ALIGNMENT:
            for index in range(files):
                rows[index].append(_make_row(tensor, _cut_part(tensor.rectangle, dim, index, files)))
        else:
            load, index = loads[0]
            rows[index].append(_make_row(tensor, tensor.rectangle))
            # At least 1, so that empty tensors are spread as well.
            heapreplace(loads, (load + max(1, rows[index][-1].bytes), index))
    return rows


def _cut_part(full: Rectangle, dim: int, index: int, parts: int) -> Rectangle:
    size = full.shape[dim]
    begin, end = size * index // parts, size * (index + 1) // parts
    offset, shape = list(full.offset), list(full.shape)
    offset[dim], shape[dim] = begin, end - begin
    return Rectangle(tuple(offset), tuple(shape))


def _make_row(tensor: SavedTensor, rectangle: Rectangle) -> DatasetRow:
    return DatasetRow(tensor.name, tensor.shape, parse_dtype(tensor.dtype), rectangle.offset, rectangle.shape)


class BlockWriter:
    """Writes a shard file block by block, from bytes that come in any order.

    Incomplete blocks stay in memory; they are few if the bytes come roughly in file order.
    """

    def __init__(self, directory: Path, name: str, image: ShardImage) -> None:
        """Create the file with its final size. Raises OSError."""
        self._path, self._name, self._image = directory / name, name, image
        self._begins = [begin for begin, _ in image.structure]
        self._begun: dict[int, tuple[bytearray, int]] = {}
        self._digests: dict[int, int] = {}
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.truncate(self._file, image.size)

    def put(self, place: int, data: memoryview) -> None:
        """Put bytes of a tensor at byte `place`; each byte of the file must come once, here or with the structure."""
        at = 0
        while at < len(data):
            block, inside = divmod(place + at, BLOCK_BYTES)
            # Whole blocks go straight to the disk; only the first and the
            # last part of a tensor wait for their neighbours.
            whole_blocks = (len(data) - at) // BLOCK_BYTES * BLOCK_BYTES
            size = whole_blocks if whole_blocks and not inside else min(BLOCK_BYTES - inside, len(data) - at)
            if size >= BLOCK_BYTES:
                self._store(block, data[at : at + size])
            else:
                self._add(block, inside, data[at : at + size])
            at += size

    def close(self, seal: bytes) -> ShardFile:
        """Complete and synchronise the file, and write its digests; returns its manifest entry. Raises OSError.

        seal: of the file's contents (see shard_layout.seal_rows).
        """
        for block in range(count_blocks(self._image.size)):
            if block not in self._digests:
                self._add(block, 0, memoryview(b""))
        assert not self._begun, "bytes of a tensor are missing"
        os.fsync(self._file)
        # The file is not read again here: its pages would only push out the source's.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.abandon()
        digests = [self._digests[block] for block in range(len(self._digests))]
        table = encode_digest_table(self._image.size, digests, seal)
        write_durable_file(find_digest_table(self._path), table)
        return ShardFile(self._name, self._image.size, checksum_bytes(table))

    def abandon(self) -> None:
        """Close the file without completing it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _add(self, block: int, inside: int, data: memoryview) -> None:
        content, missing = self._begun.pop(block) if block in self._begun else self._begin(block)
        content[inside : inside + len(data)] = data
        missing -= len(data)
        if missing:
            self._begun[block] = content, missing
        else:
            self._store(block, memoryview(content))

    def _begin(self, block: int) -> tuple[bytearray, int]:
        """Return (a new block with its part of the HDF5 structure, number of bytes still missing)."""
        begin = block * BLOCK_BYTES
        end = min(begin + BLOCK_BYTES, self._image.size)
        content = bytearray(end - begin)
        missing = end - begin
        for index in range(max(0, bisect_right(self._begins, begin) - 1), len(self._begins)):
            at, text = self._image.structure[index]
            if at >= end:
                break
            part = text[max(0, begin - at) : end - at]
            to = max(at, begin) - begin
            content[to : to + len(part)] = part
            missing -= len(part)
        return content, missing

    def _store(self, first: int, data: memoryview) -> None:
        self._digests.update(enumerate(digest_blocks(data), first))
        write_at_offset(self._file, data, first * BLOCK_BYTES)


READ_BYTES = 32 << 20
"""Bytes that are read at a time."""
_ROWS = 100_000
"""Maximum datasets of files that are written at the same time; the structure takes some kilobytes for each."""
_FILES = 256
"""Maximum files that are written at the same time."""


@dataclass(frozen=True)
class StepMetadata:
    """Content of a manifest besides tensors and files (see Manifest)."""

    extra: dict[str, Any]
    finite: bool = True
    validation_loss: float | None = None
    origin: Origin | None = None


@dataclass(frozen=True)
class _OpenFile:
    """A file that is being written."""

    rows: list[DatasetRow]
    image: ShardImage
    writer: BlockWriter


@dataclass(frozen=True)
class _Destination:
    """Destination of a rectangle of a tensor: byte `place` of a file."""

    rectangle: Rectangle
    place: int
    writer: BlockWriter


def write_step(
    directory: Path,
    step: int,
    source: TensorSource,
    files: Sequence[list[DatasetRow]],
    metadata: StepMetadata,
    on_bytes: OnBytes,
) -> Path:
    """Write and commit `step` under `directory` with these rows in each file; returns its path.

    files: rows of each file; all rows together cover each tensor of the source exactly once. A file without rows is not
    written. Memory is bounded, whatever the sizes of tensors and files. Raises UserError if the step exists, and
    CheckpointError or OSError if it cannot be read or written; then nothing is committed.
    """
    refuse_existing_step(directory, step)
    # A run may be saving into the same directory.
    lock = take_lock(directory)
    try:
        return _write_step(step_path(directory, step), source, files, metadata, on_bytes, lock)
    finally:
        lock.release()


def refuse_existing_step(directory: Path, step: int) -> None:
    """Raise UserError if the step exists: a command never replaces a step."""
    if step in find_steps(directory):
        raise UserError(f"{directory}: it has a step {step} already; choose another directory")


def _write_step(
    path: Path,
    source: TensorSource,
    files: Sequence[list[DatasetRow]],
    metadata: StepMetadata,
    on_bytes: OnBytes,
    lock: Lock,
) -> Path:
    token, _ = prepare_directory(path, [sum(row.bytes for row in rows) for rows in files], CheckpointDirectory(), lock)
    temporary = uncommitted_path(path, "tmp", token)
    try:
        written: list[tuple[ShardFile, FileLayout]] = []
        _raise_file_limit()
        for group in _group_files(files):
            written += _write_group(temporary, source, group, on_bytes)
        commit_step(temporary, path, _make_manifest(path, len(files), written, metadata), lock)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def _make_manifest(
    path: Path, ranks: int, written: list[tuple[ShardFile, FileLayout]], metadata: StepMetadata
) -> Manifest:
    step = parse_step(path)
    assert step is not None, path
    return Manifest(
        step=step,
        sequence=choose_sequence_number(path.parent),
        world_size=ranks,
        step_layout=gather_layouts([layout for _, layout in written]),
        files=tuple(file for file, _ in written),
        extra=metadata.extra,
        finite=metadata.finite,
        validation_loss=metadata.validation_loss,
        origin=metadata.origin,
    )


def _group_files(files: Sequence[list[DatasetRow]]) -> Iterator[list[tuple[int, list[DatasetRow]]]]:
    """Yield groups of files to write together, as (index, rows); files without rows are left out."""
    group: list[tuple[int, list[DatasetRow]]] = []
    for index, rows in enumerate(files):
        if rows:
            group.append((index, rows))
        if len(group) == _FILES or sum(len(of_file) for _, of_file in group) > _ROWS:
            yield group
            group = []
    if group:
        yield group


def _write_group(
    temporary: Path, source: TensorSource, group: list[tuple[int, list[DatasetRow]]], on_bytes: OnBytes
) -> list[tuple[ShardFile, FileLayout]]:
    """Write the files of a group in one pass over the source: what several of them have parts of is read once."""
    opened: list[_OpenFile] = []
    try:
        for index, rows in group:
            image = make_image(rows)
            opened.append(_OpenFile(rows, image, BlockWriter(temporary, shard_file_name(index), image)))
        goals = _list_destinations(opened)
        for shards in _batch_shards([tensor for tensor in source.tensors if tensor.name in goals], goals):
            source.fill(shards)
            for shard in shards:
                _distribute(shard, goals[shard.name])
            on_bytes(sum(shard.local.nbytes for shard in shards))
        layouts = [make_file_layout(file.rows, file.image) for file in opened]
        return [(file.writer.close(layout.seal), layout) for file, layout in zip(opened, layouts, strict=True)]
    finally:
        for file in opened:
            file.writer.abandon()


def _list_destinations(opened: list[_OpenFile]) -> dict[str, list[_Destination]]:
    goals: dict[str, list[_Destination]] = {}
    for file in opened:
        for row, place in zip(file.rows, file.image.places, strict=True):
            if row.bytes:
                goals.setdefault(row.name, []).append(
                    _Destination(Rectangle(row.offset, row.local_shape), place, file.writer)
                )
    return goals


def _batch_shards(tensors: Sequence[SavedTensor], goals: dict[str, list[_Destination]]) -> Iterator[list[TensorShard]]:
    """Yield the parts of the tensors that some file needs, about READ_BYTES at a time."""
    batch: list[TensorShard] = []
    size = 0
    for tensor in tensors:
        for slab in split_slabs(
            _find_bounding_rectangle([goal.rectangle for goal in goals[tensor.name]]), READ_BYTES // tensor.itemsize
        ):
            bytes_of = slab.volume * tensor.itemsize
            if batch and size + bytes_of > READ_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(make_blank_shard(tensor, slab))
            size += bytes_of
    if batch:
        yield batch


def _find_bounding_rectangle(rectangles: Sequence[Rectangle]) -> Rectangle:
    """Return the smallest rectangle that contains all rectangles."""
    begin = [min(offsets) for offsets in zip(*(r.offset for r in rectangles), strict=True)]
    ends = ([at + size for at, size in zip(r.offset, r.shape, strict=True)] for r in rectangles)
    end = [max(in_dim) for in_dim in zip(*ends, strict=True)]
    return Rectangle(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))


def _distribute(shard: TensorShard, goals: list[_Destination]) -> None:
    """Give every file its part of a slab, which is contiguous in the file too."""
    slab = Rectangle(shard.offset, tuple(shard.local.shape))
    for goal in goals:
        common = slab.overlap(goal.rectangle)
        if common is None:
            continue
        part = shard.local[make_slices(common.start_in(slab), common.shape)].contiguous()
        at = 0
        # Row-major place of the first element: a slab covers all of
        # the inner dimensions, so its elements are contiguous.
        for start, size in zip(common.start_in(goal.rectangle), goal.rectangle.shape, strict=True):
            at = at * size + start
        data: Any = part.reshape(-1).view(torch.uint8).numpy()
        goal.writer.put(goal.place + at * shard.dtype.itemsize, memoryview(data))


def _raise_file_limit() -> None:
    """Raise the limit on open files: source and destination may need more than the default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
