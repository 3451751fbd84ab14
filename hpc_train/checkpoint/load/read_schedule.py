"""Plan which bytes of which files a rank reads, and where they go in memory.

A strip is a number of evenly spaced runs of bytes. The common part of a rectangle in a file and one in memory is a few
strips, whatever the number of dimensions; a part contiguous in both is a single run. Strips are rows of one numpy
array, so that thousands are handled together. They are read in whole blocks; adjacent small tensors share a read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES
from hpc_train.checkpoint.format.rectangle import Rectangle
from hpc_train.interfaces import TensorShard

Buffer = memoryview | NDArray[np.uint8]
_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""numpy types by size: a run of such a size is copied as one number, which is faster than byte by byte."""


class LoadDestinations:
    """Memory of all tensors to load, in columns: most tensors need only an address and a size."""

    def __init__(self, shards: Sequence[TensorShard]) -> None:
        self._locals = [shard.local for shard in shards]
        assert not any(map(Tensor.is_conj, self._locals)), "the memory of a conjugated view does not hold its values"
        assert not any(map(Tensor.is_neg, self._locals)), "the memory of a negated view does not hold its values"
        contiguous = list(map(Tensor.is_contiguous, self._locals))
        self._made = {
            index: LoadDestination(self._locals[index]) for index, is_so in enumerate(contiguous) if not is_so
        }
        self.addresses = np.array(list(map(Tensor.data_ptr, self._locals)), dtype=np.int64)
        """[shards]: address of the memory; 0 on a GPU."""
        for index in self._made:
            self.addresses[index] = self._made[index].address
        # A copy by address must never write to an address of a GPU's memory.
        self.addresses[~np.array([local.is_cpu for local in self._locals], dtype=np.bool_)] = 0
        self.sizes = np.array(list(map(attrgetter("nbytes"), self._locals)), dtype=np.int64)
        """[shards]: bytes."""

    def __getitem__(self, shard: int) -> LoadDestination:
        if shard not in self._made:
            self._made[shard] = LoadDestination(self._locals[shard])
        return self._made[shard]

    def finish(self) -> None:
        """Copy to tensors that are not contiguous, after every byte has been read."""
        for destination in self._made.values():
            destination.finish()


class LoadDestination:
    """Memory for the bytes of one tensor: its own, or a contiguous copy until `finish`."""

    def __init__(self, local: Tensor) -> None:
        self._local = self._whole = local
        if not local.is_contiguous():
            self._whole = torch.empty_like(local, memory_format=torch.contiguous_format)

    @cached_property
    def memory(self) -> NDArray[np.uint8] | None:
        """Bytes of the memory; None on a GPU."""
        return self._bytes.numpy() if self._whole.is_cpu else None

    @property
    def address(self) -> int:
        """Address of the memory."""
        return self._whole.data_ptr()

    @cached_property
    def _bytes(self) -> Tensor:
        return self._whole.detach().reshape(-1).view(torch.uint8)

    def put(self, at: int, step: int, runs: NDArray[Any]) -> None:
        """Copy runs, as view_runs returns them, to bytes `at`, `at + step`, ... of the tensor."""
        count, run = len(runs), runs[:1].nbytes
        if self.memory is not None:
            view_runs(self.memory, at, count, step, run)[...] = runs
            return
        to = self._bytes.as_strided((count, run), (step, 1), self._bytes.storage_offset() + at)
        to.copy_(torch.from_numpy(np.ascontiguousarray(runs).view(np.uint8).reshape(count, run)))

    def finish(self) -> None:
        """Copy to tensors that are not contiguous, after every byte has been read."""
        if self._whole is not self._local:
            self._local.detach().copy_(self._whole)


def view_runs(buffer: Buffer, first: int, count: int, stride: int, run: int) -> NDArray[Any]:
    """View evenly spaced runs of a buffer as [count, run] bytes, or as [count] numbers of the length of a run."""
    if count == 1 or run not in _BITS:
        return np.ndarray((count, run), np.uint8, buffer, first, (stride, 1))
    return np.ndarray((count,), _BITS[run], buffer, first, (stride,))


CELL_BYTES = 4 << 20
"""Bytes of a cell; whole blocks. Strips are cut at multiples of it, so that each lies in one cell."""
MAX_GAP_BYTES = BLOCK_BYTES
"""Maximum gap in bytes between two runs that are read together with the blocks between them."""
STRIP_DTYPE = np.dtype(
    [(name, np.int64) for name in ("file", "begin", "count", "stride", "run", "shard", "at", "step")]
)
"""Row i < count: `run` bytes at `begin + i * stride` of the file go to `at + i * step` of the shard's memory."""

