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

from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES
from hpc_train.checkpoint.load.read_schedule import (
    CELL_BYTES,
    LoadDestinations,
    Strips,
    list_blocks,
    plan_block_reads,
    strip_sizes,
    view_runs,
)
from hpc_train.checkpoint.load.verified_reader import ShardReader, allocate_pages
from hpc_train.interfaces import World
from hpc_train.runtime.consensus import report_lost_ranks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

EXCHANGE_BYTES = 16 << 20
"""Bytes that a rank reads, sends and receives in a round, about; one cell at least."""
MINIMUM_SAVING = 1.04
"""Blocks read over blocks wanted from which on a cell is passed on. One rank's edge within a cell is not enough."""
_THREADS = 2
_BLOCKS = CELL_BYTES // BLOCK_BYTES
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class CellDemand:
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
        return self.reads > MINIMUM_SAVING * _count_bits(self.wanted)


@dataclass(frozen=True)
class ExchangeRound:
    """Cells that are read and passed on at once, and who reads each; in order."""

    cells: Integers
    owners: Integers


def plan_exchange(
    strips: Strips, bytes_of: Sequence[int], world: World | None, group: ProcessGroup | None = None
) -> tuple[Strips, Exchange | None]:
    """(what this rank reads for itself, what the ranks read for each other if there is any). Every rank calls it.

    strips: what this rank wants, cut by cells, in file order. bytes_of: the size of each file. Raises LostRanksError.
    """
    if world is None or world.size == 1 or not len(bytes_of):
        return strips, None
    demand, cells = _sum_demand(strips, bytes_of, group)
    shared = demand.shared
    if not shared.any():
        return strips, None
    mine = shared[cells]
    rounds = plan_rounds(demand, world.size)
    return strips[~mine], Exchange(demand.first, demand.wanted, rounds, strips[mine], cells[mine], world, group)


def plan_rounds(demand: CellDemand, ranks: int) -> list[ExchangeRound]:
    """The shared cells in rounds in which no rank has to hold much more than MEMORY, and all read about as much."""
    cells = np.flatnonzero(demand.shared)
    blocks = _count_bits(demand.wanted[cells])
    limits = [
        (np.cumsum(demand.largest[cells]), EXCHANGE_BYTES),
        (np.cumsum(demand.copied[cells]), EXCHANGE_BYTES * ranks),
        (np.cumsum(blocks * BLOCK_BYTES), EXCHANGE_BYTES * ranks),
    ]
    found, start = [], 0
    while start < len(cells):
        ends = [np.searchsorted(total, (total[start - 1] if start else 0) + most, "right") for total, most in limits]
        stop = max(start + 1, int(min(ends)))
        middle = np.cumsum(blocks[start:stop]) - blocks[start:stop] / 2
        owners = (middle * ranks / blocks[start:stop].sum()).astype(np.int64)
        found.append(ExchangeRound(cells[start:stop], owners))
        start = stop
    return found


