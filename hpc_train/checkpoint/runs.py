"""The tensors of a shard in runs of whole rows, with a digest each: so it shows which of them have changed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import xxhash

from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.rectangle import Rectangle, joined, slabs

LENGTH = 1 << 20
"""Bytes of a run, about; what is smaller than that on the disk is not worth a name."""
MOST = 1024
"""Runs of a large shard beyond one a tensor, about: each may become a part of its own in the manifest."""
_THREADS = 2
_BATCH = 64


@dataclass(frozen=True)
class Run:
    """Some rows of a rectangle that a shard holds, contiguous there."""

    row: int
    """Index among what the shard holds."""
    rectangle: Rectangle
    """Of the logical tensor."""
    begin: int
    """Byte of the shard's image."""
    size: int
    """Bytes."""


def runs_of(held: Held, length: int = LENGTH) -> list[Run]:
    """All of a shard, in its own order. A tensor without elements is one run without bytes."""
    total = sum(row.bytes for row in held.rows)
    most = max(length, total // MOST)
    found = []
    for index, (row, place) in enumerate(zip(held.rows, held.places, strict=True)):
        at, item = place, row.dtype.itemsize
        for slab in slabs(Rectangle(row.offset, row.local_shape), max(1, most // item)):
            found.append(Run(index, slab, at, slab.volume * item))
            at += found[-1].size
    return found


def digests_of(memory: memoryview, runs: Sequence[Run]) -> list[bytes]:
    """xxh3-128 of the bytes of every run. Lets other threads run meanwhile."""
    with ThreadPoolExecutor(_THREADS) as pool:
        batches = (runs[at : at + _BATCH] for at in range(0, len(runs), _BATCH))
        return [digest for batch in pool.map(lambda it: _digests(memory, it), batches) for digest in batch]


def _digests(memory: memoryview, runs: Sequence[Run]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(memory[run.begin : run.begin + run.size]) for run in runs]


def merged(runs: Sequence[Run]) -> list[tuple[Run, list[Run]]]:
    """(all of it as one run, its runs): neighbours of one row that are one rectangle together, as many as can be.

    runs: in the order of their bytes.
    """
    found: list[tuple[Run, list[Run]]] = []
    for run in runs:
        whole, parts = run, [run]
        while found and (both := _both(found[-1][0], whole)) is not None:
            whole, parts = both, found.pop()[1] + parts
        found.append((whole, parts))
    return found


def _both(first: Run, second: Run) -> Run | None:
    if first.row != second.row or first.begin + first.size != second.begin:
        return None
    whole = joined(first.rectangle, second.rectangle)
    return None if whole is None else replace(first, rectangle=whole, size=first.size + second.size)
