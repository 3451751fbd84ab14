"""Reads of shard files into the tensors that they are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from hpc_train.api import Piece
from hpc_train.checkpoint.planned import Planned, Run, buffers, copies, plan, runs_of
from hpc_train.checkpoint.source import BESIDE, HOT, WORKING, Damaged, Source
from hpc_train.checkpoint.strips import Strips, ends
from hpc_train.checkpoint.targets import Targets, view
from hpc_train.checkpoint.transfer import WIDE, Read, reads

THREADS = BESIDE + 2
"""While two wait for the disk the others verify and copy."""


class Reader:
    """Fills pieces from a source."""

    def __init__(self, source: Source, pieces: Sequence[Piece], targets: Targets) -> None:
        self._source, self._pieces, self._targets = source, pieces, targets

    def run(self, strips: Strips) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; what was copied until then stays.

        strips: what is wanted, cut by cells, in file order.
        """
        last = strips["at"] + (strips["count"] - 1) * strips["step"]
        assert (last + strips["run"] <= self._targets.sizes[strips["piece"]]).all()
        if not len(strips):
            return
        found = plan(reads(strips, self._source.sizes, WIDE), strips, self._targets.addresses)
        threads = WORKING if self._source.is_cached(found[0].read.file) else THREADS
        rest = iter(found)
        with ThreadPoolExecutor(threads) as pool:
            try:
                for done in [pool.submit(self._some, rest) for _ in range(threads)]:
                    done.result()
            finally:
                deque(rest, 0)  # who interrupts this does not wait for all

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
            if runs is not None and it.apart and self._source.is_cached(read.file):
                self._scattered(read, deque(runs))
            elif self._source.is_direct(read.file):
                self._by_a_copy(read, read.begin, read.end, None if runs is None else deque(runs))
            else:
                for part in reads(read.strips, self._source.sizes):
                    self._by_a_copy(part, part.begin, part.end, None)
        except Damaged as damage:
            raise Damaged(damage.name, damage.at, self._tensor_in(read, damage.lost)) from None

    def _scattered(self, read: Read, runs: deque[Run]) -> None:
        """Straight to where it belongs, as much at a time as is then still in the processor's cache."""
        between = self._source.scratch(HOT)
        for low in range(read.begin, read.end, HOT):
            high = min(low + HOT, read.end)
            to = buffers(runs, low, high, between)
            if to is None:
                self._by_a_copy(read, low, high, runs)
            else:
                self._source.scatter(read.file, low, to)

    def _near(self, strips: Strips) -> NDArray[np.bool_]:
        """Which are single runs into the processor's memory."""
        found: NDArray[np.bool_] = (strips["count"] == 1) & (self._targets.addresses[strips["piece"]] != 0)
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
        then = copies(deque(runs_of(strips[near], self._targets.addresses)), data, low, high)
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
