"""Reads of shard files into the tensors that they are for."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hpc_train.api import Piece
from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.source import Damaged, Source
from hpc_train.checkpoint.strips import ends
from hpc_train.checkpoint.targets import Target, view
from hpc_train.checkpoint.transfer import Read

THREADS = 4
"""While some wait for the disk the others verify and copy."""
_LONG = 4 * BLOCK
"""Bytes of a run from which on it is read into the tensor itself."""


class Reader:
    """Fills pieces from a source."""

    def __init__(self, source: Source, pieces: Sequence[Piece], targets: Sequence[Target]) -> None:
        self._source, self._pieces, self._targets = source, pieces, targets

    def run(self, reads: Sequence[Read]) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; what was copied until then stays."""
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(self._one, reads):
                pass

    def _one(self, read: Read) -> None:
        try:
            if self._source.is_direct(read.file):
                data = self._source.scratch(read.end - read.begin)
                self._source.read(read.file, read.begin, read.end - read.begin, data)
                self._copy(read, data, read.begin, read.end)
            else:
                self._through_the_cache(read)
        except Damaged as damage:
            raise Damaged(damage.name, damage.at, self._tensor_in(read, damage.lost)) from None

    def _through_the_cache(self, read: Read) -> None:
        """Blocks that are all of one run straight to where they belong, the others by way of a copy."""
        at = read.begin
        for low, high, memory in [*self._straight(read), (read.end, read.end, memoryview(b""))]:
            if low > at:
                data = self._source.scratch(low - at)
                self._source.read(read.file, at, low - at, data)
                self._copy(read, data, at, low)
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

    def _copy(self, read: Read, data: memoryview, low: int, high: int) -> None:
        """What the strips have of bytes `low` to `high` of the file, which is all of a strip of several runs."""
        source = np.frombuffer(data, np.uint8)
        for _, begin, count, stride, run, piece, at, step in read.strips.tolist():
            target = self._targets[piece]
            if count > 1:
                if low <= begin < high:
                    target.put(at, step, view(data, begin - low, count, stride, run))
                continue
            first, last = max(begin, low), min(begin + run, high)
            if first < last:
                target.put_run(at + first - begin, source[first - low : last - low])

    def _tensor_in(self, read: Read, lost: Sequence[tuple[int, int]]) -> str | None:
        """Of the first tensor that has bytes in what is lost."""
        for begin, end in lost:
            hit = (read.strips["begin"] < end) & (ends(read.strips) > begin)
            if hit.any():
                piece: int = read.strips["piece"][hit][0]
                return self._pieces[piece].name
        return None
