"""Read shard files into the tensors that they are for.

All destinations are computed before the first read: between two reads the processor's caches are full of data, so only
a few operations on plain Python integers are left for then. Some threads read, and `LoadWorkers` verify and copy.
Threads that did both would fall into step, and the disk would wait while all of them verify.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import c_ubyte, memmove
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.load.read_schedule import (
    WIDE_READ_BYTES,
    BlockRead,
    LoadDestinations,
    Strips,
    plan_block_reads,
    strip_ends,
    view_runs,
)
from hpc_train.checkpoint.load.verified_reader import (
    CACHE_BYTES,
    DamagedBlockError,
    OnVerified,
    ShardReader,
    allocate_pages,
)
from hpc_train.interfaces import TensorShard

_MOST_BUFFERS = 1000
"""Maximum buffers of one preadv(2); Linux takes 1024 (IOV_MAX)."""
CopyRun = list[int]
"""[first byte in the file, one past the last, address that byte 0 of the file would have, piece]"""


@dataclass(frozen=True)
class PlannedRead:
    """A read with the destinations of its bytes."""

    read: BlockRead
    runs: list[CopyRun] | None
    """Copies in file order; None if some strips are not one run into host memory."""
    apart: bool
    """Whether every byte has at most one destination."""


def plan_destinations(found: Sequence[BlockRead], strips: Strips, addresses: NDArray[np.int64]) -> list[PlannedRead]:
    """Compute the destinations of all reads before I/O starts; returns them in the same order.

    found: reads of all the strips. addresses: memory of every tensor; 0 on a GPU.
    """
    near = (strips["count"] == 1) & (addresses[strips["piece"]] != 0)
    runs, stops = make_copy_runs(strips, addresses), np.cumsum([len(it.strips) for it in found], dtype=np.int64)
    starts = np.concatenate([[0], stops[:-1]])
    clash = np.concatenate(
        [[False], strips["begin"][1:] < strip_ends(strips)[:-1]]
    )  # if any do, then two neighbours do
    clash[starts] = False
    all_near = np.logical_and.reduceat(near, starts)
    apart = ~np.logical_or.reduceat(clash, starts)
    told = (it.tolist() for it in (starts, stops, all_near, apart))
    return [
        PlannedRead(read, runs[start:stop] if near else None, apart)
        for read, start, stop, near, apart in zip(found, *told, strict=True)
    ]


def make_copy_runs(strips: Strips, addresses: NDArray[np.int64]) -> list[CopyRun]:
    """Return the copy of each strip; only valid for strips of one run into host memory."""
    base = addresses[strips["piece"]] + strips["at"] - strips["begin"]
    found: list[CopyRun] = np.stack([strips["begin"], strip_ends(strips), base, strips["piece"]], axis=1).tolist()
    return found


def make_io_vector(rest: deque[CopyRun], low: int, high: int, between: memoryview) -> list[Any] | None:
    """Return buffers for bytes [low, high) of the file, for preadv(2); None if there are too many.

    rest: copies in file order that do not overlap; those before `low` are dropped. between: takes bytes that no tensor
    needs.
    """
    found: list[Any] = []
    at = low
    while rest and rest[0][1] <= low:
        rest.popleft()
    for begin, end, base, _ in rest:
        if begin >= high:
            break
        if begin > at:
            found.append(between[at - low : begin - low])
            at = begin
        stop = end if end < high else high
        found.append((c_ubyte * (stop - at)).from_address(base + at))
        at = stop
        if len(found) > _MOST_BUFFERS:
            return None
    if at < high:
        found.append(between[at - low : high - low])
    return found


def make_copier(rest: deque[CopyRun], data: memoryview, low: int, high: int) -> OnVerified:
    """Make a function that copies the runs of one part of `data` after the other.

    rest: copies in file order; those before a part are dropped. data: bytes [low, high) of the file.
    """
    assert len(data) >= high - low
    source = np.frombuffer(data, np.uint8).ctypes.data - low

    def copy(first: int, last: int) -> None:
        assert low <= first <= last <= high
        while rest and rest[0][1] <= first:
            rest.popleft()
        for begin, end, base, _ in rest:
            if begin >= last:
                return
            at, stop = max(begin, first), min(end, last)
            if at < stop:
                memmove(base + at, source + at, stop - at)

    return copy


class LoadWorkers:
    """Threads that verify and copy, and the buffers that are read into for them."""

    def __init__(self, threads: int, number: int, size: int) -> None:
        """number: buffers of `size` bytes, in whole pages, allocated when they are first used."""
        self._pool, self._size = ThreadPoolExecutor(threads), size
        self._free: SimpleQueue[mmap.mmap | None] = SimpleQueue()
        for _ in range(number):
            self._free.put(None)
        self._under_way: deque[Future[None]] = deque()
        self.failed = False
        """Whether a worker has failed; `wait` raises its error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def memory(self) -> mmap.mmap:
        """Take a free buffer; waits for one."""
        return self._free.get() or allocate_pages(self._size)

    def do(self, work: Callable[[], None], memory: mmap.mmap) -> None:
        """Call `work` in a worker thread; the buffer is free afterwards."""
        self._under_way.append(self._pool.submit(self._do, work, memory))

    def _do(self, work: Callable[[], None], memory: mmap.mmap) -> None:
        try:
            work()
        except BaseException:
            self.failed = True
            raise
        finally:
            self._free.put(memory)

    def wait(self) -> None:
        """Wait for all work. Raises the first error."""
        while self._under_way:
            self._under_way.popleft().result()