Strips = NDArray[Any]
"""[strips] of STRIP_DTYPE; runs are not empty and do not overlap."""
StripRow = tuple[int, ...]


def make_strips(rows: Iterable[StripRow]) -> Strips:
    """Make an array of strips from rows in the order of STRIP_DTYPE."""
    return np.array(list(rows), dtype=STRIP_DTYPE)


def make_single_strips(rows: Sequence[StripRow] | NDArray[np.int64]) -> Strips:
    """Make strips of one run each, to the beginning of a tensor, from rows of (file, begin, run, shard)."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    strips = np.zeros(len(table), dtype=STRIP_DTYPE)
    strips["file"], strips["begin"], strips["run"], strips["shard"] = table.T
    return _make_single_runs(strips)


def copy_strips(
    file: int, place: int, saved: Rectangle, shard: int, target: Rectangle, common: Rectangle, item: int
) -> list[StripRow]:
    """Return the strips that copy the rectangle `common` from `saved`, at byte `place` of a file, into `target`.

    common: within both. target: rectangle in memory. item: bytes of an element.
    """
    # The whole rectangle on both sides: one run, whatever the number of dimensions.
    if common.shape == saved.shape == target.shape:
        size = common.volume * item
        return [(file, place, 1, size, size, shard, 0, size)]
    run, stride, step = item, item, item
    begin, at = place, 0
    loops: list[list[int]] = []  # [count, stride, step], innermost first
    dims = zip(common.shape, saved.shape, target.shape, common.start_in(saved), common.start_in(target), strict=True)
    # From the innermost dimension outwards. A dimension that is contiguous on both sides extends the run; one that
    # continues the spacing of the loop inside it extends that loop; any other becomes a loop of its own. The innermost
    # loop becomes a strip, the outer ones are unrolled into several strips.
    for size, of_saved, of_target, in_saved, in_target in reversed(list(dims)):
        # `stride` and `step` are by now the bytes between neighbours along this dimension, in the file and in memory.
        begin, at = begin + in_saved * stride, at + in_target * step
        if size > 1:
            if not loops and stride == step == run:
                run *= size
            elif loops and (stride, step) == (loops[-1][0] * loops[-1][1], loops[-1][0] * loops[-1][2]):
                loops[-1][0] *= size
            else:
                loops.append([size, stride, step])
        stride, step = stride * of_saved, step * of_target
    count, pitch, skip = loops[0] if loops else (1, run, run)
    outer = product(*([(i * s, i * t) for i in range(n)] for n, s, t in reversed(loops[1:])))
    return [
        (file, begin + sum(s for s, _ in turn), count, pitch, run, shard, at + sum(t for _, t in turn), skip)
        for turn in outer
    ]


def strip_ends(strips: Strips) -> NDArray[np.int64]:
    """Return one past the last byte of each strip in its file."""
    return strips["begin"] + (strips["count"] - 1) * strips["stride"] + strips["run"]  # type: ignore[no-any-return]


def strip_sizes(strips: Strips) -> NDArray[np.int64]:
    """Return the bytes that each strip copies."""
    return strips["count"] * strips["run"]  # type: ignore[no-any-return]


def cut_at_cells(strips: Strips) -> Strips:
    """Cut strips so that each lies in one cell, and split runs that are more than a block apart."""
    return _split_at_cells(_split_far_runs(strips))


def _split_far_runs(strips: Strips) -> Strips:
    """Split strips whose runs are too far apart to read the bytes between, into a strip for each run."""
    far = (strips["count"] > 1) & (strips["stride"] - strips["run"] > MAX_GAP_BYTES)
    if not far.any():
        return strips
    single_runs = np.repeat(strips[far], strips["count"][far])
    turn = _count_up(strips["count"][far])
    single_runs["begin"] += turn * single_runs["stride"]
    single_runs["at"] += turn * single_runs["step"]
    return np.concatenate([strips[~far], _make_single_runs(single_runs)])


def _split_at_cells(strips: Strips) -> Strips:
    """Split strips that touch several cells into a strip for each cell and part of a run."""
    first, last = strips["begin"] // CELL_BYTES, (strip_ends(strips) - 1) // CELL_BYTES
    many = first != last
    if not many.any():
        return strips
    number = (last - first + 1)[many]
    copies = np.repeat(strips[many], number)  # of each strip one for every cell that it touches
    low = (np.repeat(first[many], number) + _count_up(number)) * CELL_BYTES
    return np.concatenate([strips[~many], *_clip_to_cell(copies, low)])


def _clip_to_cell(strips: Strips, low: NDArray[np.int64]) -> list[Strips]:
    """Clip each strip to the cell that begins at `low`: its whole runs, and parts of its first and last run."""
    high = low + CELL_BYTES
    begin, run, stride, count = (strips[name] for name in ("begin", "run", "stride", "count"))
    # Run i begins at begin + i * stride; -(a // b) rounds -a / b up.
    inside = np.clip(-((begin - low) // stride), 0, count)  # the first run that begins in the cell
    within = np.clip((high - run - begin) // stride + 1, 0, count)  # one past the last run that ends in it
    beyond = np.clip(-((begin - high) // stride), 0, count)  # the first run that begins after it
    some = within > inside
    clipped = strips[some]
    clipped["begin"] += inside[some] * clipped["stride"]
    clipped["at"] += inside[some] * clipped["step"]
    clipped["count"] = (within - inside)[some]
    # The run before `inside` may reach into the cell, and the one before `beyond` out of it; each is in two cells.
    into = _clip_run(strips, inside - 1, low, high, (inside > 0))
    out = _clip_run(strips, beyond - 1, low, high, (beyond > inside) & (beyond > within))
    return [clipped, into, out]


def _clip_run(
    strips: Strips, run: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], where: NDArray[np.bool_]
) -> Strips:
    """Clip run number `run` of each strip to bytes [low, high); strips without such bytes are left out."""
    start = strips["begin"] + run * strips["stride"]
    begin, end = np.maximum(start, low), np.minimum(start + strips["run"], high)
    where = where & (end > begin)
    clipped = strips[where]
    clipped["begin"] = begin[where]
    clipped["at"] += (run * strips["step"] + begin - start)[where]
    clipped["run"] = (end - begin)[where]
    return _make_single_runs(clipped)


def _make_single_runs(strips: Strips) -> Strips:
    """Turn strips into strips of one run each, in place."""
    strips["count"], strips["stride"], strips["step"] = 1, strips["run"], strips["run"]
    return strips


def _count_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, and so on."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


WIDE_READ_BYTES = 2 * CELL_BYTES
"""Bytes of a read past the page cache; a few of these at a time keep a disk busy."""


@dataclass(frozen=True)
class BlockRead:
    """A read of whole blocks, bytes [begin, end) of a file, and the strips in it."""

    file: int
    begin: int
    end: int
    strips: Strips


def sort_by_file(strips: Strips) -> Strips:
    """Sort strips by file and byte."""
    return strips[np.lexsort((strips["begin"], strips["file"]))]


def plan_block_reads(strips: Strips, bytes_of: Sequence[int], most: int = CELL_BYTES) -> list[BlockRead]:
    """Plan reads that cover all strips, in file order; no block is read twice.

    strips: cut at cells, in file order. bytes_of: size of each file. most: bytes of a read, whole cells.
    """
    assert most % CELL_BYTES == 0, most
    if not len(strips):
        return []
    begin, end, first = _group_reads(strips, most)
    low, high = (
        begin[first] // BLOCK_BYTES * BLOCK_BYTES,
        -(-np.maximum.reduceat(end, first) // BLOCK_BYTES) * BLOCK_BYTES,
    )
    batches = np.split(strips, first[1:])
    files = strips["file"][first].tolist()
    return [
        BlockRead(file, at, min(to, bytes_of[file]), batch)
        for file, at, to, batch in zip(files, low.tolist(), high.tolist(), batches, strict=True)
    ]


def _group_reads(strips: Strips, most: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the begin and end of every strip, and the index of the first strip of every read."""
    begin, end = strips["begin"], strip_ends(strips)
    cell = begin // most
    other = (np.diff(strips["file"]) != 0) | (np.diff(cell) != 0)
    # `reach` is the running maximum of strip ends within a cell. All cells are computed by one accumulate: `apart`
    # moves each cell beyond all values of the one before, so that the maximum starts again.
    cell_offset = np.concatenate([[0], np.cumsum(other)]) * (most + 1)
    reach = np.maximum.accumulate(end - cell * most + cell_offset) - cell_offset + cell * most
    gap = begin[1:] // BLOCK_BYTES * BLOCK_BYTES - -(-reach[:-1] // BLOCK_BYTES) * BLOCK_BYTES
    return begin, end, np.flatnonzero(np.concatenate([[True], other | (gap >= MAX_GAP_BYTES)]))


def list_blocks(reads: Sequence[BlockRead]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (files, blocks): all blocks that the reads touch, in order."""
    number = np.array([-(-read.end // BLOCK_BYTES) - read.begin // BLOCK_BYTES for read in reads], dtype=np.int64)
    files = np.repeat(np.array([read.file for read in reads], dtype=np.int64), number)
    first = np.repeat(np.array([read.begin // BLOCK_BYTES for read in reads], dtype=np.int64), number)
    return files, first + np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number)
