"""Which bytes of which files a rank needs, in reads of some cells at most; adjacent small tensors share one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.strips import CELL, GAP, Strips, ends

WIDE = 2 * CELL
"""Bytes of a read past the page cache: a few of them at a time are what a disk wants."""


@dataclass(frozen=True)
class Read:
    """Bytes of a file, whole blocks, and what they are for."""

    file: int
    begin: int
    end: int
    strips: Strips


def in_file_order(strips: Strips) -> Strips:
    """Sorted by file and byte."""
    return strips[np.lexsort((strips["begin"], strips["file"]))]


def reads(strips: Strips, bytes_of: Sequence[int], most: int = CELL) -> list[Read]:
    """Reads that give every strip, file by file and in order; no block is in two of them.

    strips: cut by cells, in file order. bytes_of: the size of each file. most: whole cells; a read is in one multiple
    of it.
    """
    assert most % CELL == 0, most
    if not len(strips):
        return []
    begin, end, first = _groups(strips, most)
    low, high = begin[first] // BLOCK * BLOCK, -(-np.maximum.reduceat(end, first) // BLOCK) * BLOCK
    batches = np.split(strips, first[1:])
    files = strips["file"][first].tolist()
    return [
        Read(file, at, min(to, bytes_of[file]), batch)
        for file, at, to, batch in zip(files, low.tolist(), high.tolist(), batches, strict=True)
    ]


def _groups(strips: Strips, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(begin, end) of every strip, and the index of the first of every read."""
    begin, end = strips["begin"], ends(strips)
    cell = begin // most
    other = (np.diff(strips["file"]) != 0) | (np.diff(cell) != 0)
    apart = np.concatenate([[0], np.cumsum(other)]) * (most + 1)  # so that the largest end is that of this cell alone
    reach = np.maximum.accumulate(end - cell * most + apart) - apart + cell * most
    gap = begin[1:] // BLOCK * BLOCK - -(-reach[:-1] // BLOCK) * BLOCK
    return begin, end, np.flatnonzero(np.concatenate([[True], other | (gap >= GAP)]))


def blocks_of(found: Sequence[Read]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(file, block) of all blocks that the reads touch, in order."""
    number = np.array([-(-read.end // BLOCK) - read.begin // BLOCK for read in found], dtype=np.int64)
    files = np.repeat(np.array([read.file for read in found], dtype=np.int64), number)
    first = np.repeat(np.array([read.begin // BLOCK for read in found], dtype=np.int64), number)
    return files, first + np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
