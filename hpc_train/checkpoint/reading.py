"""Reads of shard files into the tensors that they are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from hpc_train.api import Piece
from hpc_train.checkpoint.planned import LONG, Planned, Run, Straight, copies, overlap, plan, runs_of, straight
from hpc_train.checkpoint.source import BESIDE, WORKING, Damaged, Source
from hpc_train.checkpoint.strips import Strips, ends
from hpc_train.checkpoint.targets import Target, view
from hpc_train.checkpoint.transfer import WIDE, Read, reads

THREADS = BESIDE + 2
"""While two wait for the disk the others verify and copy."""
_NEAR = 1 << 20
"""Bytes that are still in the processor's cache when they are copied."""


class Reader:
    """Fills pieces from a source."""

    def __init__(self, source: Source, pieces: Sequence[Piece], targets: Sequence[Target]) -> None:
        self._source, self._pieces, self._targets = source, pieces, targets
        self._addresses = np.array([target.address for target in targets], dtype=np.int64)
        self._sizes = np.array([piece.local.nbytes for piece in pieces], dtype=np.int64)

    def run(self, strips: Strips) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; what was copied until then stays.

        strips: what is wanted, cut by cells, in file order.
        """
        last = strips["at"] + (strips["count"] - 1) * strips["step"]
        assert (last + strips["run"] <= self._sizes[strips["piece"]]).all()
        found = plan(reads(strips, self._source.sizes, WIDE), strips, self._addresses, self._memory_of)
        if not found:
            return
        threads = WORKING if self._source.is_cached(found[0].read.file) else THREADS
        rest = iter(found)
        with ThreadPoolExecutor(threads) as pool:
            try:
                for done in [pool.submit(self._some, rest) for _ in range(threads)]:
                    done.result()
            finally:
                deque(rest, 0)  # who interrupts this does not wait for all

    def _memory_of(self, piece: int) -> memoryview:
        return memoryview(self._targets[piece].memory)  # type: ignore[arg-type]

    def _some(self, rest: Iterator[Planned]) -> None:
        """Whatever no other thread has taken."""
        try:
            for it in rest:
                self._one(it)
        finally:
            deque(rest, 0)  # after an error the others have no more to do

    def _one(self, it: Planned) -> None:
        read, runs = it.read, it.runs
        try:
            if self._source.is_direct(read.file):
                self._by_a_copy(read, read.begin, read.end, None if runs is None else deque(runs))
            elif runs is not None and self._source.is_cached(read.file):
                self._through_the_cache(read, it.straight, _NEAR, deque(runs))
            else:
                for part in reads(read.strips, self._source.sizes):
                    self._through_the_cache(part, self._straight(part.strips), part.end - part.begin)
        except Damaged as damage:
            raise Damaged(damage.name, damage.at, self._tensor_in(read, damage.lost)) from None

    def _through_the_cache(
        self, read: Read, whole: Sequence[Straight], step: int, runs: deque[Run] | None = None
    ) -> None:
        """Blocks that are all of one run straight to where they belong, the others by way of a copy.

        step: bytes that are copied at a time.
        """
        at = read.begin
        for low, high, memory in [*whole, (read.end, read.end, memoryview(b""))]:
            for begin in range(at, low, step):
                self._by_a_copy(read, begin, min(begin + step, low), runs)
            self._source.read(read.file, low, high - low, memory)
            at = high

    def _straight(self, strips: Strips) -> list[Straight]:
        long = self._near(strips) & (strips["run"] >= LONG) & (not overlap(strips))
        return straight(runs_of(strips[long], self._addresses), self._addresses, self._memory_of)

    def _near(self, strips: Strips) -> NDArray[np.bool_]:
        """Which are single runs into the processor's memory."""
        found: NDArray[np.bool_] = (strips["count"] == 1) & (self._addresses[strips["piece"]] != 0)
        return found

    def _by_a_copy(self, read: Read, low: int, high: int, runs: deque[Run] | None) -> None:
        """What is wanted of bytes `low` to `high` of the file, which is all of a strip of several runs.

        runs: those of the strips that are not done with, if all are single runs into the processor's memory.
        """
        data = self._source.scratch(high - low)
        if runs is not None:
            self._source.read(read.file, low, high - low, data, copies(runs, data, low, high))
            return
        strips = read.strips[(read.strips["begin"] < high) & (ends(read.strips) > low)]
        near = self._near(strips)
        then = copies(deque(runs_of(strips[near], self._addresses)), data, low, high)
        self._source.read(read.file, low, high - low, data, then)
        self._copy_others(strips[~near], data, low, high)

    def _copy_others(self, strips: Strips, data: memoryview, low: int, high: int) -> None:
        """data: bytes `low` to `high` of the file."""
        for _, begin, count, stride, run, piece, at, step in strips.tolist():
            first, last = max(begin, low), min(begin + run, high)
            if count == 1 and first < last:
                self._targets[piece].put(at + first - begin, run, view(data, first - low, 1, run, last - first))
            elif count > 1 and low <= begin < high:
                self._targets[piece].put(at, step, view(data, begin - low, count, stride, run))

    def _tensor_in(self, read: Read, lost: Sequence[tuple[int, int]]) -> str | None:
        """Of the first tensor that has bytes in what is lost."""
        for begin, end in lost:
            hit = (read.strips["begin"] < end) & (ends(read.strips) > begin)
            if hit.any():
                piece: int = read.strips["piece"][hit][0]
                return self._pieces[piece].name
        return None
