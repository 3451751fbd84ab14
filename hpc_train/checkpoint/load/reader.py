"""Read shard files into tensors.

All destinations are computed before the first read: between two reads the processor's caches are full of data, and only
a few operations on plain Python integers are cheap then. Some threads read; `LoadWorkers` verify and copy. Threads that
did both would fall into step, and the disk would idle while all of them verify.
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
)
from hpc_train.checkpoint.storage.file_system import allocate_pages
from hpc_train.interfaces import TensorShard

_MAX_BUFFERS = 1000
"""Maximum buffers of one preadv(2); Linux takes 1024 (IOV_MAX)."""
CopyRun = list[int]
"""[first byte in the file, one past the last, address that byte 0 of the file would have, shard]"""


@dataclass(frozen=True)
class PlannedRead:
    """A read with the destinations of its bytes."""

    read: BlockRead
    runs: list[CopyRun] | None
    """Copies in file order; None if some strips are not one run into host memory."""
    apart: bool
    """Whether every byte has at most one destination."""


def plan_destinations(reads: Sequence[BlockRead], strips: Strips, addresses: NDArray[np.int64]) -> list[PlannedRead]:
    """Compute the destinations of all reads before I/O starts; returns them in the same order.

    reads: of all the strips. addresses: memory of every tensor; 0 on a GPU.
    """
    near = (strips["count"] == 1) & (addresses[strips["shard"]] != 0)
    runs, stops = make_copy_runs(strips, addresses), np.cumsum([len(read.strips) for read in reads], dtype=np.int64)
    starts = np.concatenate([[0], stops[:-1]])
    # Strips are sorted by begin, so if any two overlap, two neighbours do.
    clash = np.concatenate([[False], strips["begin"][1:] < strip_ends(strips)[:-1]])
    clash[starts] = False
    all_near = np.logical_and.reduceat(near, starts)
    are_disjoint = ~np.logical_or.reduceat(clash, starts)
    columns = (column.tolist() for column in (starts, stops, all_near, are_disjoint))
    return [
        PlannedRead(read, runs[start:stop] if near else None, are_disjoint)
        for read, start, stop, near, are_disjoint in zip(reads, *columns, strict=True)
    ]


def make_copy_runs(strips: Strips, addresses: NDArray[np.int64]) -> list[CopyRun]:
    """Return the copy of each strip; only valid for strips of one run into host memory."""
    # base + (byte of the file) is the address of that byte in memory.
    base = addresses[strips["shard"]] + strips["at"] - strips["begin"]
    runs: list[CopyRun] = np.stack([strips["begin"], strip_ends(strips), base, strips["shard"]], axis=1).tolist()
    return runs


def make_io_vector(rest: deque[CopyRun], low: int, high: int, between: memoryview) -> list[Any] | None:
    """Return buffers for bytes [low, high) of the file, for preadv(2); None if there are too many.

    rest: copies in file order that do not overlap; those before `low` are dropped. between: takes bytes that no tensor
    needs.
    """
    buffers: list[Any] = []
    at = low
    while rest and rest[0][1] <= low:
        rest.popleft()
    for begin, end, base, _ in rest:
        if begin >= high:
            break
        if begin > at:
            buffers.append(between[at - low : begin - low])
            at = begin
        stop = end if end < high else high
        # A view of the tensor's memory, which the caller keeps alive; a memoryview would cost several times as much.
        buffers.append((c_ubyte * (stop - at)).from_address(base + at))
        at = stop
        if len(buffers) > _MAX_BUFFERS:
            return None
    if at < high:
        buffers.append(between[at - low : high - low])
    return buffers


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
    """Threads that verify and copy, and a fixed number of buffers to read into."""

    def __init__(self, threads: int, number: int, size: int) -> None:
        """number: buffers of `size` bytes, in whole pages, allocated when they are first used."""
        self._pool, self._size = ThreadPoolExecutor(threads), size
        self._free: SimpleQueue[mmap.mmap | None] = SimpleQueue()
        for _ in range(number):
            self._free.put(None)
        self._pending: deque[Future[None]] = deque()
        self.failed = False
        """Whether a worker has failed; `wait` raises its error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take_buffer(self) -> mmap.mmap:
        """Take a free buffer; waits until there is one."""
        return self._free.get() or allocate_pages(self._size)

    def submit(self, work: Callable[[], None], memory: mmap.mmap) -> None:
        """Call `work` in a worker thread, and free the buffer afterwards."""
        self._pending.append(self._pool.submit(self._run, work, memory))

    def _run(self, work: Callable[[], None], memory: mmap.mmap) -> None:
        try:
            work()
        except BaseException:
            self.failed = True
            raise
        finally:
            self._free.put(memory)

    def wait(self) -> None:
        """Wait for all work. Raises the first error."""
        while self._pending:
            self._pending.popleft().result()


_WAITING_READS = 2
"""Threads that read past the page cache."""