@dataclass(frozen=True)
class Exchange:
    """The rounds of one load, as one rank sees them."""

    first: Integers
    """[files]: its first cell."""
    wanted: Integers
    """[cells]: bits of the blocks that somebody wants."""
    rounds: list[ExchangeRound]
    strips: Strips
    """What this rank wants of the shared cells, in file order."""
    cells: Integers
    """[strips]: where each is."""
    world: World
    group: ProcessGroup | None

    def run(self, source: ShardReader, targets: LoadDestinations) -> None:
        """Read, verify and pass on; every rank calls it. What a round needs is read while the one before is passed on.

        Raises what reading raises, on the rank that read; the others then return early, and must be told.
        """
        most = max(int((it.owners == self.world.rank).sum()) for it in self.rounds)
        buffers = [memoryview(allocate_pages(most * CELL_BYTES)) for _ in range(2)]
        sent, came = _ReusedMemory(), _ReusedMemory()
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
        return bool(_all_reduce(failed, dist.ReduceOp.MAX, self.group)[0])

    def _read(self, it: ExchangeRound, source: ShardReader, memory: memoryview) -> None:
        """The wanted blocks of this rank's cells, each cell at its place in the row of them."""
        mine = it.cells[it.owners == self.world.rank]
        runs = [run for slot, cell in enumerate(mine.tolist()) for run in self._runs(slot, cell, source)]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda run: source.read(run[0], run[1], run[3], memory[run[2] :]), runs))

    def _runs(self, slot: int, cell: int, source: ShardReader) -> list[tuple[int, int, int, int]]:
        """(file, byte, byte of the memory, bytes) of every row of wanted blocks of a cell."""
        file = int(np.searchsorted(self.first, cell, "right")) - 1
        begin = (cell - int(self.first[file])) * CELL_BYTES
        bits = [int(self.wanted[cell]) >> block & 1 for block in range(_BLOCKS)]
        edges = np.flatnonzero(np.diff([0, *bits, 0])).reshape(-1, 2) * BLOCK_BYTES
        end = source.sizes[file]
        return [
            (file, begin + low, slot * CELL_BYTES + low, min(high, end - begin) - low) for low, high in edges.tolist()
        ]

    def _pass_on(
        self, it: ExchangeRound, memory: memoryview, targets: LoadDestinations, sent: _ReusedMemory, came: _ReusedMemory
    ) -> None:
        low, high = np.searchsorted(self.cells, it.cells[0]), np.searchsorted(self.cells, it.cells[-1], "right")
        strips, cells = self.strips[low:high], self.cells[low:high]
        owners = it.owners[np.searchsorted(it.cells, cells)]
        requests, of_ranks = self._ask(strips, cells, owners)
        packed, lengths = self._packed(it, requests, of_ranks, memory, sent)
        expected = np.bincount(owners, strip_sizes(strips), self.world.size).astype(np.int64)
        received = came.take(int(expected.sum()))
        self._to_all(received, packed, expected.tolist(), lengths.tolist())
        data, first = received.numpy(), 0
        for _, _, count, _, run, piece, at, step in strips.tolist():
            targets[piece].put(at, step, view_runs(data, first, count, run, run))
            first += count * run

    def _ask(self, strips: Strips, cells: Integers, owners: Integers) -> tuple[Integers, Integers]:
        """Tell the owners of cells what this rank wants of them.

        Returns what was asked of it: (cell, byte in it, count, stride, run) [strips, 5] in the order of ranks, and how
        many of each rank.
        """
        asked = np.stack(
            [cells, strips["begin"] % CELL_BYTES, strips["count"], strips["stride"], strips["run"]], axis=1
        )
        number = np.bincount(owners, minlength=self.world.size)
        of_ranks = torch.empty(self.world.size, dtype=torch.int64)
        self._to_all(of_ranks, torch.from_numpy(number), [1] * self.world.size, [1] * self.world.size)
        requests = torch.empty(int(of_ranks.sum()), 5, dtype=torch.int64)
        self._to_all(requests, torch.from_numpy(asked), of_ranks.tolist(), number.tolist())
        return requests.numpy(), of_ranks.numpy()

    def _to_all(self, came: torch.Tensor, sent: torch.Tensor, of: list[int], to: list[int]) -> None:
        with report_lost_ranks():
            dist.all_to_all_single(came, sent, of, to, group=self.group)

    def _packed(
        self, it: ExchangeRound, requests: Integers, of_ranks: Integers, memory: memoryview, room: _ReusedMemory
    ) -> tuple[torch.Tensor, Integers]:
        """What was asked for, in that order, and how many bytes are each rank's."""
        length = requests[:, 2] * requests[:, 4]
        slots = np.searchsorted(it.cells[it.owners == self.world.rank], requests[:, 0])
        packed = room.take(int(length.sum()))
        data, first = packed.numpy(), 0
        for slot, (_, begin, count, stride, run) in zip(slots.tolist(), requests.tolist(), strict=True):
            view_runs(data, first, count, run, run)[...] = view_runs(
                memory, slot * CELL_BYTES + begin, count, stride, run
            )
            first += count * run
        ranks = np.repeat(np.arange(self.world.size), of_ranks)
        return packed, np.bincount(ranks, length, self.world.size).astype(np.int64)


class _ReusedMemory:
    """Memory that is kept from round to round: new memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes; what they held is lost."""
        if self._whole.numel() < size:
            self._whole = torch.empty(size, dtype=torch.uint8)
        return self._whole[:size]


def _sum_demand(strips: Strips, bytes_of: Sequence[int], group: ProcessGroup | None) -> tuple[CellDemand, Integers]:
    """What all ranks want, and the cell of each of this rank's strips."""
    number = -(-np.array(bytes_of, dtype=np.int64) // CELL_BYTES)
    first = np.cumsum(number) - number
    cells = first[strips["file"]] + strips["begin"] // CELL_BYTES
    files, blocks = list_blocks(plan_block_reads(strips, bytes_of))
    touched, total = first[files] + blocks // _BLOCKS, int(number.sum())
    wanted = np.zeros(total, dtype=np.int64)
    np.bitwise_or.at(wanted, touched, np.int64(1) << blocks % _BLOCKS)
    copied = np.bincount(cells, strip_sizes(strips), total).astype(np.int64)
    sums = np.stack([np.bincount(touched, minlength=total), copied])
    sums, largest, wanted = (
        _all_reduce(it, op, group)
        for it, op in ((sums, dist.ReduceOp.SUM), (copied, dist.ReduceOp.MAX), (wanted, dist.ReduceOp.BOR))
    )
    return CellDemand(first, wanted, sums[0], sums[1], largest), cells


def _all_reduce(mine: Integers, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> Integers:
    tensor = torch.from_numpy(mine.copy())
    with report_lost_ranks():
        dist.all_reduce(tensor, op=op, group=group)
    return tensor.numpy()


def _count_bits(of: Integers) -> Integers:
    """How many bits are set, of each."""
    each = np.unpackbits(of.view(np.uint8).reshape(-1, 8), axis=1)
    counted: Integers = each.sum(axis=1, dtype=np.int64)
    return counted
