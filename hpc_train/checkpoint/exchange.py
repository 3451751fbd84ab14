"""What several ranks want of the files is read once, by one of them each, and passed on by all-to-all.

Every rank says for each cell of the files how much of it it would read; sums over ranks tell all of them, alike, the
cells of which alone they would together read more than what they want. Those are read by turns of all ranks, in rounds
of bounded memory. So columns of what was saved by rows, or the same parameters on many replicas, cost the file system
each byte once. Between ranks go three numbers a cell, and of the rest only what concerns the two that talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hpc_train.api import World
from hpc_train.checkpoint.agreement import together
from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.source import Source, pages
from hpc_train.checkpoint.strips import CELL, Strips, sizes
from hpc_train.checkpoint.targets import Targets, view
from hpc_train.checkpoint.transfer import blocks_of, reads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

MEMORY = 16 << 20
"""Bytes that a rank reads, sends and receives in a round, about; one cell at least."""
WORTH = 1.04
"""Blocks read over blocks wanted from which on a cell is passed on. One rank's edge within a cell is not enough."""
_THREADS = 2
_BLOCKS = CELL // BLOCK
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Demand:
    """What all ranks together want of every cell; the same on all of them. Cells are counted through all files."""

    first: Integers
    """[files]: its first cell."""
    wanted: Integers
    """[cells]: bits of the blocks that somebody wants."""
    reads: Integers
    """[cells]: blocks that would be read if every rank read what it wants."""
    copied: Integers
    """[cells]: bytes that ranks want, together."""
    largest: Integers
    """[cells]: bytes that any one wants, at most."""

    @property
    def shared(self) -> NDArray[np.bool_]:
        """[cells]: whether reading it once and passing it on spares reads."""
        return self.reads > WORTH * _bits(self.wanted)


@dataclass(frozen=True)
class Round:
    """Cells that are read and passed on at once, and who reads each; in order."""

    cells: Integers
    owners: Integers


def agree(
    strips: Strips, bytes_of: Sequence[int], world: World | None, group: ProcessGroup | None = None
) -> tuple[Strips, Exchange | None]:
    """(what this rank reads for itself, what the ranks read for each other if there is any). Every rank calls it.

    strips: what this rank wants, cut by cells, in file order. bytes_of: the size of each file. Raises LostRanksError.
    """
    if world is None or world.size == 1 or not len(bytes_of):
        return strips, None
    demand, cells = _demand(strips, bytes_of, group)
    shared = demand.shared
    if not shared.any():
        return strips, None
    mine = shared[cells]
    rounds = plan_rounds(demand, world.size)
    return strips[~mine], Exchange(demand.first, demand.wanted, rounds, strips[mine], cells[mine], world, group)


def plan_rounds(demand: Demand, ranks: int) -> list[Round]:
    """The shared cells in rounds in which no rank has to hold much more than MEMORY, and all read about as much."""
    cells = np.flatnonzero(demand.shared)
    blocks = _bits(demand.wanted[cells])
    limits = [
        (np.cumsum(demand.largest[cells]), MEMORY),
        (np.cumsum(demand.copied[cells]), MEMORY * ranks),
        (np.cumsum(blocks * BLOCK), MEMORY * ranks),
    ]
    found, start = [], 0
    while start < len(cells):
        ends = [np.searchsorted(total, (total[start - 1] if start else 0) + most, "right") for total, most in limits]
        stop = max(start + 1, int(min(ends)))
        middle = np.cumsum(blocks[start:stop]) - blocks[start:stop] / 2
        owners = (middle * ranks / blocks[start:stop].sum()).astype(np.int64)
        found.append(Round(cells[start:stop], owners))
        start = stop
    return found


