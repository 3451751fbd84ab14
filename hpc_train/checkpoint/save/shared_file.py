"""Write one file with several ranks: which ranks share a file, who writes when, and where each rank's section lies.

Where a rank's tensors lie in its section follows from its own rows alone. So a rank copies them to their places
without a word to the others, and hears where its section begins once it writes. The first rank of a file makes its
structure and its digests. `WriteTurns` lets few ranks of a node write at a time, where its link or its disk is slower
with many streams.
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
from hpc_train.checkpoint.save.file_writer import LocalFile, WriteStream, reserve_space, write_file_part
from hpc_train.checkpoint.save.parallel_hdf5 import Data, write_datasets
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
    """Where every section of a file is, and what is before the first."""

    content: bytes
    """HDF5's own, whole blocks: from the beginning of the file to the first section."""
    begins: tuple[int, ...]
    """Byte of the file at which each rank's section begins; 0 for one without data."""
    places: tuple[tuple[int, ...], ...]
    """Of every rank: byte of its section at which the data of each row begins; 0 for one without elements."""
    size: int
    """Bytes of the file: whole blocks."""


def make_section(rows: Sequence[DatasetRow]) -> ShardImage:
    """A rank's data as it lies in the file, in whole blocks, with zeros where there is none. Errors as make_image."""
    (places,) = make_shared_head([rows], BLOCK_BYTES).places
    data = sorted((place, place + row.bytes) for row, place in zip(rows, places, strict=True) if row.bytes)
    end = count_section_bytes(rows, places)
    gaps = zip([0, *(stop for _, stop in data)], [*(begin for begin, _ in data), end], strict=True)
    return ShardImage(end, places, tuple((begin, bytes(stop - begin)) for begin, stop in gaps if stop > begin))


