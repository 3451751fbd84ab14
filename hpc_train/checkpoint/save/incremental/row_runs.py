"""Cut a shard into runs of rows, the unit by which a save notices what has changed, and join runs that lie together.

A run is a slab of one rectangle that is contiguous in the file, so that its bytes are hashed and written in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from hpc_train.checkpoint.format.rectangle import Rectangle, join_rectangles, split_slabs
from hpc_train.checkpoint.format.shard_layout import FileLayout

RUN_BYTES = 1 << 20
"""Approximate bytes of a run; a smaller one is not worth a link."""
MAX_RUNS = 1024
"""Approximate maximum of runs of a shard, beyond one for each tensor: each may become a row of the manifest."""
_THREADS = 2
"""Threads that hash runs."""
_BATCH = 64
"""Runs that a thread hashes per task, so that handing out tasks costs little compared with hashing."""


@dataclass(frozen=True)
class RowRun:
    """Adjacent rows of a rectangle, contiguous in the shard's image."""

    row: int
    """Index among the rows of the file layout."""
    rectangle: Rectangle
    """Rectangle of the logical tensor."""
    begin: int
    """Byte of the shard's image where it begins."""
    size: int
    """Bytes."""


def split_runs(layout: FileLayout, length: int = RUN_BYTES) -> list[RowRun]:
    """Split a shard into runs of about `length` bytes, in file order. An empty tensor is one run without bytes."""
    total = sum(row.bytes for row in layout.rows)
    most = max(length, total // MAX_RUNS)
    runs = []
    for index, (row, place) in enumerate(zip(layout.rows, layout.places, strict=True)):
        at, item = place, row.dtype.itemsize
        for slab in split_slabs(Rectangle(row.offset, row.local_shape), max(1, most // item)):
            runs.append(RowRun(index, slab, at, slab.volume * item))
            at += runs[-1].size
    return runs


def digest_runs(memory: memoryview, runs: Sequence[RowRun]) -> list[bytes]:
    """Return the xxh3-128 of every run. xxhash releases the interpreter lock meanwhile."""
    with ThreadPoolExecutor(_THREADS) as pool:
        batches = (runs[first : first + _BATCH] for first in range(0, len(runs), _BATCH))
        return [digest for digests in pool.map(partial(_digest_batch, memory), batches) for digest in digests]


def _digest_batch(memory: memoryview, runs: Sequence[RowRun]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(memory[run.begin : run.begin + run.size]) for run in runs]


def merge_runs(runs: Sequence[RowRun]) -> list[tuple[RowRun, list[RowRun]]]:
    """Merge adjacent runs that form one rectangle; returns [(merged run, its runs)].

    runs: in the order of their bytes.
    """
    merged_runs: list[tuple[RowRun, list[RowRun]]] = []
    for run in runs:
        merged, parts = run, [run]
        # Merging two runs may complete a rectangle that merges with the one before, so go on until nothing fits.
        while merged_runs and (both := _merge_two(merged_runs[-1][0], merged)) is not None:
            merged, parts = both, merged_runs.pop()[1] + parts
        merged_runs.append((merged, parts))
    return merged_runs


def _merge_two(first: RowRun, second: RowRun) -> RowRun | None:
    if first.row != second.row or first.begin + first.size != second.begin:
        return None
    joined = join_rectangles(first.rectangle, second.rectangle)
    return None if joined is None else replace(first, rectangle=joined, size=first.size + second.size)
