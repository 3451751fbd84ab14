"""Stage a rank's tensors in memory and write them as one shard file, compressed or not.

`ShardStager` reuses its memory from save to save. Compressed files are in compressed_file.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc_train.checkpoint.format.block_digests import encode_digest_table, find_digest_table
from hpc_train.checkpoint.format.compressed_chunks import PartTable
from hpc_train.checkpoint.format.hdf5_layout import (
    DatasetRow,
    ShardImage,
    make_image,
    make_row,
)
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.shard_layout import FileLayout, make_file_layout, seal_table
from hpc_train.checkpoint.save.compressed_file import RowInMemory, write_compressed_file
from hpc_train.checkpoint.save.file_writer import (
    GatherBuffers,
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
    write_durable_file,
)
from hpc_train.interfaces import TensorShard

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
    files: list[ShardFile] = []

    def write_table(digests: list[int]) -> None:
        if not files:
            files.append(write_digest_table(directory, name, shard.size, digests, shard.layout))

    write_stream(path, WriteStream(shard.check.read, shard.size, True, shard.check.digests, write_table), policy)
    return files[0], shard.layout


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
    file = write_compressed_file(directory / name, list(rows), shard.level, policy, shard.buffers)
    return write_digest_table(directory, name, file.size, file.digests, layout, file.parts, size), layout


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
    write_durable_file(find_digest_table(directory / name), table)
    return ShardFile(name, size, checksum_bytes(table), inflated=inflated)
