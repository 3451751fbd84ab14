"""Read bytes that several ranks need only once, and pass them on by all-to-all.

Files are divided into cells. Every rank counts the blocks of each cell that it would read; from an all-reduce of these
counts every rank learns which cells would be read more than once. Each of those is read by one rank and passed on, in
rounds of bounded memory. So each byte is read from the file system once even if tensors saved by rows are loaded by
columns, or if many replicas load the same parameters. The all-reduce moves three numbers per cell; everything else goes
only between the two ranks concerned.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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
from hpc_train.checkpoint.load.verified_reader import ShardReader
from hpc_train.checkpoint.storage.file_system import allocate_pages
from hpc_train.interfaces import World
from hpc_train.runtime.consensus import report_lost_ranks

EXCHANGE_BYTES = 16 << 20
"""Approximate bytes that a rank reads, sends and receives in a round; at least one cell."""
MINIMUM_SAVING = 1.04
"""A cell is exchanged if ranks would read more than this times its wanted blocks.

Above 1, so that a block at the border of two ranks is not enough."""
_THREADS = 2
"""Threads that read a round's cells."""
_BLOCKS = CELL_BYTES // BLOCK_BYTES
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class CellDemand:
    """How much of every cell all ranks together need; the same on all ranks.

    Cells are numbered consecutively over all files.
    """

    first: Integers
    """[files]: its first cell."""
    wanted: Integers
    """[cells]: bit mask of the blocks that any rank needs."""
    reads: Integers
    """[cells]: blocks that would be read if every rank read everything that it needs."""
    copied: Integers
    """[cells]: sum over ranks of the bytes needed."""
    largest: Integers
    """[cells]: maximum over ranks of the bytes needed."""

    @property
    def shared(self) -> NDArray[np.bool_]:
        """[cells]: whether reading the cell once and passing it on saves reads."""
        return self.reads > MINIMUM_SAVING * _count_bits(self.wanted)


@dataclass(frozen=True)
class ExchangeRound:
    """Cells that are read and passed on together, in order, and the rank that reads each (its owner)."""

    cells: Integers
    owners: Integers


def plan_exchange(strips: Strips, bytes_of: Sequence[int], world: World | None) -> tuple[Strips, Exchange | None]:
    """Plan which reads are exchanged. A collective.

    Returns the strips that this rank reads by itself, and the exchange of all others, if there are any.
    strips: what this rank needs, cut at cells, in file order. bytes_of: the size of each file. Raises LostRanksError.
    """
    if world is None or world.size == 1 or not len(bytes_of):
        return strips, None
    demand, cells = _sum_demand(strips, bytes_of)
    shared = demand.shared
    if not shared.any():
        return strips, None
    is_shared = shared[cells]
    rounds = plan_rounds(demand, world.size)
    return strips[~is_shared], Exchange(demand.first, demand.wanted, rounds, strips[is_shared], cells[is_shared], world)


def plan_rounds(demand: CellDemand, ranks: int) -> list[ExchangeRound]:
    """Divide the shared cells into rounds.

    In a round no rank needs much more memory than EXCHANGE_BYTES, and all ranks read about as much.
    """
    cells = np.flatnonzero(demand.shared)
    blocks = _count_bits(demand.wanted[cells])
    # A round ends where the next cell would exceed one of these: bytes needed on the rank that needs most, bytes sent
    # by all ranks, bytes read by all ranks.
    limits = [
        (np.cumsum(demand.largest[cells]), EXCHANGE_BYTES),
        (np.cumsum(demand.copied[cells]), EXCHANGE_BYTES * ranks),
        (np.cumsum(blocks * BLOCK_BYTES), EXCHANGE_BYTES * ranks),
    ]
    rounds, start = [], 0
    while start < len(cells):
        ends = [np.searchsorted(total, (total[start - 1] if start else 0) + most, "right") for total, most in limits]
        stop = max(start + 1, int(min(ends)))
        # Cut the round's blocks into equal parts in file order, one per rank; a cell belongs where its middle lies.
        middle = np.cumsum(blocks[start:stop]) - blocks[start:stop] / 2
        owners = (middle * ranks / blocks[start:stop].sum()).astype(np.int64)
        rounds.append(ExchangeRound(cells[start:stop], owners))
        start = stop
    return rounds


