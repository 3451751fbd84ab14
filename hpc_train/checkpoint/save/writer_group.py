"""Group the ranks that write one file together, and let the ranks of a node take turns to write.

`WriterGroup` says which ranks write which file. `SharedFileWriters` are the ranks of one file: each writes its section,
and the first of them also writes structure and digests (shared_file.py). `WriteTurns` limits how many ranks of a node
write at a time, for links and disks that are slower with many streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from hpc_train.checkpoint.format.manifest import ShardFile
from hpc_train.checkpoint.format.shard_layout import FileLayout
from hpc_train.checkpoint.rank_consensus import (
    capture_failure,
    gather_on_subset,
    raise_failure,
    receive_object,
    send_object,
)
from hpc_train.checkpoint.save.file_writer import WriteStream, write_file_part
from hpc_train.checkpoint.save.local_stage import LocalFile
from hpc_train.checkpoint.save.shard_file import StagedShard
from hpc_train.checkpoint.save.shared_file import FileSection, SharedFile, write_by_mpi
from hpc_train.checkpoint.storage.file_system import WritePolicy
from hpc_train.checkpoint.storage.step_directory import shard_file_name
from hpc_train.errors import LostRanksError
from hpc_train.interfaces import World
from hpc_train.runtime.consensus import report_lost_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup

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
            self.ranks,
            self.rank,
            write_section,
            lambda digests: self._finish_file(directory, name, digests),
            self.group,
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
            return write_by_mpi(path, section, shard, self.mpi)
        if shard is None:
            return []
        if isinstance(shard.image, LocalFile):
            return shard.image.copy_into(path, section.begin, policy)
        memory = shard.image
        part = WriteStream(lambda begin, end: memory[begin:end], shard.size, memory_stays=True)
        return write_file_part(path, section.begin, part, policy)

    def _finish_file(
        self, directory: Path, name: str, digests: Sequence[Sequence[int]]
    ) -> list[tuple[tuple[ShardFile, FileLayout], ...]]:
        if self.mpi is not None:
            self._file.restore_size(directory / name)
        return [self._file.write_digests(directory, name, digests), *(() for _ in self.ranks[1:])]


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
        files += [range(first, min(first + count, ranks[-1] + 1)) for first in range(ranks[0], ranks[-1] + 1, count)]
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
    nodes = list(torch.empty(world.size, 1, dtype=torch.int64))
    with report_lost_ranks():
        dist.all_gather(nodes, torch.tensor([world.node]), group=group)
    return [int(node) for node in nodes]
