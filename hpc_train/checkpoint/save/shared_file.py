"""Let several ranks write one file: which ranks share a file, when each writes, and where its section lies.

The layout of a rank's section follows from its own rows alone, so a rank stages its tensors without communication and
learns only at the write where its section begins. The first rank of a file writes the HDF5 structure and the digests.
`WriteTurns` limits how many ranks of a node write at a time, for links and disks that are slower with many streams.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
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
from hpc_train.checkpoint.rank_consensus import (
    capture_failure,
    gather_on_subset,
    raise_failure,
    receive_object,
    send_object,
)
from hpc_train.checkpoint.save.file_writer import WriteStream, reserve_space, write_file_part
from hpc_train.checkpoint.save.local_stage import LocalFile
from hpc_train.checkpoint.save.parallel_hdf5 import DatasetBytes, write_datasets
from hpc_train.checkpoint.save.shard_file import StagedShard, write_digest_table
from hpc_train.checkpoint.storage.file_system import WritePolicy, open_descriptor, write_at_offset
from hpc_train.checkpoint.storage.step_directory import shard_file_name
from hpc_train.errors import LostRanksError
from hpc_train.interfaces import World
from hpc_train.runtime.consensus import report_lost_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup

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
    found = [_allocate_section(path, of_rank, interval) for of_rank in named]
    begins, places = tuple(begin for begin, _ in found), tuple(of_rank for _, of_rank in found)
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
        self, directory: Path, name: str, found: Sequence[Sequence[int]]
    ) -> tuple[tuple[ShardFile, FileLayout], ...]:
        """Write the table of digests, if there is a file. found: digests of the blocks of each rank's section."""
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
            (write_digest_table(directory, name, self._head.size, self._make_table(found).tolist(), layout), layout),
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

    def _make_table(self, found: Sequence[Sequence[int]]) -> BlockDigests:
        """Return the digests of all blocks; blocks between sections, which no rank writes, are zeros."""
        assert self._head is not None
        (zeros,) = digest_blocks(memoryview(bytes(BLOCK_BYTES)))
        table = np.full(count_blocks(self._head.size), zeros, dtype=np.uint64)
        sections = zip((0, *self._head.begins), (digest_blocks(memoryview(self._head.content)), *found), strict=True)
        for begin, digests in sections:
            table[begin // BLOCK_BYTES : begin // BLOCK_BYTES + len(digests)] = np.asarray(digests, dtype=np.uint64)
        return table


def _choose_interval(layouts: Sequence[FileLayout], policy: WritePolicy) -> int:
    """Align sections to Lustre stripes where that is worth the gaps between them."""
    total = sum(count_section_bytes(layout.rows, layout.places) for layout in layouts)
    worth = policy.kind == "lustre" and total >= _MINIMUM_RATIO * policy.write_bytes * len(layouts)
    return policy.write_bytes if worth else BLOCK_BYTES


T = TypeVar("T")


@dataclass(frozen=True)
class WriteTurns:
    """A rank's turn to write: wait for rank `before`, write, let rank `after` write. None: no such rank."""

    before: int | None = None
    after: int | None = None

    def run(self, work: Callable[[], T], group: ProcessGroup | None = None) -> T:
        """Call `work` when it is this rank's turn, and pass the turn on even if it fails.

        Raises LostRanksError if the rank before is gone, or does not end within the group's timeout.
        """
        try:
            if self.before is not None:
                receive_object(self.before, group)
            return work()
        finally:
            if self.after is not None:
                with suppress(LostRanksError):  # a lost rank fails the save when all meet
                    send_object(None, self.after, group)


def assign_turns(rank: int, nodes: Sequence[int], writers: int) -> WriteTurns:
    """Return the turn of a rank so that at most `writers` ranks of a node write at a time; 0: no limit.

    nodes: the node of each rank.
    """
    # Rank i of the node waits for rank i - writers, so that `writers` chains of ranks run side by side.
    node_ranks = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    at = node_ranks.index(rank)
    if not writers:
        return WriteTurns()
    before = node_ranks[at - writers] if at >= writers else None
    after = node_ranks[at + writers] if at + writers < len(node_ranks) else None
    return WriteTurns(before, after)


_EMPTY_LAYOUT = FileLayout((), ())


@dataclass
class SharedFileWriters:
    """The ranks that write one file together. A layout is sent to the first of them only when it has changed."""

    ranks: Sequence[int]
    rank: int
    group: ProcessGroup | None = None
    mpi: Intracomm | None = None
    """Communicator of these ranks, if they write through HDF5's parallel driver."""
    _sent_layout: FileLayout | None = None
    _file: SharedFile = field(default_factory=SharedFile)
    """Used on the first rank."""

    def write(
        self, directory: Path, name: str, shard: StagedShard | None, policy: WritePolicy, write_turns: WriteTurns
    ) -> tuple[tuple[ShardFile, FileLayout], ...]:
        """Write and synchronise a file and its table of digests. A collective of the file's ranks.

        shard: a staged section; None if this rank has nothing. Returns the file and its layout on the first rank, if
        any rank has data, and nothing on the others. If a rank fails, all raise, as gather_on_subset does.
        """
        path = directory / name
        section = capture_failure(lambda: self._create_file(path, shard, policy))

        def write_section() -> list[int]:
            return write_turns.run(lambda: self._write(path, raise_failure(section), shard, policy), self.group)

        return gather_on_subset(
            self.ranks, self.rank, write_section, lambda found: self._finish_file(directory, name, found), self.group
        )

    def _create_file(self, path: Path, shard: StagedShard | None, policy: WritePolicy) -> FileSection:
        layout = shard.layout if shard is not None else _EMPTY_LAYOUT
        updates, self._sent_layout = layout if layout != self._sent_layout else None, None
        section = gather_on_subset(
            self.ranks, self.rank, lambda: updates, lambda all_of: self._file.create(path, all_of, policy), self.group
        )
        self._sent_layout = layout  # not after an error, when it is not known what the first rank received
        return section

    def _write(self, path: Path, section: FileSection, shard: StagedShard | None, policy: WritePolicy) -> list[int]:
        """Write this rank's section; returns the digests of its blocks."""
        if self.mpi is not None:
            return _write_by_mpi(path, section, shard, self.mpi)
        if shard is None:
            return []
        if isinstance(shard.image, LocalFile):
            return shard.image.copy_into(path, section.begin, policy)
        memory = shard.image
        part = WriteStream(lambda begin, end: memory[begin:end], shard.size, memory_stays=True)
        return write_file_part(path, section.begin, part, policy)

    def _finish_file(
        self, directory: Path, name: str, found: Sequence[Sequence[int]]
    ) -> list[tuple[tuple[ShardFile, FileLayout], ...]]:
        if self.mpi is not None:
            self._file.restore_size(directory / name)
        return [self._file.write_digests(directory, name, found), *(() for _ in self.ranks[1:])]


def list_datasets(section: FileSection, shard: StagedShard | None) -> list[DatasetBytes]:
    """Return the datasets of a rank with their bytes, for HDF5's parallel driver."""
    if shard is None:
        return []
    assert isinstance(shard.image, memoryview)
    rows = zip(section.names, shard.layout.rows, shard.layout.places, strict=True)
    return [DatasetBytes(name, shard.image[place : place + row.bytes]) for name, row, place in rows if row.bytes]


def _write_by_mpi(path: Path, section: FileSection, shard: StagedShard | None, ranks: Intracomm) -> list[int]:
    """Write a section through MPI; returns the digests of its blocks.

    Ranks without data take part too, unless no rank has any.
    """
    if section.shared:
        write_datasets(path, ranks, list_datasets(section, shard))
    if shard is None:
        return []
    assert isinstance(shard.image, memoryview)
    return digest_blocks(shard.image[: shard.size])


@dataclass(frozen=True)
class WriterSharing:
    """Settings of how ranks share files and take turns (see config.train.CheckpointConfig)."""

    ranks_per_file: int = 1
    writers_per_node: int = 0
    parallel_hdf5: bool = False

    @property
    def shares_files(self) -> bool:
        """Whether several ranks may write one file."""
        return self.parallel_hdf5 or self.ranks_per_file != 1


@dataclass(frozen=True)
class WriterGroup:
    """Which ranks write which file, as one rank sees it; valid as long as the process group."""

    files: tuple[range, ...]
    """Ranks of each file."""
    number: int
    """Index of this rank's file."""
    shared_file: SharedFileWriters | None = None
    """The writers of this rank's file, if files are shared."""
    write_turns: WriteTurns = field(default_factory=WriteTurns)
    group: ProcessGroup | None = None

    def sum_by_file(self, values: Sequence[int]) -> list[int]:
        """Sum values of ranks over the ranks of each file."""
        return [sum(values[ranks.start : ranks.stop]) for ranks in self.files]

    @property
    def file_name(self) -> str:
        """Path of this rank's file within the directory of the step."""
        return shard_file_name(self.number, self.files[self.number])


def group_ranks_by_file(nodes: Sequence[int], ranks_per_file: int) -> tuple[range, ...]:
    """Return the ranks of each file: `ranks_per_file` consecutive ranks of a node; 0: all ranks of a node.

    nodes: the node of each rank.
    """
    files = []
    for _, run in groupby(range(len(nodes)), key=lambda rank: nodes[rank]):
        ranks = list(run)
        count = ranks_per_file or len(ranks)
        files += [range(at, min(at + count, ranks[-1] + 1)) for at in range(ranks[0], ranks[-1] + 1, count)]
    return tuple(files)


def make_writer_group(
    world: World, sharing: WriterSharing, group: ProcessGroup | None, mpi: Intracomm | None
) -> WriterGroup | None:
    """Group the ranks by file; None if each rank writes its own file at any time. A collective.

    mpi: communicator of all ranks, for sharing.parallel_hdf5, which writes one file. Raises LostRanksError.
    """
    if sharing == WriterSharing():
        return None
    nodes = _gather_nodes(world, group)
    files = (range(world.size),) if mpi is not None else group_ranks_by_file(nodes, sharing.ranks_per_file)
    number = next(index for index, ranks in enumerate(files) if world.rank in ranks)
    shared_file = SharedFileWriters(files[number], world.rank, group, mpi) if sharing.shares_files else None
    return WriterGroup(files, number, shared_file, assign_turns(world.rank, nodes, sharing.writers_per_node), group)


def _gather_nodes(world: World, group: ProcessGroup | None) -> list[int]:
    """Return the node of each rank."""
    found = list(torch.empty(world.size, 1, dtype=torch.int64))
    with report_lost_ranks():
        dist.all_gather(found, torch.tensor([world.node]), group=group)
    return [int(node) for node in found]