def count_section_bytes(rows: Sequence[DatasetRow], places: Sequence[int]) -> int:
    """Of a section: whole blocks, so that none of them is two ranks'."""
    end = max((place + row.bytes for row, place in zip(rows, places, strict=True) if row.bytes), default=0)
    return -(-end // BLOCK_BYTES) * BLOCK_BYTES


def make_shared_head(members: Sequence[Sequence[DatasetRow]], interval: int) -> SharedFileHead:
    """The file of ranks with these rows. interval: every section begins at a multiple of it, and it is one of BLOCK.

    Raises CheckpointError for a dtype that HDF5 does not have, OSError where there is no room for a small file.
    """
    assert interval % BLOCK_BYTES == 0, interval
    with make_anonymous_file(lambda path: _make_head(path, members, interval)) as (head, _):
        return head


def _make_head(path: Path, members: Sequence[Sequence[DatasetRow]], interval: int) -> SharedFileHead:
    """First everything but the data, then one rank's data after the other's: HDF5 goes on at the end of the file."""
    named = _create_datasets(path, members)
    found = [_allocate_section(path, of_rank, interval) for of_rank in named]
    begins, places = tuple(begin for begin, _ in found), tuple(of_rank for _, of_rank in found)
    with path.open("rb") as file:
        content = file.read(min(filter(None, begins), default=-1))
    content = content.ljust(-(-len(content) // BLOCK_BYTES) * BLOCK_BYTES, b"\0")
    assert not any(begins) or len(content) == min(filter(None, begins)), (len(content), begins)
    ends = [begin + count_section_bytes(rows, at) for begin, rows, at in zip(begins, members, places, strict=True)]
    return SharedFileHead(content, begins, places, max(len(content), *ends))


def _create_datasets(path: Path, members: Sequence[Sequence[DatasetRow]]) -> list[list[_NamedRow]]:
    """Datasets that have no place yet."""
    names = iter(name_datasets(row.name for rows in members for row in rows))
    named = [[(next(names), row) for row in rows] for rows in members]
    with open_hdf5(path, "w") as file:
        writer = DatasetWriter(file, late=True)
        for of_rank in named:
            for name, row in of_rank:
                writer.create(name, row)
    return named


def _allocate_section(path: Path, named: Sequence[_NamedRow], interval: int) -> tuple[int, tuple[int, ...]]:
    """(begin of a section, place of every row in it).

    HDF5 forgets what it had left over when a file is closed, and so gives no rank's data a place among another's. The
    largest is given its place first, as nothing else decides where the section begins.
    """
    largest = max(range(len(named)), key=lambda index: named[index][1].bytes, default=None)
    if largest is None or not named[largest][1].bytes:
        return 0, (0,) * len(named)
    with open_hdf5(path, "r+", min(ALIGNMENT, named[largest][1].bytes), interval) as file:
        begin = _place_dataset(file, named[largest])
    with open_hdf5(path, "r+") as file:
        rest = [begin if index == largest else _place_dataset(file, it) for index, it in enumerate(named)]
    assert begin % interval == 0, (begin, interval)
    assert all(place >= begin for place, (_, row) in zip(rest, named, strict=True) if row.bytes), (begin, rest)
    return begin, tuple(max(place - begin, 0) for place in rest)


def _place_dataset(file: Any, named: _NamedRow) -> int:
    """Write one element, upon which HDF5 finds room for all; 0 where there is none to write."""
    name, row = named
    if not row.bytes:
        return 0
    dataset = h5d.open(file.id, name.encode())
    all_of, element = dataset.get_space(), (1,) * len(row.local_shape)
    if element:
        all_of.select_hyperslab((0,) * len(element), element)
    one = h5s.create_simple(element) if element else h5s.create(h5s.SCALAR)
    dataset.write(one, all_of, np.zeros(element, dtype=f"V{row.dtype.itemsize}"), dataset.get_type())
    place: int = dataset.get_offset()
    return place


_MINIMUM_RATIO = 4
"""Writes that a section takes, on average, where each begins at a stripe."""


class FileSection(NamedTuple):
    """A rank's part of the file."""

    begin: int
    """Of its section."""
    names: tuple[str, ...]
    """Of its datasets."""
    shared: bool
    """There is a file: some rank has data."""


@dataclass
class SharedFile:
    """Its layout is kept from save to save, and made anew when a rank has another one."""

    held: list[FileLayout] = field(default_factory=list)
    """By every rank; the bytes are those of its section."""
    _interval: int = BLOCK_BYTES
    _head: SharedFileHead | None = None

    def lay(self, path: Path, news: Sequence[FileLayout | None], how: WritePolicy) -> list[FileSection]:
        """Make the file with all but its sections, unless nobody has any; where each rank writes.

        news: what every rank has, None where that is what it had. The file is on the disk, its name is not.
        Raises OSError, and CheckpointError as make_head does.
        """
        held = [old if new is None else new for new, old in zip(news, self.held or news, strict=True)]
        assert all(it is not None for it in held), "a rank has told nothing yet"
        self._lay_out([it for it in held if it is not None], how)
        assert self._head is not None
        if self._rows:
            with open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                reserve_space(file, self._head.size) if how.reserve else os.ftruncate(file, self._head.size)
                write_at_offset(file, memoryview(self._head.content), 0)
                os.fsync(file)
        names = iter(name_datasets(self._rows))
        spots = zip(self._head.begins, self.held, strict=True)
        return [FileSection(begin, tuple(next(names) for _ in it.rows), bool(self._rows)) for begin, it in spots]

    def settle(self, path: Path) -> None:
        """After HDF5 had it open, which cuts a file where its last dataset ends. Raises OSError, CheckpointError."""
        if not self._rows:
            return
        assert self._head is not None
        with open_descriptor(path, os.O_RDWR) as file:
            os.ftruncate(file, self._head.size)
            os.fsync(file)
            if os.pread(file, len(self._head.content), 0) != self._head.content:
                raise CheckpointError("HDF5 changed the structure of a file while the data was written")

    def end(
        self, directory: Path, name: str, found: Sequence[Sequence[int]]
    ) -> tuple[tuple[ShardFile, FileLayout], ...]:
        """Write the table of digests. found: those of every rank's section. Nothing where there is no file."""
        if not self._rows:
            return ()
        assert self._head is not None
        places = [
            begin + place if row.bytes else 0
            for begin, it in zip(self._head.begins, self.held, strict=True)
            for row, place in zip(it.rows, it.places, strict=True)
        ]
        held = FileLayout(tuple(row for it in self.held for row in it.rows), tuple(places))
        return ((write_digest_table(directory, name, self._head.size, self._table(found).tolist(), held), held),)

    @property
    def _rows(self) -> list[str]:
        """Names of tensors, of all ranks."""
        return [row.name for it in self.held for row in it.rows]

    def _lay_out(self, held: list[FileLayout], how: WritePolicy) -> None:
        interval = _choose_interval(held, how)
        if self._head is None or (held, interval) != (self.held, self._interval):
            self._head = None
            self.held, self._interval = held, interval
            self._head = make_shared_head([it.rows for it in held], interval)
        assert self._head.places == tuple(it.places for it in held), "a section is not as its own rank laid it out"

    def _table(self, found: Sequence[Sequence[int]]) -> BlockDigests:
        """What no rank writes, from one section to where the next begins, is zeros."""
        assert self._head is not None
        (zeros,) = digest_blocks(memoryview(bytes(BLOCK_BYTES)))
        table = np.full(count_blocks(self._head.size), zeros, dtype=np.uint64)
        sections = zip((0, *self._head.begins), (digest_blocks(memoryview(self._head.content)), *found), strict=True)
        for begin, digests in sections:
            table[begin // BLOCK_BYTES : begin // BLOCK_BYTES + len(digests)] = np.asarray(digests, dtype=np.uint64)
        return table


def _choose_interval(held: Sequence[FileLayout], how: WritePolicy) -> int:
    """Sections begin at a stripe of the first OST where that is worth the bytes between them."""
    total = sum(count_section_bytes(it.rows, it.places) for it in held)
    worth = how.kind == "lustre" and total >= _MINIMUM_RATIO * how.write_bytes * len(held)
    return how.write_bytes if worth else BLOCK_BYTES


T = TypeVar("T")


@dataclass(frozen=True)
class WriteTurns:
    """A rank's place in a row: it begins when one rank has ended, and then tells another. No rank: nobody waits."""

    before: int | None = None
    after: int | None = None

    def run(self, work: Callable[[], T], group: ProcessGroup | None = None) -> T:
        """Do it when it is this rank's turn, which the next has as soon as it ends, or fails.

        Raises LostRanksError where the one before is gone, or does not end within the group's timeout.
        """
        try:
            if self.before is not None:
                receive_object(self.before, group)
            return work()
        finally:
            if self.after is not None:
                with suppress(LostRanksError):  # all will hear of it when they meet
                    send_object(None, self.after, group)


def assign_turns(rank: int, nodes: Sequence[int], writers: int) -> WriteTurns:
    """So that at most `writers` ranks of a node are at it at a time; 0: all of them.

    nodes: that of every rank.
    """
    here = [it for it, node in enumerate(nodes) if node == nodes[rank]]
    at = here.index(rank)
    if not writers:
        return WriteTurns()
    before = here[at - writers] if at >= writers else None
    after = here[at + writers] if at + writers < len(here) else None
    return WriteTurns(before, after)


_EMPTY_LAYOUT = FileLayout((), ())


@dataclass
class SharedFileWriters:
    """It lives as long as the group that they talk over; the first is told only what is new to it."""

    ranks: Sequence[int]
    rank: int
    group: ProcessGroup | None = None
    mpi: Intracomm | None = None
    """These ranks, where they write by HDF5's parallel driver."""
    _told: FileLayout | None = None
    _file: SharedFile = field(default_factory=SharedFile)
    """On the first."""

    def write(
        self, directory: Path, name: str, staged: StagedShard | None, how: WritePolicy, turns: WriteTurns
    ) -> tuple[tuple[ShardFile, FileLayout], ...]:
        """Write a file and its table of digests, both on the disk when this returns; every rank of the file calls it.

        staged: of a section; None if this rank has nothing. The first gets the file and what it holds, unless nobody
        has anything; the others get nothing. One that fails fails all: raises what agreement.among does.
        """
        path = directory / name
        spot = capture_failure(lambda: self._spot(path, staged, how))

        def mine() -> list[int]:
            return turns.run(lambda: self._write(path, raise_failure(spot), staged, how), self.group)

        return gather_on_subset(
            self.ranks, self.rank, mine, lambda found: self._answers(directory, name, found), self.group
        )

    def _spot(self, path: Path, staged: StagedShard | None, how: WritePolicy) -> FileSection:
        held = staged.held if staged is not None else _EMPTY_LAYOUT
        news, self._told = held if held != self._told else None, None
        spot = gather_on_subset(
            self.ranks, self.rank, lambda: news, lambda all_of: self._file.lay(path, all_of, how), self.group
        )
        self._told = held  # and not after an error, as then nobody knows who has heard what
        return spot

    def _write(self, path: Path, spot: FileSection, staged: StagedShard | None, how: WritePolicy) -> list[int]:
        """The digests of this rank's section."""
        if self.mpi is not None:
            return _write_by_mpi(path, spot, staged, self.mpi)
        if staged is None:
            return []
        if isinstance(staged.image, LocalFile):
            return staged.image.copy_into(path, spot.begin, how)
        memory = staged.image
        part = WriteStream(lambda begin, end: memory[begin:end], staged.size, stays=True)
        return write_file_part(path, spot.begin, part, how)

    def _answers(
        self, directory: Path, name: str, found: Sequence[Sequence[int]]
    ) -> list[tuple[tuple[ShardFile, FileLayout], ...]]:
        if self.mpi is not None:
            self._file.settle(directory / name)
        return [self._file.end(directory, name, found), *(() for _ in self.ranks[1:])]


def list_datasets(spot: FileSection, staged: StagedShard | None) -> list[Data]:
    """What a rank writes, as HDF5 knows it. Where there is no data between them the file has zeros."""
    if staged is None:
        return []
    assert isinstance(staged.image, memoryview)
    rows = zip(spot.names, staged.held.rows, staged.held.places, strict=True)
    return [Data(name, staged.image[place : place + row.bytes]) for name, row, place in rows if row.bytes]


def _write_by_mpi(path: Path, spot: FileSection, staged: StagedShard | None, ranks: Intracomm) -> list[int]:
    """Ranks without data take part, unless nobody has any."""
    if spot.shared:
        write_datasets(path, ranks, list_datasets(spot, staged))
    if staged is None:
        return []
    assert isinstance(staged.image, memoryview)
    return digest_blocks(staged.image[: staged.size])


@dataclass(frozen=True)
class WriterSharing:
    """What ranks share when they save: see config.train.CheckpointConfig."""

    ranks_per_file: int = 1
    writers_per_node: int = 0
    parallel_hdf5: bool = False

    @property
    def files(self) -> bool:
        """Whether a file may be that of several ranks."""
        return self.parallel_hdf5 or self.ranks_per_file != 1


@dataclass(frozen=True)
class WriterGroup:
    """The part of one rank in the files of all. It lives as long as the group that they talk over."""

    files: tuple[range, ...]
    """The ranks of each, in the order of the ranks."""
    number: int
    """Of this rank's."""
    team: SharedFileWriters | None = None
    """Where files are shared."""
    turns: WriteTurns = field(default_factory=WriteTurns)
    group: ProcessGroup | None = None

    def of_files(self, of_ranks: Sequence[int]) -> list[int]:
        """Sums over the ranks of every file."""
        return [sum(of_ranks[ranks.start : ranks.stop]) for ranks in self.files]

    @property
    def name(self) -> str:
        """Of this rank's file."""
        return shard_file_name(self.number, self.files[self.number])


def group_ranks_by_file(nodes: Sequence[int], ranks_per_file: int) -> tuple[range, ...]:
    """The ranks of every file: so many that follow one another on a node, 0 for all that do.

    nodes: that of every rank.
    """
    files = []
    for _, run in groupby(range(len(nodes)), key=lambda rank: nodes[rank]):
        ranks = list(run)
        most = ranks_per_file or len(ranks)
        files += [range(at, min(at + most, ranks[-1] + 1)) for at in range(ranks[0], ranks[-1] + 1, most)]
    return tuple(files)


def make_writer_group(
    world: World, sharing: WriterSharing, group: ProcessGroup | None, mpi: Intracomm | None = None
) -> WriterGroup | None:
    """A collective over the group of all ranks. None where every rank writes a file of its own when it likes.

    mpi: all ranks, for sharing.parallel_hdf5, which makes one file. Raises LostRanksError.
    """
    if sharing == WriterSharing():
        return None
    nodes = _gather_nodes(world, group)
    files = (range(world.size),) if mpi is not None else group_ranks_by_file(nodes, sharing.ranks_per_file)
    number = next(index for index, ranks in enumerate(files) if world.rank in ranks)
    team = SharedFileWriters(files[number], world.rank, group, mpi) if sharing.files else None
    return WriterGroup(files, number, team, assign_turns(world.rank, nodes, sharing.writers_per_node), group)


def _gather_nodes(world: World, group: ProcessGroup | None) -> list[int]:
    """That of every rank."""
    found = list(torch.empty(world.size, 1, dtype=torch.int64))
    with report_lost_ranks():
        dist.all_gather(found, torch.tensor([world.node]), group=group)
    return [int(node) for node in found]
