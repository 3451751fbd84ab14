"""Reads of shard files into the tensors that they are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hpc_train.api import Piece
from hpc_train.checkpoint.consumers import Consumers
from hpc_train.checkpoint.planned import Planned, Run, copies, io_vector, plan, runs_of
from hpc_train.checkpoint.source import HOT, Damaged, Source, Then
from hpc_train.checkpoint.strips import Strips, ends
from hpc_train.checkpoint.targets import Targets, view
from hpc_train.checkpoint.transfer import WIDE, Read, reads

_WAITING = 2
"""Threads that wait for the disk."""


class Reader:
    """Fills pieces from a source."""

    def __init__(self, source: Source, pieces: Sequence[Piece], targets: Targets) -> None:
        self._source, self._pieces, self._targets = source, pieces, targets

    def run(self, strips: Strips) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; what was copied until then stays.

        strips: what is wanted, cut by cells, in file order.
        """
        if not len(strips):
            return
        found = plan(reads(strips, self._source.sizes, WIDE), strips, self._targets.addresses)
        threads = self._source.working if self._source.is_cached(found[0].read.file) else _WAITING
        rest = iter(found)
        with Consumers(self._source.beside, 2 * _WAITING, WIDE) as consumers, ThreadPoolExecutor(threads) as pool:
            try:
                for done in [pool.submit(self._some, rest, consumers) for _ in range(threads)]:
                    done.result()
                consumers.wait()
            finally:
                deque(rest, 0)  # who interrupts this does not wait for all

    def _some(self, rest: Iterator[Planned], consumers: Consumers) -> None:
        """Whatever no other thread has taken."""
        try:
            for it in rest:
                if self._source.is_direct(it.read.file):
                    memory = consumers.memory()
                    self._source.fetch(it.read.file, it.read.begin, it.read.end - it.read.begin, memoryview(memory))
                    consumers.do(partial(self._fetched, it, memoryview(memory)), memory)
                else:
                    self._named(it.read, partial(self._through_the_cache, it))
                if consumers.failed:
                    return
        finally:
            deque(rest, 0)  # after an error the others have no more to do

    def _fetched(self, it: Planned, memory: memoryview) -> None:
        read = it.read
        data, runs = memory[: read.end - read.begin], None if it.runs is None else deque(it.runs)
        look = partial(self._source.verify, read.file, read.begin, data)
        self._named(read, lambda: self._take(read, read.begin, read.end, runs, data, look))

    def _through_the_cache(self, it: Planned) -> None:
        read, runs = it.read, it.runs
        if runs is not None and it.apart and self._source.is_cached(read.file):
            self._scattered(read, deque(runs))
            return
        for part in reads(read.strips, self._source.sizes):
            self._by_a_copy(part, part.begin, part.end, None)

    def _named(self, read: Read, work: Callable[[], None]) -> None:
        """Do it; what is damaged is told with the name of a tensor."""
        try:
            work()
        except Damaged as damage:
            raise Damaged(damage.name, damage.at, self._tensor_in(read, damage.lost)) from None

    def _scattered(self, read: Read, runs: deque[Run]) -> None:
        """Straight to where it belongs, as much at a time as is then still in the processor's cache."""
        between = self._source.scratch(HOT)
        for low in range(read.begin, read.end, HOT):
            high = min(low + HOT, read.end)
            to = io_vector(runs, low, high, between)
            if to is None:
                self._by_a_copy(read, low, high, runs)
            else:
                self._source.scatter(read.file, low, to)

    def _near(self, strips: Strips) -> NDArray[np.bool_]:
        """Which are single runs into the processor's memory."""
        found: NDArray[np.bool_] = (strips["count"] == 1) & (self._targets.addresses[strips["piece"]] != 0)
        return found

    def _by_a_copy(self, read: Read, low: int, high: int, runs: deque[Run] | None) -> None:
        """What is wanted of bytes `low` to `high` of the file."""
        data = self._source.scratch(high - low)
        self._take(read, low, high, runs, data, partial(self._source.read, read.file, low, high - low, data))

    def _take(
        self,
        read: Read,
        low: int,
        high: int,
        runs: deque[Run] | None,
        data: memoryview,
        get: Callable[[Then], None],
    ) -> None:
        """The same from `data`; they are all of a strip of several runs.

        runs: those of the strips that are not done with, if all are single runs into the processor's memory. get: tells
        what of `data` has come and is verified.
        """
        if runs is not None:
            get(copies(runs, data, low, high))
            return
        strips = read.strips[(read.strips["begin"] < high) & (ends(read.strips) > low)]
        near = self._near(strips)
        get(copies(deque(runs_of(strips[near], self._targets.addresses)), data, low, high))
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
