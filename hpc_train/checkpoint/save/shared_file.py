"""Lay out and write a file that several ranks share; writer_group.py says which ranks share one, and when each writes.

The layout of a rank's section follows from its own rows alone, so a rank stages its tensors without communication and
learns only at the write where its section begins. The first rank of a file writes the HDF5 structure and the digests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from h5py import h5d, h5s

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, BlockDigests, count_blocks, digest_blocks
from hpc_train.checkpoint.format.hdf5_layout import (
    ALIGNMENT,
    DatasetRow,
    DatasetWriter,
    ShardImage,
    make_anonymous_file,
    name_datasets,
    open_hdf5,
)
from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.shard_layout import FileLayout
from hpc_train.checkpoint.save.file_writer import reserve_space
from hpc_train.checkpoint.save.parallel_hdf5 import DatasetBytes, write_datasets
from hpc_train.checkpoint.save.shard_file import StagedShard, write_digest_table
from hpc_train.checkpoint.storage.file_system import WritePolicy, open_descriptor, write_at_offset

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_NamedRow = tuple[str, DatasetRow]


@dataclass(frozen=True)
class SharedFileHead:
    """HDF5 structure of a shared file, and the place of each rank's section."""

    content: bytes
    """HDF5 structure: the bytes before the first section, whole blocks."""
    begins: tuple[int, ...]
    """Byte of the file at which each rank's section begins; 0 for one without data."""
    places: tuple[tuple[int, ...], ...]
    """For each rank, the byte of its section at which each row begins; 0 for a row without elements."""
    size: int
    """Bytes of the file, whole blocks."""


def make_section(rows: Sequence[DatasetRow]) -> ShardImage:
    """Lay out a rank's section: whole blocks, with zeros between its rows. Raises as make_image."""
    (places,) = make_shared_head([rows], BLOCK_BYTES).places
    data = sorted((place, place + row.bytes) for row, place in zip(rows, places, strict=True) if row.bytes)
    end = count_section_bytes(rows, places)
    gaps = zip([0, *(stop for _, stop in data)], [*(begin for begin, _ in data), end], strict=True)
    return ShardImage(end, places, tuple((begin, bytes(stop - begin)) for begin, stop in gaps if stop > begin))