@dataclass(frozen=True)
class Exchange:
    """The exchange of one load, as one rank sees it."""

    first: Integers
    """[files]: its first cell."""
    wanted: Integers
    """[cells]: bit mask of the blocks that any rank needs."""
    rounds: list[ExchangeRound]
    strips: Strips
    """Strips of the shared cells that this rank needs, in file order."""
    cells: Integers
    """[strips]: the cell of each."""
    world: World

    def run(self, source: ShardReader, targets: LoadDestinations) -> None:
        """Read, verify and pass on all shared cells. A collective. Reads one round ahead of the one that is passed on.

        Raises what reading raises, on the rank that read; the other ranks then return early, so the caller must gather
        failures.
        """
        # Two buffers: one is filled from the disk while the other is passed on.
        most_cells = max(int((part.owners == self.world.rank).sum()) for part in self.rounds)
        buffers = [memoryview(allocate_pages(most_cells * CELL_BYTES)) for _ in range(2)]
        sent, received = _ReusedMemory(), _ReusedMemory()
        with ThreadPoolExecutor(1) as reader:
            # The thread only reads files: all collectives are called here, so that every rank calls them in one order.
            read = reader.submit(self._read, self.rounds[0], source, buffers[0])
            for number, this_round in enumerate(self.rounds):
                if self._has_failed(read):
                    read.result()
                    return
                if number + 1 < len(self.rounds):
                    read = reader.submit(self._read, self.rounds[number + 1], source, buffers[(number + 1) % 2])
                self._pass_on(this_round, buffers[number % 2], targets, sent, received)

    def _has_failed(self, read: Future[None]) -> bool:
        """Wait for this rank's read; returns whether that of any rank has failed. A collective."""
        failed = np.array([read.exception() is not None], dtype=np.int64)
        return bool(_all_reduce(failed, dist.ReduceOp.MAX)[0])

    def _read(self, this_round: ExchangeRound, source: ShardReader, memory: memoryview) -> None:
        """Read the needed blocks of this rank's cells; cell number i of them goes to byte i * CELL_BYTES."""
        own_cells = this_round.cells[this_round.owners == self.world.rank]
        runs = [run for slot, cell in enumerate(own_cells.tolist()) for run in self._list_runs(slot, cell, source)]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda run: source.read(run[0], run[1], run[3], memory[run[2] :]), runs))

    def _list_runs(self, slot: int, cell: int, source: ShardReader) -> list[tuple[int, int, int, int]]:
        """Return (file, byte, byte of the memory, bytes) of every run of needed blocks in a cell."""
        file = int(np.searchsorted(self.first, cell, "right")) - 1
        begin = (cell - int(self.first[file])) * CELL_BYTES
        # Edges of the runs of set bits: where the difference of neighbouring bits is not 0.
        bits = [int(self.wanted[cell]) >> block & 1 for block in range(_BLOCKS)]
        edges = np.flatnonzero(np.diff([0, *bits, 0])).reshape(-1, 2) * BLOCK_BYTES
        end = source.sizes[file]
        return [
            (file, begin + low, slot * CELL_BYTES + low, min(high, end - begin) - low) for low, high in edges.tolist()
        ]

    def _pass_on(
        self,
        this_round: ExchangeRound,
        memory: memoryview,
        targets: LoadDestinations,
        sent: _ReusedMemory,
        received: _ReusedMemory,
    ) -> None:
        """Pass on the cells of a round that are in `memory`, and copy what this rank needs to its tensors."""
        round_cells = this_round.cells
        low, high = np.searchsorted(self.cells, round_cells[0]), np.searchsorted(self.cells, round_cells[-1], "right")
        strips, cells = self.strips[low:high], self.cells[low:high]
        owners = this_round.owners[np.searchsorted(round_cells, cells)]
        # The owner answers requests in the order in which they were sent, so the answers need no labels.
        requests, number_of_ranks = self._exchange_requests(strips, cells, owners)
        packed, lengths = self._pack(this_round, requests, number_of_ranks, memory, sent)
        expected = np.bincount(owners, strip_sizes(strips), self.world.size).astype(np.int64)
        incoming = received.take(int(expected.sum()))
        self._all_to_all(incoming, packed, expected.tolist(), lengths.tolist())
        data, first = incoming.numpy(), 0
        for _, _, count, _, run, shard, at, step in strips.tolist():
            targets[shard].put(at, step, view_runs(data, first, count, run, run))
            first += count * run

    def _exchange_requests(self, strips: Strips, cells: Integers, owners: Integers) -> tuple[Integers, Integers]:
        """Send each owner the strips that this rank needs of its cells. A collective.

        Returns the requests that this rank received, [strips, 5] of (cell, byte in it, count, stride, run) in the order
        of ranks, and [ranks] how many each rank sent.
        """
        # Where a rank puts the bytes is its own affair: an owner is only told which bytes of its cells to send.
        asked = np.stack(
            [cells, strips["begin"] % CELL_BYTES, strips["count"], strips["stride"], strips["run"]], axis=1
        )
        number = np.bincount(owners, minlength=self.world.size)
        # First how many requests come from each rank, so that the buffer for them has the right size.
        number_of_ranks = torch.empty(self.world.size, dtype=torch.int64)
        self._all_to_all(number_of_ranks, torch.from_numpy(number), [1] * self.world.size, [1] * self.world.size)
        requests = torch.empty(int(number_of_ranks.sum()), 5, dtype=torch.int64)
        self._all_to_all(requests, torch.from_numpy(asked), number_of_ranks.tolist(), number.tolist())
        return requests.numpy(), number_of_ranks.numpy()

    def _all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, from_ranks: list[int], to_ranks: list[int]
    ) -> None:
        with report_lost_ranks():
            dist.all_to_all_single(received, sent, from_ranks, to_ranks)

    def _pack(
        self,
        this_round: ExchangeRound,
        requests: Integers,
        number_of_ranks: Integers,
        memory: memoryview,
        sent: _ReusedMemory,
    ) -> tuple[torch.Tensor, Integers]:
        """Return the requested bytes in the order of the requests, and [ranks] how many go to each."""
        length = requests[:, 2] * requests[:, 4]
        slots = np.searchsorted(this_round.cells[this_round.owners == self.world.rank], requests[:, 0])
        packed = sent.take(int(length.sum()))
        data, first = packed.numpy(), 0
        for slot, (_, begin, count, stride, run) in zip(slots.tolist(), requests.tolist(), strict=True):
            view_runs(data, first, count, run, run)[...] = view_runs(
                memory, slot * CELL_BYTES + begin, count, stride, run
            )
            first += count * run
        ranks = np.repeat(np.arange(self.world.size), number_of_ranks)
        return packed, np.bincount(ranks, length, self.world.size).astype(np.int64)