_WAITING_READS = 2
"""Threads that read past the page cache."""


class PieceReader:
    """Fills tensors from the shard files of a step."""

    def __init__(self, source: ShardReader, pieces: Sequence[TensorShard], targets: LoadDestinations) -> None:
        self._source, self._pieces, self._targets = source, pieces, targets

    def run(self, strips: Strips) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; tensors may be partly filled then.

        strips: bytes to load, cut at cells, in file order.
        """
        if not len(strips):
            return
        found = plan_destinations(
            plan_block_reads(strips, self._source.sizes, WIDE_READ_BYTES), strips, self._targets.addresses
        )
        threads = self._source.working if self._source.is_cached(found[0].read.file) else _WAITING_READS
        rest = iter(found)
        with (
            LoadWorkers(self._source.beside, 2 * _WAITING_READS, WIDE_READ_BYTES) as consumers,
            ThreadPoolExecutor(threads) as pool,
        ):
            try:
                for done in [pool.submit(self._some, rest, consumers) for _ in range(threads)]:
                    done.result()
                consumers.wait()
            finally:
                deque(rest, 0)  # an interrupt does not wait for all reads

    def _some(self, rest: Iterator[PlannedRead], consumers: LoadWorkers) -> None:
        """Do reads that no other thread has taken yet."""
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
            deque(rest, 0)  # after an error the other threads stop too

    def _fetched(self, it: PlannedRead, memory: memoryview) -> None:
        read = it.read
        data, runs = memory[: read.end - read.begin], None if it.runs is None else deque(it.runs)
        look = partial(self._source.verify, read.file, read.begin, data)
        self._named(read, lambda: self._take(read, read.begin, read.end, runs, data, look))

    def _through_the_cache(self, it: PlannedRead) -> None:
        read, runs = it.read, it.runs
        if runs is not None and it.apart and self._source.is_cached(read.file):
            self._scattered(read, deque(runs))
            return
        for part in plan_block_reads(read.strips, self._source.sizes):
            self._by_a_copy(part, part.begin, part.end, None)

    def _named(self, read: BlockRead, work: Callable[[], None]) -> None:
        """Call `work`, and add the name of a tensor to the error for a damaged block."""
        try:
            work()
        except DamagedBlockError as damage:
            raise DamagedBlockError(damage.name, damage.at, self._tensor_in(read, damage.lost)) from None

    def _scattered(self, read: BlockRead, runs: deque[CopyRun]) -> None:
        """Read straight into the tensors, then verify while the bytes are in the processor's cache."""
        between = self._source.scratch(CACHE_BYTES)
        for low in range(read.begin, read.end, CACHE_BYTES):
            high = min(low + CACHE_BYTES, read.end)
            to = make_io_vector(runs, low, high, between)
            if to is None:
                self._by_a_copy(read, low, high, runs)
            else:
                self._source.scatter(read.file, low, to)

    def _near(self, strips: Strips) -> NDArray[np.bool_]:
        """Return which strips are one run into host memory."""
        found: NDArray[np.bool_] = (strips["count"] == 1) & (self._targets.addresses[strips["piece"]] != 0)
        return found

    def _by_a_copy(self, read: BlockRead, low: int, high: int, runs: deque[CopyRun] | None) -> None:
        """Read bytes [low, high) of the file into scratch memory and copy them from there."""
        data = self._source.scratch(high - low)
        self._take(read, low, high, runs, data, partial(self._source.read, read.file, low, high - low, data))

    def _take(
        self,
        read: BlockRead,
        low: int,
        high: int,
        runs: deque[CopyRun] | None,
        data: memoryview,
        get: Callable[[OnVerified], None],
    ) -> None:
        """Copy bytes [low, high) of the file from `data`, which holds all of any strip of several runs.

        runs: copies left to do, if all are single runs into host memory. get: reads or verifies `data`, and calls back
        for each verified part.
        """
        if runs is not None:
            get(make_copier(runs, data, low, high))
            return
        strips = read.strips[(read.strips["begin"] < high) & (strip_ends(read.strips) > low)]
        near = self._near(strips)
        get(make_copier(deque(make_copy_runs(strips[near], self._targets.addresses)), data, low, high))
        self._copy_others(strips[~near], data, low, high)

    def _copy_others(self, strips: Strips, data: memoryview, low: int, high: int) -> None:
        """Copy strips that are not one run into host memory. data: bytes [low, high) of the file."""
        for _, begin, count, stride, run, piece, at, step in strips.tolist():
            first, last = max(begin, low), min(begin + run, high)
            if count == 1 and first < last:
                self._targets[piece].put(at + first - begin, run, view_runs(data, first - low, 1, run, last - first))
            elif count > 1 and low <= begin < high:
                self._targets[piece].put(at, step, view_runs(data, begin - low, count, stride, run))

    def _tensor_in(self, read: BlockRead, lost: Sequence[tuple[int, int]]) -> str | None:
        """Return the name of the first tensor with bytes in the damaged spans."""
        for begin, end in lost:
            hit = (read.strips["begin"] < end) & (strip_ends(read.strips) > begin)
            if hit.any():
                piece: int = read.strips["piece"][hit][0]
                return self._pieces[piece].name
        return None