def count_section_bytes(rows: Sequence[DatasetRow], places: Sequence[int]) -> int:
    """Return the bytes of a section: whole blocks, so that no block belongs to two ranks."""
    end = max((place + row.bytes for row, place in zip(rows, places, strict=True) if row.bytes), default=0)
    return -(-end // BLOCK_BYTES) * BLOCK_BYTES


def make_shared_head(members: Sequence[Sequence[DatasetRow]], interval: int) -> SharedFileHead:
    """Lay out the shared file of ranks with these rows.

    interval: every section begins at a multiple of it; itself a multiple of BLOCK_BYTES.

    Raises CheckpointError for a dtype that HDF5 does not have, OSError where there is no room for a small file.
    """
    assert interval % BLOCK_BYTES == 0, interval
    with make_anonymous_file(lambda path: _make_head(path, members, interval)) as (head, _):
        return head


def _make_head(path: Path, members: Sequence[Sequence[DatasetRow]], interval: int) -> SharedFileHead:
    """Create all datasets first, then allocate the data rank by rank: HDF5 allocates at the end of the file."""
    named = _create_datasets(path, members)
    sections = [_allocate_section(path, of_rank, interval) for of_rank in named]
    begins, places = tuple(begin for begin, _ in sections), tuple(of_rank for _, of_rank in sections)
    # Everything before the first section is structure; all data lies behind it.
    with path.open("rb") as file:
        content = file.read(min(filter(None, begins), default=-1))
    content = content.ljust(-(-len(content) // BLOCK_BYTES) * BLOCK_BYTES, b"\0")
    assert not any(begins) or len(content) == min(filter(None, begins)), (len(content), begins)
    ends = [begin + count_section_bytes(rows, at) for begin, rows, at in zip(begins, members, places, strict=True)]
    return SharedFileHead(content, begins, places, max(len(content), *ends))


def _create_datasets(path: Path, members: Sequence[Sequence[DatasetRow]]) -> list[list[_NamedRow]]:
    """Create datasets without allocating their data; returns their names and rows, for each rank."""
    names = iter(name_datasets(row.name for rows in members for row in rows))
    named = [[(next(names), row) for row in rows] for rows in members]
    with open_hdf5(path, "w") as file:
        writer = DatasetWriter(file, late=True)
        for of_rank in named:
            for name, row in of_rank:
                writer.create(name, row)
    return named


def _allocate_section(path: Path, named: Sequence[_NamedRow], interval: int) -> tuple[int, tuple[int, ...]]:
    """Place the rows of one rank; returns (begin of its section, place of each row in it).

    HDF5 forgets free space when a file is closed, so it never places one rank's data between another's. The largest row
    is placed first: its alignment decides where the section begins.
    """
    largest = max(range(len(named)), key=lambda index: named[index][1].bytes, default=None)
    if largest is None or not named[largest][1].bytes:
        return 0, (0,) * len(named)
    # Opened twice, because HDF5's alignment applies to the whole open file: once for the section's begin, at a multiple
    # of `interval`, and once for the other rows, which are packed behind it.
    with open_hdf5(path, "r+", min(ALIGNMENT, named[largest][1].bytes), interval) as file:
        begin = _place_dataset(file, named[largest])
    with open_hdf5(path, "r+") as file:
        rest = [begin if index == largest else _place_dataset(file, row) for index, row in enumerate(named)]
    assert begin % interval == 0, (begin, interval)
    assert all(place >= begin for place, (_, row) in zip(rest, named, strict=True) if row.bytes), (begin, rest)
    return begin, tuple(max(place - begin, 0) for place in rest)


def _place_dataset(file: Any, named: _NamedRow) -> int:
    """Write one element, so that HDF5 allocates the dataset; returns its byte, 0 for a row without elements."""
    name, row = named
    if not row.bytes:
        return 0
    dataset = h5d.open(file.id, name.encode())
    # HDF5 allocates a late dataset when its first element is written.
    all_of, element = dataset.get_space(), (1,) * len(row.local_shape)
    if element:
        all_of.select_hyperslab((0,) * len(element), element)
    one = h5s.create_simple(element) if element else h5s.create(h5s.SCALAR)
    dataset.write(one, all_of, np.zeros(element, dtype=f"V{row.dtype.itemsize}"), dataset.get_type())
    place: int = dataset.get_offset()
    return place


_MINIMUM_RATIO = 4
"""Minimum size of an average section, in writes, for sections to be aligned to stripes: else gaps cost too much."""


class FileSection(NamedTuple):
    """The section of a shared file that one rank writes."""

    begin: int
    """Byte of the file where its section begins."""
    names: tuple[str, ...]
    """Names of its datasets."""
    shared: bool
    """Whether the file exists, because some rank has data."""


@dataclass
class SharedFile:
    """A file of several ranks, as the first of them manages it; its layout is cached until a rank's rows change."""

    layouts: list[FileLayout] = field(default_factory=list)
    """Layout of each rank's section."""
    _interval: int = BLOCK_BYTES
    _head: SharedFileHead | None = None

    def create(self, path: Path, updates: Sequence[FileLayout | None], policy: WritePolicy) -> list[FileSection]:
        """Create the file without its sections, unless no rank has data; returns the section of each rank.

        updates: the layout of each rank, None if it has not changed. The content is synchronised, the name is not.
        Raises OSError, and CheckpointError as make_shared_head.
        """
        layouts = [old if new is None else new for new, old in zip(updates, self.layouts or updates, strict=True)]
        assert all(layout is not None for layout in layouts), "a rank has sent no layout yet"
        self._update_layout([layout for layout in layouts if layout is not None], policy)
        assert self._head is not None
        if self._rows:
            with open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                # The final size from the start: each rank writes its section at its place, in any order.
                reserve_space(file, self._head.size) if policy.reserve else os.ftruncate(file, self._head.size)
                write_at_offset(file, memoryview(self._head.content), 0)
                os.fsync(file)
        names = iter(name_datasets(self._rows))
        sections = zip(self._head.begins, self.layouts, strict=True)
        return [
            FileSection(begin, tuple(next(names) for _ in layout.rows), bool(self._rows)) for begin, layout in sections
        ]

    def restore_size(self, path: Path) -> None:
        """Restore the size of the file, which HDF5's parallel driver cuts after the last dataset.

        Raises OSError, and CheckpointError if HDF5 changed the structure.
        """
        if not self._rows:
            return
        assert self._head is not None
        with open_descriptor(path, os.O_RDWR) as file:
            os.ftruncate(file, self._head.size)
            os.fsync(file)
            if os.pread(file, len(self._head.content), 0) != self._head.content:
                raise CheckpointError("HDF5 changed the structure of a file while the data was written")

    def write_digests(
        self, directory: Path, name: str, digests: Sequence[Sequence[int]]
    ) -> tuple[tuple[ShardFile, FileLayout], ...]:
        """Write the table of digests, if there is a file. digests: of the blocks of each rank's section."""
        if not self._rows:
            return ()
        assert self._head is not None
        places = [
            begin + place if row.bytes else 0
            for begin, section in zip(self._head.begins, self.layouts, strict=True)
            for row, place in zip(section.rows, section.places, strict=True)
        ]
        layout = FileLayout(tuple(row for section in self.layouts for row in section.rows), tuple(places))
        return (
            (write_digest_table(directory, name, self._head.size, self._make_table(digests).tolist(), layout), layout),
        )

    @property
    def _rows(self) -> list[str]:
        """Names of the tensors of all ranks, in file order."""
        return [row.name for layout in self.layouts for row in layout.rows]

    def _update_layout(self, layouts: list[FileLayout], policy: WritePolicy) -> None:
        interval = _choose_interval(layouts, policy)
        if self._head is None or (layouts, interval) != (self.layouts, self._interval):
            self._head = None  # so that nothing stale is left if making the new one raises
            self.layouts, self._interval = layouts, interval
            self._head = make_shared_head([layout.rows for layout in layouts], interval)
        assert self._head.places == tuple(layout.places for layout in layouts), (
            "a rank has laid out its own section in another way"
        )

    def _make_table(self, digests_of_ranks: Sequence[Sequence[int]]) -> BlockDigests:
        """Return the digests of all blocks; blocks between sections, which no rank writes, are zeros."""
        assert self._head is not None
        (zeros,) = digest_blocks(memoryview(bytes(BLOCK_BYTES)))
        table = np.full(count_blocks(self._head.size), zeros, dtype=np.uint64)
        of_head = digest_blocks(memoryview(self._head.content))
        sections = zip((0, *self._head.begins), (of_head, *digests_of_ranks), strict=True)
        for begin, digests in sections:
            table[begin // BLOCK_BYTES : begin // BLOCK_BYTES + len(digests)] = np.asarray(digests, dtype=np.uint64)
        return table


def _choose_interval(layouts: Sequence[FileLayout], policy: WritePolicy) -> int:
    """Align sections to Lustre stripes where that is worth the gaps between them."""
    total = sum(count_section_bytes(layout.rows, layout.places) for layout in layouts)
    worth = policy.kind == "lustre" and total >= _MINIMUM_RATIO * policy.write_bytes * len(layouts)
    return policy.write_bytes if worth else BLOCK_BYTES


def list_datasets(section: FileSection, shard: StagedShard | None) -> list[DatasetBytes]:
    """Return the datasets of a rank with their bytes, for HDF5's parallel driver."""
    if shard is None:
        return []
    assert isinstance(shard.image, memoryview)
    rows = zip(section.names, shard.layout.rows, shard.layout.places, strict=True)
    return [DatasetBytes(name, shard.image[place : place + row.bytes]) for name, row, place in rows if row.bytes]


def write_by_mpi(path: Path, section: FileSection, shard: StagedShard | None, ranks: Intracomm) -> list[int]:
    """Write a section through MPI; returns the digests of its blocks.

    Ranks without data take part too, unless no rank has any.
    """
    if section.shared:
        write_datasets(path, ranks, list_datasets(section, shard))
    if shard is None:
        return []
    assert isinstance(shard.image, memoryview)
    return digest_blocks(shard.image[: shard.size])
