"""Write a step in one process and little memory, from tensors read a part at a time; commit it as a save does.

TensorSource   tensors by name and rectangle, wherever they are: a committed step, a state dict, another library's files
cut_rows       which file gets which rectangle
BlockWriter    a shard file whose bytes come in any order
write_step     all of it
"""

from __future__ import annotations

import os
import resource
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from heapq import heapreplace
from pathlib import Path
from typing import Any, Protocol

import torch

from hpc_train.checkpoint.format.block_digests import (
    BLOCK_BYTES,
    count_blocks,
    digest_blocks,
    digest_table_path,
    encode_digest_table,
)
from hpc_train.checkpoint.format.hdf5_layout import (
    ALIGNMENT,
    DatasetRow,
    ShardImage,
    dtype_name,
    make_image,
    parse_dtype,
)
from hpc_train.checkpoint.format.manifest import Manifest, ShardFile
from hpc_train.checkpoint.format.rectangle import Rectangle, split_slabs
from hpc_train.checkpoint.format.shard_layout import FileLayout, SavedTensor, gather_layouts, make_file_layout
from hpc_train.checkpoint.load.load_step import check_reads, plan_reads, report_damage
from hpc_train.checkpoint.load.read_schedule import LoadDestinations
from hpc_train.checkpoint.load.reader import TensorReader
from hpc_train.checkpoint.load.verified_reader import ShardReader
from hpc_train.checkpoint.provenance import Origin
from hpc_train.checkpoint.save.save_step import commit_step, prepare_directory
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.file_system import checksum_bytes, write_at_offset, write_durable_file
from hpc_train.checkpoint.storage.lock import Lock, take_lock
from hpc_train.checkpoint.storage.step_directory import (
    find_steps,
    next_sequence_number,
    parse_step,
    shard_file_name,
    step_path,
    uncommitted_path,
)
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard

_OPEN_FILES = 1000

OnBytes = Callable[[int], object]
"""Takes the number of bytes done since the last call."""
Progress = Callable[[str, int], AbstractContextManager[OnBytes]]
"""Shows progress while its context is open, given a title and the total of bytes."""


class TensorSource(Protocol):
    """Logical tensors, and a way to read parts of them."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """In the order in which reading them is cheapest."""

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Read into `local` of every shard. Raises CheckpointError or OSError."""


class SavedStepTensors:
    """Of a committed step, verified block by block as they are read."""

    def __init__(self, path: Path, manifest: Manifest, where: str) -> None:
        self._path, self._manifest, self._where = path, manifest, where
        self._source = ShardReader(path, manifest)
        self._open: set[int] = set()

    def __enter__(self) -> SavedStepTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.__exit__()

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """All of the step."""
        return self._manifest.step_layout.tensors

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """As loading does, in one process."""
        plan = plan_reads(shards, self._manifest, self._where)
        self._make_room(set(plan["file"].tolist()))
        targets = LoadDestinations(shards)
        report_damage(self._where, lambda: check_reads(plan, self._source, targets))
        report_damage(self._where, lambda: TensorReader(self._source, shards, targets).run(plan))
        targets.finish()

    def _make_room(self, files: set[int]) -> None:
        """A process may not have as many open files as a step has."""
        if len(self._open | files) > _OPEN_FILES:
            self._source.__exit__()
            self._source, self._open = ShardReader(self._path, self._manifest), set()
        self._open |= files


@dataclass(frozen=True)
class StateDictTensors:
    """Of a state dict, whose tensors may be views of mapped files."""

    state: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    """That they are to have."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """In the order of the state dict."""
        return [SavedTensor(name, dtype_name(self.dtypes[name]), tuple(it.shape)) for name, it in self.state.items()]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Copied, and converted where the type differs."""
        for shard in shards:
            spans = zip(shard.offset, shard.local.shape, strict=True)
            where = tuple(slice(begin, begin + size) for begin, size in spans)
            shard.local.copy_(self.state[shard.name][where])


def make_blank_shard(tensor: SavedTensor, rectangle: Rectangle) -> TensorShard:
    """A shard to be filled."""
    dtype = parse_dtype(tensor.dtype)
    return TensorShard(tensor.name, tensor.shape, dtype, rectangle.offset, torch.empty(rectangle.shape, dtype=dtype))


