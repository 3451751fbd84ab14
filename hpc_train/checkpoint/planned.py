"""What becomes of each read, reckoned for all of them before the first.

Between two reads the processor's caches are full of data, which makes calls of libraries slow, and Python's lock lets
the other threads wait for them. So what is left to do then are a few operations on Python's own numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.source import Then
from hpc_train.checkpoint.strips import Strips, ends
from hpc_train.checkpoint.transfer import Read

LONG = 4 * BLOCK
"""Bytes of a run from which on it is read into the tensor itself."""
Run = list[int]
"""First byte in the file, one past the last, the address that byte 0 of the file would have, and the piece."""
Straight = tuple[int, int, memoryview]
"""(first, one past the last) byte of whole blocks that are all of one run, and where they belong."""


@dataclass(frozen=True)
class Planned:
    """A read."""

    read: Read
    runs: list[Run] | None
    """In file order; None if some are not single runs into the processor's memory."""
    straight: list[Straight]
    """What can be read to where it belongs."""


def plan(
    found: Sequence[Read], strips: Strips, addresses: NDArray[np.int64], memory_of: Callable[[int], memoryview]
) -> list[Planned]:
    """In the same order.

    found: of all the strips. addresses: of the memory of every piece; 0 where it is not the processor's.
    """
    near = (strips["count"] == 1) & (addresses[strips["piece"]] != 0)
    runs, long = runs_of(strips, addresses), strips["run"] >= LONG
    stops = np.cumsum([len(it.strips) for it in found], dtype=np.int64).tolist()
    made = []
    for read, stop in zip(found, stops, strict=True):
        of_read = slice(stop - len(read.strips), stop)
        if near[of_read].all():
            which = [] if overlap(read.strips) else np.flatnonzero(long[of_read]).tolist()
            some = [runs[of_read.start + index] for index in which]
            made.append(Planned(read, runs[of_read], straight(some, addresses, memory_of)))
        else:
            made.append(Planned(read, None, []))
    return made


def runs_of(strips: Strips, addresses: NDArray[np.int64]) -> list[Run]:
    """Of single runs into the processor's memory; of others it means nothing."""
    base = addresses[strips["piece"]] + strips["at"] - strips["begin"]
    found: list[Run] = np.stack([strips["begin"], ends(strips), base, strips["piece"]], axis=1).tolist()
    return found


def overlap(strips: Strips) -> bool:
    """Whether bytes may be wanted twice: what is read to one place is then still wanted at another."""
    return bool((strips["begin"][1:] < np.maximum.accumulate(ends(strips))[:-1]).any())


def straight(
    runs: Sequence[Run], addresses: NDArray[np.int64], memory_of: Callable[[int], memoryview]
) -> list[Straight]:
    """runs: in file order, and long; what was cut by cells becomes whole again."""
    whole: list[Run] = []
    for run in runs:
        if whole and whole[-1][1:] == [run[0], *run[2:]]:
            whole[-1][1] = run[1]
        else:
            whole.append(list(run))
    found = []
    for begin, end, base, piece in whole:
        low, high = -(-begin // BLOCK) * BLOCK, end // BLOCK * BLOCK
        if low < high:
            at = base - int(addresses[piece])
            found.append((low, high, memory_of(piece)[at + low : at + high]))
    return found


def copies(rest: deque[Run], data: memoryview, low: int, high: int) -> Then:
    """What copies runs part after part.

    rest: in file order; those that are before a part are dropped. data: where bytes `low` to `high` of the file come.
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
