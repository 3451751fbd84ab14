"""Which ranks write which file, and when: from where they sit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hpc_train.api import World
from hpc_train.checkpoint.agreement import together
from hpc_train.checkpoint.shard import shard_name
from hpc_train.checkpoint.team import Team
from hpc_train.checkpoint.turns import Turns, turns_of

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Sharing:
    """What ranks share when they save: see config.train.CheckpointConfig."""

    ranks_per_file: int = 1
    writers_per_node: int = 0
    parallel_hdf5: bool = False

    @property
    def files(self) -> bool:
        """Whether a file may be that of several ranks."""
        return self.parallel_hdf5 or self.ranks_per_file != 1


@dataclass(frozen=True)
class Crew:
    """The part of one rank in the files of all. It lives as long as the group that they talk over."""

    files: tuple[range, ...]
    """The ranks of each, in the order of the ranks."""
    number: int
    """Of this rank's."""
    team: Team | None = None
    """Where files are shared."""
    turns: Turns = field(default_factory=Turns)
    group: ProcessGroup | None = None

    def of_files(self, of_ranks: Sequence[int]) -> list[int]:
        """Sums over the ranks of every file."""
        return [sum(of_ranks[ranks.start : ranks.stop]) for ranks in self.files]

    @property
    def name(self) -> str:
        """Of this rank's file."""
        return shard_name(self.number, self.files[self.number])


def files_of(nodes: Sequence[int], ranks_per_file: int) -> tuple[range, ...]:
    """The ranks of every file: so many that follow one another on a node, 0 for all that do.

    nodes: that of every rank.
    """
    files = []
    for _, run in groupby(range(len(nodes)), key=lambda rank: nodes[rank]):
        ranks = list(run)
        most = ranks_per_file or len(ranks)
        files += [range(at, min(at + most, ranks[-1] + 1)) for at in range(ranks[0], ranks[-1] + 1, most)]
    return tuple(files)


def make_crew(world: World, sharing: Sharing, group: ProcessGroup | None, mpi: Intracomm | None = None) -> Crew | None:
    """A collective over the group of all ranks. None where every rank writes a file of its own when it likes.

    mpi: all ranks, for sharing.parallel_hdf5, which makes one file. Raises LostRanksError.
    """
    if sharing == Sharing():
        return None
    nodes = _nodes(world, group)
    files = (range(world.size),) if mpi is not None else files_of(nodes, sharing.ranks_per_file)
    number = next(index for index, ranks in enumerate(files) if world.rank in ranks)
    team = Team(files[number], world.rank, group, mpi) if sharing.files else None
    return Crew(files, number, team, turns_of(world.rank, nodes, sharing.writers_per_node), group)


def _nodes(world: World, group: ProcessGroup | None) -> list[int]:
    """That of every rank."""
    found = list(torch.empty(world.size, 1, dtype=torch.int64))
    with together():
        dist.all_gather(found, torch.tensor([world.node]), group=group)
    return [int(node) for node in found]