class _ReusedMemory:
    """Memory that is reused from round to round: to fault in new pages costs more than to copy into them."""

    def __init__(self) -> None:
        self._whole = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes; the content of the round before is lost."""
        if self._whole.numel() < size:
            self._whole = torch.empty(size, dtype=torch.uint8)
        return self._whole[:size]


def _sum_demand(strips: Strips, bytes_of: Sequence[int]) -> tuple[CellDemand, Integers]:
    """Return the demand of all ranks, and the cell of each of this rank's strips. A collective."""
    number = -(-np.array(bytes_of, dtype=np.int64) // CELL_BYTES)
    first = np.cumsum(number) - number
    cells = first[strips["file"]] + strips["begin"] // CELL_BYTES
    files, blocks = list_blocks(plan_block_reads(strips, bytes_of))
    touched, total = first[files] + blocks // _BLOCKS, int(number.sum())
    wanted = np.zeros(total, dtype=np.int64)
    # Not wanted[touched] |= ...: of several blocks of one cell that would keep the last one alone.
    np.bitwise_or.at(wanted, touched, np.int64(1) << blocks % _BLOCKS)
    copied = np.bincount(cells, strip_sizes(strips), total).astype(np.int64)
    sums = np.stack([np.bincount(touched, minlength=total), copied])
    sums, largest, wanted = (
        _all_reduce(values, op)
        for values, op in ((sums, dist.ReduceOp.SUM), (copied, dist.ReduceOp.MAX), (wanted, dist.ReduceOp.BOR))
    )
    return CellDemand(first, wanted, sums[0], sums[1], largest), cells


def _all_reduce(values: Integers, op: dist.ReduceOp.RedOpType) -> Integers:
    tensor = torch.from_numpy(values.copy())
    with report_lost_ranks():
        dist.all_reduce(tensor, op=op)
    return tensor.numpy()


def _count_bits(values: Integers) -> Integers:
    """Return how many bits are set in each value."""
    each = np.unpackbits(values.view(np.uint8).reshape(-1, 8), axis=1)
    counted: Integers = each.sum(axis=1, dtype=np.int64)
    return counted