def read_whole_tensors(source: TensorSource, tensors: Sequence[SavedTensor]) -> dict[str, torch.Tensor]:
    """These tensors, whole, in memory."""
    shards = [make_blank_shard(tensor, tensor.rectangle) for tensor in tensors]
    source.fill([shard for shard in shards if shard.local.numel()])
    return {shard.name: shard.local for shard in shards}


def cut_rows(tensors: Sequence[SavedTensor], files: int, dim: int) -> list[list[DatasetRow]]:
    """The rows of every file: dimension `dim` in parts as even as can be.

    A tensor that has no such dimension, is too short there or too small to be worth it goes whole to the file that has
    least so far.
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
            heapreplace(loads, (load + max(1, rows[index][-1].bytes), index))
    return rows


def _cut_part(whole: Rectangle, dim: int, index: int, parts: int) -> Rectangle:
    size = whole.shape[dim]
    begin, end = size * index // parts, size * (index + 1) // parts
    offset, shape = list(whole.offset), list(whole.shape)
    offset[dim], shape[dim] = begin, end - begin
    return Rectangle(tuple(offset), tuple(shape))


def _make_row(tensor: SavedTensor, rectangle: Rectangle) -> DatasetRow:
    return DatasetRow(tensor.name, tensor.shape, parse_dtype(tensor.dtype), rectangle.offset, rectangle.shape)


class BlockWriter:
    """Holds the blocks that are begun and not whole; those are few if the bytes come about in their order."""

    def __init__(self, directory: Path, name: str, image: ShardImage) -> None:
        """A new file, as long as it will be. Raises OSError."""
        self._path, self._name, self._image = directory / name, name, image
        self._begins = [begin for begin, _ in image.structure]
        self._begun: dict[int, tuple[bytearray, int]] = {}
        self._digests: dict[int, int] = {}
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.truncate(self._file, image.size)

    def put(self, place: int, data: memoryview) -> None:
        """Bytes of a tensor; each byte of the file comes once, here or with the structure."""
        at = 0
        while at < len(data):
            block, inside = divmod(place + at, BLOCK_BYTES)
            whole = (len(data) - at) // BLOCK_BYTES * BLOCK_BYTES
            size = whole if whole and not inside else min(BLOCK_BYTES - inside, len(data) - at)
            if size >= BLOCK_BYTES:
                self._store(block, data[at : at + size])
            else:
                self._add(block, inside, data[at : at + size])
            at += size

    def close(self, seal: bytes) -> ShardFile:
        """Complete and fsync the file, and write its digests beside it. Raises OSError.

        seal: of the file's contents (see Held).
        """
        for block in range(count_blocks(self._image.size)):
            if block not in self._digests:
                self._add(block, 0, memoryview(b""))
        assert not self._begun, "bytes of a tensor are missing"
        os.fsync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self.abandon()
        digests = [self._digests[block] for block in range(len(self._digests))]
        table = encode_digest_table(self._image.size, digests, seal)
        write_durable_file(digest_table_path(self._path), table)
        return ShardFile(self._name, self._image.size, checksum_bytes(table))

    def abandon(self) -> None:
        """Close the file as it is."""
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
        """(a block with its part of the structure, the number of its bytes that are still to come)."""
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
"""Datasets of the files that are written at the same time; their structure is some kilobytes each."""
_FILES = 256
ReportProgress = Callable[[int], object]


@dataclass(frozen=True)
class StepMetadata:
    """What a manifest says beside tensors and files (see Manifest)."""

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
    """Where a rectangle of a tensor goes."""

    rectangle: Rectangle
    place: int
    writer: BlockWriter


def write_step(
    directory: Path,
    step: int,
    source: TensorSource,
    files: Sequence[list[DatasetRow]],
    about: StepMetadata,
    tell: ReportProgress,
) -> Path:
    """Commit `step` under `directory` with these rows in each file; returns where it is.

    files: of the source's tensors; all together cover each exactly once. Those without a row are not written.
    tell: is called with the bytes that were read. Memory is bounded, whatever the sizes of tensors and files.
    Raises UserError if the step is there, CheckpointError or OSError if it cannot be read or written: then nothing is.
    """
    refuse_existing_step(directory, step)
    lock = take_lock(directory)
    try:
        return _write_step(step_path(directory, step), source, files, about, tell, lock)
    finally:
        lock.release()


def refuse_existing_step(directory: Path, step: int) -> None:
    """Raise UserError if the step is there: a command never replaces one."""
    if step in find_steps(directory):
        raise UserError(f"{directory}: it has a step {step} already; choose another directory")


def _write_step(
    path: Path,
    source: TensorSource,
    files: Sequence[list[DatasetRow]],
    about: StepMetadata,
    tell: ReportProgress,
    lock: Lock,
) -> Path:
    token, _ = prepare_directory(path, [sum(row.bytes for row in rows) for rows in files], CheckpointDirectory(), lock)
    temporary = uncommitted_path(path, "tmp", token)
    try:
        written: list[tuple[ShardFile, FileLayout]] = []
        _raise_file_limit()
        for group in _group_files(files):
            written += _write_group(temporary, source, group, tell)
        commit_step(temporary, path, _make_manifest(path, len(files), written, about), lock)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def _make_manifest(
    path: Path, ranks: int, written: list[tuple[ShardFile, FileLayout]], about: StepMetadata
) -> Manifest:
    step = parse_step(path)
    assert step is not None, path
    step_layout = gather_layouts([held for _, held in written])
    files = tuple(file for file, _ in written)
    told = (about.extra, about.finite, about.validation_loss, about.origin)
    return Manifest(step, next_sequence_number(path.parent), ranks, step_layout, files, *told)


def _group_files(files: Sequence[list[DatasetRow]]) -> Iterator[list[tuple[int, list[DatasetRow]]]]:
    """(index, rows) of files that are written together, in order; those without a row are left out."""
    group: list[tuple[int, list[DatasetRow]]] = []
    for index, rows in enumerate(files):
        if rows:
            group.append((index, rows))
        if len(group) == _FILES or sum(len(it) for _, it in group) > _ROWS:
            yield group
            group = []
    if group:
        yield group


def _write_group(
    temporary: Path, source: TensorSource, group: list[tuple[int, list[DatasetRow]]], tell: ReportProgress
) -> list[tuple[ShardFile, FileLayout]]:
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
            tell(sum(shard.local.nbytes for shard in shards))
        held = [make_file_layout(it.rows, it.image) for it in opened]
        return [(it.writer.close(of.seal), of) for it, of in zip(opened, held, strict=True)]
    finally:
        for it in opened:
            it.writer.abandon()


def _list_destinations(opened: list[_OpenFile]) -> dict[str, list[_Destination]]:
    goals: dict[str, list[_Destination]] = {}
    for it in opened:
        for row, place in zip(it.rows, it.image.places, strict=True):
            if row.bytes:
                goals.setdefault(row.name, []).append(
                    _Destination(Rectangle(row.offset, row.local_shape), place, it.writer)
                )
    return goals


def _batch_shards(tensors: Sequence[SavedTensor], goals: dict[str, list[_Destination]]) -> Iterator[list[TensorShard]]:
    """Pieces of all that has a goal, about PART bytes at a time."""
    batch: list[TensorShard] = []
    size = 0
    for tensor in tensors:
        for slab in split_slabs(
            _bounding_rectangle([goal.rectangle for goal in goals[tensor.name]]), READ_BYTES // tensor.itemsize
        ):
            bytes_of = slab.volume * tensor.itemsize
            if batch and size + bytes_of > READ_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(make_blank_shard(tensor, slab))
            size += bytes_of
    if batch:
        yield batch


def _bounding_rectangle(rectangles: Sequence[Rectangle]) -> Rectangle:
    """The smallest rectangle that has all of them."""
    begin = [min(it) for it in zip(*(r.offset for r in rectangles), strict=True)]
    ends = ([at + size for at, size in zip(r.offset, r.shape, strict=True)] for r in rectangles)
    end = [max(it) for it in zip(*ends, strict=True)]
    return Rectangle(tuple(begin), tuple(b - a for a, b in zip(begin, end, strict=True)))


def _distribute(shard: TensorShard, goals: list[_Destination]) -> None:
    """Give every file its part of a slab: a slab is contiguous there too."""
    slab = Rectangle(shard.offset, tuple(shard.local.shape))
    for goal in goals:
        common = slab.overlap(goal.rectangle)
        if common is None:
            continue
        starts = zip(common.start_in(slab), common.shape, strict=True)
        part = shard.local[tuple(slice(at, at + size) for at, size in starts)].contiguous()
        at = 0
        for start, size in zip(common.start_in(goal.rectangle), goal.rectangle.shape, strict=True):
            at = at * size + start
        data: Any = part.reshape(-1).view(torch.uint8).numpy()
        goal.writer.put(goal.place + at * shard.dtype.itemsize, memoryview(data))


def _raise_file_limit() -> None:
    """Both sides of a step may have more files than a process has by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
