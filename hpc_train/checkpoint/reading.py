"""Reads of shard files into the tensors that they are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove

import numpy as np
from numpy.typing import NDArray

from hpc_train.api import Piece
from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.source import WORKING, Damaged, Source
from hpc_train.checkpoint.strips import Strips, ends
from hpc_train.checkpoint.targets import Target, view
from hpc_train.checkpoint.transfer import Read

THREADS = 4
"""While some wait for the disk the others verify and copy."""
_LONG = 4 * BLOCK
"""Bytes of a run from which on it is read into the tensor itself."""
_NEAR = 1 << 20
"""Bytes that are still in the processor's cache when they are copied."""


class Reader:
    """Fills pieces from a source."""

    def __init__(self, source: Source, pieces: Sequence[Piece], targets: Sequence[Target]) -> None:
        self._source, self._pieces, self._targets = source, pieces, targets
        self._addresses = np.array([target.address for target in targets], dtype=np.int64)
        self._sizes = np.array([piece.local.nbytes for piece in pieces], dtype=np.int64)

    def run(self, reads: Sequence[Read]) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; what was copied until then stays."""
        if not reads:
            return
        threads = WORKING if self._source.is_cached(reads[0].file) else THREADS
        rest = iter(reads)
        with ThreadPoolExecutor(threads) as pool:
            try:
                for done in [pool.submit(self._some, rest) for _ in range(threads)]:
                    done.result()
            finally:
                deque(rest, 0)  # who interrupts this does not wait for all

    def _some(self, rest: Iterator[Read]) -> None:
        """Whatever no other thread has taken."""
        try:
            for read in rest:
                self._one(read)
        finally:
            deque(rest, 0)  # after an error the others have no more to do

    def _one(self, read: Read) -> None:
        try:
            if self._source.is_direct(read.file):
                self._by_a_copy(read, read.begin, read.end)
            else:
                self._through_the_cache(read)
        except Damaged as damage:
            raise Damaged(damage.name, damage.at, self._tensor_in(read, damage.lost)) from None

    def _through_the_cache(self, read: Read) -> None:
        """Blocks that are all of one run straight to where they belong, the others by way of a copy."""
        apart = self._source.is_cached(read.file) and (read.strips["count"] == 1).all()
        step = _NEAR if apart else read.end - read.begin
        at = read.begin
        for low, high, memory in [*self._straight(read), (read.end, read.end, memoryview(b""))]:
            for begin in range(at, low, step):
                self._by_a_copy(read, begin, min(begin + step, low))
            self._source.read(read.file, low, high - low, memory)
            at = high

    def _straight(self, read: Read) -> list[tuple[int, int, memoryview]]:
        """(first, one past the last) byte of rows of whole blocks that are all of one run, and where they belong."""
        found = []
        long = read.strips[(read.strips["count"] == 1) & (read.strips["run"] >= _LONG)]
        for _, begin, _, _, run, piece, at, _ in long.tolist():
            low, high = -(-begin // BLOCK) * BLOCK, (begin + run) // BLOCK * BLOCK
            memory = self._targets[piece].memory
            if memory is not None and low < high:
                found.append((low, high, memoryview(memory)[at + low - begin : at + high - begin]))
        return found

    def _by_a_copy(self, read: Read, low: int, high: int) -> None:
        """What the strips have of bytes `low` to `high` of the file, which is all of a strip of several runs."""
        data = self._source.scratch(high - low)
        self._source.read(read.file, low, high - low, data)
        strips = read.strips
        near = (strips["count"] == 1) & (self._addresses[strips["piece"]] != 0)
        self._copy_runs(strips[near], np.frombuffer(data, np.uint8), low, high)
        for _, begin, count, stride, run, piece, at, step in strips[~near].tolist():
            first, last = max(begin, low), min(begin + run, high)
            if count == 1 and first < last:
                self._targets[piece].put(at + first - begin, run, view(data, first - low, 1, run, last - first))
            elif count > 1 and low <= begin < high:
                self._targets[piece].put(at, step, view(data, begin - low, count, stride, run))

    def _copy_runs(self, runs: Strips, data: NDArray[np.uint8], low: int, high: int) -> None:
        """Of single runs into the processor's memory. data: bytes `low` to `high` of the file, at least."""
        assert (runs["at"] + runs["run"] <= self._sizes[runs["piece"]]).all()
        assert len(data) >= high - low
        first = np.maximum(runs["begin"], low)
        size = np.minimum(runs["begin"] + runs["run"], high) - first
        to = self._addresses[runs["piece"]] + runs["at"] + first - runs["begin"]
        source = data.ctypes.data + first - low
        for row in np.stack([to, source, size], axis=1)[size > 0].tolist():
            memmove(*row)

    def _tensor_in(self, read: Read, lost: Sequence[tuple[int, int]]) -> str | None:
        """Of the first tensor that has bytes in what is lost."""
        for begin, end in lost:
            hit = (read.strips["begin"] < end) & (ends(read.strips) > begin)
            if hit.any():
                piece: int = read.strips["piece"][hit][0]
                return self._pieces[piece].name
        return None
