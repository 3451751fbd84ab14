"""The ranks that write a file together: each its own section of it, the first of them all that is everybody's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_train.checkpoint.agreement import among, attempt, opened
from hpc_train.checkpoint.digests import digest_blocks
from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.mpio import Data, write_datasets
from hpc_train.checkpoint.shard import Staged
from hpc_train.checkpoint.shared_file import SharedFile, Spot
from hpc_train.checkpoint.storage.policy import Behaviour
from hpc_train.checkpoint.storage.staging import LocalFile
from hpc_train.checkpoint.stream import Stream, write_part
from hpc_train.checkpoint.turns import Turns

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm
    from torch.distributed import ProcessGroup

_NOTHING = Held((), ())


@dataclass
class Team:
    """It lives as long as the group that they talk over; the first is told only what is new to it."""

    ranks: Sequence[int]
    rank: int
    group: ProcessGroup | None = None
    mpi: Intracomm | None = None
    """These ranks, where they write by HDF5's parallel driver."""
    _told: Held | None = None
    _file: SharedFile = field(default_factory=SharedFile)
    """On the first."""

    def write(
        self, directory: Path, name: str, staged: Staged | None, how: Behaviour, turns: Turns
    ) -> tuple[tuple[ShardFile, Held], ...]:
        """Write a file and its table of digests, both on the disk when this returns; every rank of the file calls it.

        staged: of a section; None if this rank has nothing. The first gets the file and what it holds, unless nobody
        has anything; the others get nothing. One that fails fails all: raises what agreement.among does.
        """
        path = directory / name
        spot = attempt(lambda: self._spot(path, staged, how))

        def mine() -> list[int]:
            return turns.run(lambda: self._write(path, opened(spot), staged, how), self.group)

        return among(self.ranks, self.rank, mine, lambda found: self._answers(directory, name, found), self.group)

    def _spot(self, path: Path, staged: Staged | None, how: Behaviour) -> Spot:
        held = staged.held if staged is not None else _NOTHING
        news, self._told = held if held != self._told else None, None
        spot = among(self.ranks, self.rank, lambda: news, lambda all_of: self._file.lay(path, all_of, how), self.group)
        self._told = held  # and not after an error, as then nobody knows who has heard what
        return spot

    def _write(self, path: Path, spot: Spot, staged: Staged | None, how: Behaviour) -> list[int]:
        """The digests of this rank's section."""
        if self.mpi is not None:
            return _write_by_mpi(path, spot, staged, self.mpi)
        if staged is None:
            return []
        if isinstance(staged.image, LocalFile):
            return staged.image.copy_into(path, spot.begin, how)
        memory = staged.image
        part = Stream(lambda begin, end: memory[begin:end], staged.size, stays=True)
        return write_part(path, spot.begin, part, how)

    def _answers(
        self, directory: Path, name: str, found: Sequence[Sequence[int]]
    ) -> list[tuple[tuple[ShardFile, Held], ...]]:
        if self.mpi is not None:
            self._file.settle(directory / name)
        return [self._file.end(directory, name, found), *(() for _ in self.ranks[1:])]


def datasets(spot: Spot, staged: Staged | None) -> list[Data]:
    """What a rank writes, as HDF5 knows it. Where there is no data between them the file has zeros."""
    if staged is None:
        return []
    assert isinstance(staged.image, memoryview)
    rows = zip(spot.names, staged.held.rows, staged.held.places, strict=True)
    return [Data(name, staged.image[place : place + row.bytes]) for name, row, place in rows if row.bytes]


def _write_by_mpi(path: Path, spot: Spot, staged: Staged | None, ranks: Intracomm) -> list[int]:
    """Ranks without data take part, unless nobody has any."""
    if spot.shared:
        write_datasets(path, ranks, datasets(spot, staged))
    if staged is None:
        return []
    assert isinstance(staged.image, memoryview)
    return digest_blocks(staged.image[: staged.size])