@dataclass(frozen=True)
class Exchange:
    """The rounds of one load, as one rank sees them."""

    first: Integers
    """[files]: its first cell."""
    wanted: Integers
    """[cells]: bits of the blocks that somebody wants."""
    rounds: list[Round]
    strips: Strips
    """What this rank wants of the shared cells, in file order."""
    cells: Integers
    """[strips]: where each is."""
    world: World
    group: ProcessGroup | None

    def run(self, source: Source, targets: Targets) -> None:
        """Read, verify and pass on; every rank calls it. What a round needs is read while the one before is passed on.

        Raises what reading raises, on the rank that read; the others then return early, and must be told.
        """
        most = max(int((it.owners == self.world.rank).sum()) for it in self.rounds)
        buffers = [memoryview(pages(most * CELL)) for _ in range(2)]
        sent, came = _Room(), _Room()
        with ThreadPoolExecutor(1) as ahead:
            coming = ahead.submit(self._read, self.rounds[0], source, buffers[0])
            for number, it in enumerate(self.rounds):
                if self._has_failed(coming):
                    coming.result()
                    return
                if number + 1 < len(self.rounds):
                    coming = ahead.submit(self._read, self.rounds[number + 1], source, buffers[(number + 1) % 2])
                self._pass_on(it, buffers[number % 2], targets, sent, came)

    def _has_failed(self, coming: Future[None]) -> bool:
        """Whether any rank's reading has."""
        failed = np.array([coming.exception() is not None], dtype=np.int64)
        return bool(_reduced(failed, dist.ReduceOp.MAX, self.group)[0])

    def _read(self, it: Round, source: Source, memory: memoryview) -> None:
        """The wanted blocks of this rank's cells, each cell at its place in the row of them."""
        mine = it.cells[it.owners == self.world.rank]
        runs = [run for slot, cell in enumerate(mine.tolist()) for run in self._runs(slot, cell, source)]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda run: source.read(run[0], run[1], run[3], memory[run[2] :]), runs))

    def _runs(self, slot: int, cell: int, source: Source) -> list[tuple[int, int, int, int]]:
        """(file, byte, byte of the memory, bytes) of every row of wanted blocks of a cell."""
        file = int(np.searchsorted(self.first, cell, "right")) - 1
        begin = (cell - int(self.first[file])) * CELL
        bits = [int(self.wanted[cell]) >> block & 1 for block in range(_BLOCKS)]
        edges = np.flatnonzero(np.diff([0, *bits, 0])).reshape(-1, 2) * BLOCK
        end = source.sizes[file]
        return [(file, begin + low, slot * CELL + low, min(high, end - begin) - low) for low, high in edges.tolist()]

    def _pass_on(self, it: Round, memory: memoryview, targets: Targets, sent: _Room, came: _Room) -> None:
        low, high = np.searchsorted(self.cells, it.cells[0]), np.searchsorted(self.cells, it.cells[-1], "right")
        strips, cells = self.strips[low:high], self.cells[low:high]
        owners = it.owners[np.searchsorted(it.cells, cells)]
        requests, of_ranks = self._ask(strips, cells, owners)
        packed, lengths = self._packed(it, requests, of_ranks, memory, sent)
        expected = np.bincount(owners, sizes(strips), self.world.size).astype(np.int64)
        received = came.take(int(expected.sum()))
        self._to_all(received, packed, expected.tolist(), lengths.tolist())
        data, first = received.numpy(), 0
        for _, _, count, _, run, piece, at, step in strips.tolist():
            targets[piece].put(at, step, view(data, first, count, run, run))
            first += count * run

    def _ask(self, strips: Strips, cells: Integers, owners: Integers) -> tuple[Integers, Integers]:
        """Tell the owners of cells what this rank wants of them.

        Returns what was asked of it: (cell, byte in it, count, stride, run) [strips, 5] in the order of ranks, and how
        many of each rank.
        """
        asked = np.stack([cells, strips["begin"] % CELL, strips["count"], strips["stride"], strips["run"]], axis=1)
        number = np.bincount(owners, minlength=self.world.size)
        of_ranks = torch.empty(self.world.size, dtype=torch.int64)
        self._to_all(of_ranks, torch.from_numpy(number), [1] * self.world.size, [1] * self.world.size)
        requests = torch.empty(int(of_ranks.sum()), 5, dtype=torch.int64)
        self._to_all(requests, torch.from_numpy(asked), of_ranks.tolist(), number.tolist())
        return requests.numpy(), of_ranks.numpy()

    def _to_all(self, came: torch.Tensor, sent: torch.Tensor, of: list[int], to: list[int]) -> None:
        with together():
            dist.all_to_all_single(came, sent, of, to, group=self.group)

    def _packed(
        self, it: Round, requests: Integers, of_ranks: Integers, memory: memoryview, room: _Room
    ) -> tuple[torch.Tensor, Integers]:
        """What was asked for, in that order, and how many bytes are each rank's."""
        length = requests[:, 2] * requests[:, 4]
        slots = np.searchsorted(it.cells[it.owners == self.world.rank], requests[:, 0])
        packed = room.take(int(length.sum()))
        data, first = packed.numpy(), 0
        for slot, (_, begin, count, stride, run) in zip(slots.tolist(), requests.tolist(), strict=True):
            view(data, first, count, run, run)[...] = view(memory, slot * CELL + begin, count, stride, run)
            first += count * run
        ranks = np.repeat(np.arange(self.world.size), of_ranks)
        return packed, np.bincount(ranks, length, self.world.size).astype(np.int64)


class _Room:
    """Memory that is kept from round to round: new memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes; what they held is lost."""
        if self._whole.numel() < size:
            self._whole = torch.empty(size, dtype=torch.uint8)
        return self._whole[:size]


def _demand(strips: Strips, bytes_of: Sequence[int], group: ProcessGroup | None) -> tuple[Demand, Integers]:
    """What all ranks want, and the cell of each of this rank's strips."""
    number = -(-np.array(bytes_of, dtype=np.int64) // CELL)
    first = np.cumsum(number) - number
    cells = first[strips["file"]] + strips["begin"] // CELL
    files, blocks = blocks_of(reads(strips, bytes_of))
    touched, total = first[files] + blocks // _BLOCKS, int(number.sum())
    wanted = np.zeros(total, dtype=np.int64)
    np.bitwise_or.at(wanted, touched, np.int64(1) << blocks % _BLOCKS)
    copied = np.bincount(cells, sizes(strips), total).astype(np.int64)
    sums = np.stack([np.bincount(touched, minlength=total), copied])
    sums, largest, wanted = (
        _reduced(it, op, group)
        for it, op in ((sums, dist.ReduceOp.SUM), (copied, dist.ReduceOp.MAX), (wanted, dist.ReduceOp.BOR))
    )
    return Demand(first, wanted, sums[0], sums[1], largest), cells


def _reduced(mine: Integers, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> Integers:
    tensor = torch.from_numpy(mine.copy())
    with together():
        dist.all_reduce(tensor, op=op, group=group)
    return tensor.numpy()


def _bits(of: Integers) -> Integers:
    """How many bits are set, of each."""
    each = np.unpackbits(of.view(np.uint8).reshape(-1, 8), axis=1)
    counted: Integers = each.sum(axis=1, dtype=np.int64)
    return counted