class TensorReader:
    """Fills tensors from the shard files of a step."""

    def __init__(self, source: ShardReader, shards: Sequence[TensorShard], targets: LoadDestinations) -> None:
        self._source, self._pieces, self._targets = source, shards, targets

    def run(self, strips: Strips) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; tensors may be partly filled then.

        strips: bytes to load, cut at cells, in file order.
        """
        if not len(strips):
            return
        planned = plan_destinations(
            plan_block_reads(strips, self._source.sizes, WIDE_READ_BYTES), strips, self._targets.addresses
        )
        threads = self._source.threads if self._source.is_cached(planned[0].read.file) else _WAITING_READS
        rest = iter(planned)
        with (
            LoadWorkers(self._source.threads_beside_io, 2 * _WAITING_READS, WIDE_READ_BYTES) as workers,
            ThreadPoolExecutor(threads) as pool,
        ):
            try:
                for done in [pool.submit(self._read_remaining, rest, workers) for _ in range(threads)]:
                    done.result()
                workers.wait()
            finally:
                deque(rest, 0)  # drop what is left, so that an interrupt does not wait for all reads

    def _read_remaining(self, rest: Iterator[PlannedRead], workers: LoadWorkers) -> None:
        """Do reads that no other thread has taken yet, until none is left."""
        try:
            for planned in rest:
                read = planned.read
                if self._source.is_direct(read.file):
                    memory = workers.take_buffer()
                    self._source.fetch(read.file, read.begin, read.end - read.begin, memoryview(memory))
                    workers.submit(partial(self._verify_and_copy, planned, memoryview(memory)), memory)
                else:
                    self._name_damage(read, partial(self._read_through_cache, planned))
                if workers.failed:
                    return
        finally:
            deque(rest, 0)  # after an error: drop what is left, so that the other threads stop too

    def _verify_and_copy(self, planned: PlannedRead, memory: memoryview) -> None:
        """Verify fetched bytes and copy them to their tensors."""
        read = planned.read
        data, runs = memory[: read.end - read.begin], None if planned.runs is None else deque(planned.runs)
        verify = partial(self._source.verify, read.file, read.begin, data)
        self._name_damage(read, lambda: self._copy_verified(read, read.begin, read.end, runs, data, verify))

    def _read_through_cache(self, planned: PlannedRead) -> None:
        read, runs = planned.read, planned.runs
        if runs is not None and planned.apart and self._source.is_cached(read.file):
            self._read_scattered(read, deque(runs))
            return
        for part in plan_block_reads(read.strips, self._source.sizes):
            self._read_and_copy(part, part.begin, part.end, None)

    def _name_damage(self, read: BlockRead, work: Callable[[], None]) -> None:
        """Call `work`, and add the name of a tensor to the error for a damaged block."""
        try:
            work()
        except DamagedBlockError as damage:
            raise DamagedBlockError(damage.name, damage.at, self._find_tensor_in(read, damage.lost)) from None

    def _read_scattered(self, read: BlockRead, runs: deque[CopyRun]) -> None:
        """Read straight into the tensors, then verify while the bytes are in the processor's cache."""
        between = self._source.scratch(CACHE_BYTES)
        for low in range(read.begin, read.end, CACHE_BYTES):
            high = min(low + CACHE_BYTES, read.end)
            to = make_io_vector(runs, low, high, between)
            if to is None:
                self._read_and_copy(read, low, high, runs)
            else:
                self._source.scatter(read.file, low, to)

    def _are_single_runs(self, strips: Strips) -> NDArray[np.bool_]:
        """Return which strips are one run into host memory."""
        single: NDArray[np.bool_] = (strips["count"] == 1) & (self._targets.addresses[strips["shard"]] != 0)
        return single

    def _read_and_copy(self, read: BlockRead, low: int, high: int, runs: deque[CopyRun] | None) -> None:
        """Read bytes [low, high) of the file into scratch memory and copy them from there."""
        data = self._source.scratch(high - low)
        self._copy_verified(read, low, high, runs, data, partial(self._source.read, read.file, low, high - low, data))

    def _copy_verified(
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
        near = self._are_single_runs(strips)
        get(make_copier(deque(make_copy_runs(strips[near], self._targets.addresses)), data, low, high))
        self._copy_others(strips[~near], data, low, high)

    def _copy_others(self, strips: Strips, data: memoryview, low: int, high: int) -> None:
        """Copy strips that are not one run into host memory. data: bytes [low, high) of the file."""
        for _, begin, count, stride, run, shard, at, step in strips.tolist():
            first, last = max(begin, low), min(begin + run, high)
            if count == 1 and first < last:
                self._targets[shard].put(at + first - begin, run, view_runs(data, first - low, 1, run, last - first))
            elif count > 1 and low <= begin < high:
                self._targets[shard].put(at, step, view_runs(data, begin - low, count, stride, run))

    def _find_tensor_in(self, read: BlockRead, lost: Sequence[tuple[int, int]]) -> str | None:
        """Return the name of the first tensor with bytes in the damaged spans."""
        for begin, end in lost:
            hit = (read.strips["begin"] < end) & (strip_ends(read.strips) > begin)
            if hit.any():
                shard: int = read.strips["shard"][hit][0]
                return self._pieces[shard].name
        return None
