"""What becomes of each read, reckoned for all of them before the first.

Between two reads the processor's caches are full of data, which makes calls of libraries slow, and Python's lock lets
the other threads wait for them. So what is left to do then are a few operations on Python's own numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from ctypes import c_ubyte, memmove
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.source import Then
from hpc_train.checkpoint.strips import Strips, ends
from hpc_train.checkpoint.transfer import Read

_MANY = 1000
"""Buffers of one call; systems take 1024 (IOV_MAX)."""
Run = list[int]
"""First byte in the file, one past the last, the address that byte 0 of the file would have, and the piece."""


@dataclass(frozen=True)
class Planned:
    """A read."""

    read: Read
    runs: list[Run] | None
    """In file order; None if some are not single runs into the processor's memory."""
    apart: bool
    """No byte is wanted twice."""


def plan(found: Sequence[Read], strips: Strips, addresses: NDArray[np.int64]) -> list[Planned]:
    """In the same order.

    found: of all the strips. addresses: of the memory of every piece; 0 where it is not the processor's.
    """
    near = (strips["count"] == 1) & (addresses[strips["piece"]] != 0)
    runs, stops = runs_of(strips, addresses), np.cumsum([len(it.strips) for it in found], dtype=np.int64)
    starts = np.concatenate([[0], stops[:-1]])
    clash = np.concatenate([[False], strips["begin"][1:] < ends(strips)[:-1]])  # if any do, then two neighbours do
    clash[starts] = False
    all_near = np.logical_and.reduceat(near, starts)
    apart = ~np.logical_or.reduceat(clash, starts)
    told = (it.tolist() for it in (starts, stops, all_near, apart))
    return [
        Planned(read, runs[start:stop] if near else None, apart)
        for read, start, stop, near, apart in zip(found, *told, strict=True)
    ]


def runs_of(strips: Strips, addresses: NDArray[np.int64]) -> list[Run]:
    """Of single runs into the processor's memory; of others it means nothing."""
    base = addresses[strips["piece"]] + strips["at"] - strips["begin"]
    found: list[Run] = np.stack([strips["begin"], ends(strips), base, strips["piece"]], axis=1).tolist()
    return found


def io_vector(rest: deque[Run], low: int, high: int, between: memoryview) -> list[Any] | None:
    """Where bytes `low` to `high` of the file belong, one buffer after the other; None if those are too many.

    rest: in file order, none with bytes of another; those that are before `low` are dropped. between: takes what nobody
    wants.
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
        if len(found) > _MANY:
            return None
    if at < high:
        found.append(between[at - low : high - low])
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
