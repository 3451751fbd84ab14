"""Bytes of a file and where they belong in memory, as evenly spaced runs: what reading and exchange work on.

A rectangle of one tensor that lies in a rectangle in a file is a few such strips, whatever the number of dimensions;
one that is contiguous in both is a single run. Thousands of them are one array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.digests import BLOCK
from hpc_train.checkpoint.rectangle import Rectangle

CELL = 4 << 20
"""Bytes of the grid over every file by which strips are cut: whole blocks."""
GAP = BLOCK
"""Bytes between two runs from which on the blocks between them are not read."""
STRIP = np.dtype([(name, np.int64) for name in ("file", "begin", "count", "stride", "run", "piece", "at", "step")])
"""Row i < count: `run` bytes at `begin + i * stride` of the file go to `at + i * step` of the piece's memory."""

Strips = NDArray[Any]
"""[strips] of STRIP; runs are not empty and do not overlap."""
Numbers = tuple[int, ...]


def strips(rows: Iterable[Numbers]) -> Strips:
    """The array of such rows, in the order of the fields."""
    return np.array(list(rows), dtype=STRIP)


def single(rows: Sequence[Numbers] | NDArray[np.int64]) -> Strips:
    """The same of single runs into the beginnings of pieces: (file, begin, run, piece) each."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    found = np.zeros(len(table), dtype=STRIP)
    found["file"], found["begin"], found["run"], found["piece"] = table.T
    return _single(found)


def between(
    file: int, place: int, saved: Rectangle, piece: int, held: Rectangle, common: Rectangle, item: int
) -> list[Numbers]:
    """The strips that copy `common` from the part `saved`, which begins at byte `place`, into a piece that is `held`.

    common: within both. item: bytes of an element.
    """
    if common.shape == saved.shape == held.shape:
        size = common.volume * item
        return [(file, place, 1, size, size, piece, 0, size)]
    run, stride, step = item, item, item
    begin, at = place, 0
    loops: list[list[int]] = []  # [count, stride, step], innermost first
    dims = zip(common.shape, saved.shape, held.shape, common.start_in(saved), common.start_in(held), strict=True)
    for size, of_saved, of_held, in_saved, in_held in reversed(list(dims)):
        begin, at = begin + in_saved * stride, at + in_held * step
        if size > 1:
            if not loops and stride == step == run:
                run *= size
            elif loops and (stride, step) == (loops[-1][0] * loops[-1][1], loops[-1][0] * loops[-1][2]):
                loops[-1][0] *= size
            else:
                loops.append([size, stride, step])
        stride, step = stride * of_saved, step * of_held
    count, pitch, skip = loops[0] if loops else (1, run, run)
    outer = product(*([(i * s, i * t) for i in range(n)] for n, s, t in reversed(loops[1:])))
    return [
        (file, begin + sum(s for s, _ in turn), count, pitch, run, piece, at + sum(t for _, t in turn), skip)
        for turn in outer
    ]


def ends(of: Strips) -> NDArray[np.int64]:
    """One past the last byte in the file, of each."""
    return of["begin"] + (of["count"] - 1) * of["stride"] + of["run"]  # type: ignore[no-any-return]


def sizes(of: Strips) -> NDArray[np.int64]:
    """Bytes that each copies."""
    return of["count"] * of["run"]  # type: ignore[no-any-return]


def cut(of: Strips) -> Strips:
    """The same bytes in strips that lie in one cell each; runs with whole blocks between them are parted."""
    return _at_cells(_apart(of))


def _apart(of: Strips) -> Strips:
    """Runs that are so far from each other that what lies between is not to be read, as strips of their own."""
    far = (of["count"] > 1) & (of["stride"] - of["run"] > GAP)
    if not far.any():
        return of
    found = np.repeat(of[far], of["count"][far])
    turn = _turns(of["count"][far])
    found["begin"] += turn * found["stride"]
    found["at"] += turn * found["step"]
    return np.concatenate([of[~far], _single(found)])


def _at_cells(of: Strips) -> Strips:
    first, last = of["begin"] // CELL, (ends(of) - 1) // CELL
    many = first != last
    if not many.any():
        return of
    number = (last - first + 1)[many]
    it = np.repeat(of[many], number)
    low = (np.repeat(first[many], number) + _turns(number)) * CELL
    return np.concatenate([of[~many], *_in_cell(it, low)])


def _in_cell(it: Strips, low: NDArray[np.int64]) -> list[Strips]:
    """What each strip has in the cell that begins at `low`: whole runs, and the parts of the first and of the last."""
    high = low + CELL
    inside = np.clip(-((it["begin"] - low) // it["stride"]), 0, it["count"])  # the first run that begins in the cell
    within = np.clip((high - it["run"] - it["begin"]) // it["stride"] + 1, 0, it["count"])  # one past the last in it
    beyond = np.clip(-((it["begin"] - high) // it["stride"]), 0, it["count"])  # the first that begins after it
    some = within > inside
    whole = it[some]
    whole["begin"] += inside[some] * whole["stride"]
    whole["at"] += inside[some] * whole["step"]
    whole["count"] = (within - inside)[some]
    into = _part(it, inside - 1, low, high, (inside > 0))
    out = _part(it, beyond - 1, low, high, (beyond > inside) & (beyond > within))
    return [whole, into, out]


def _part(
    it: Strips, run: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], where: NDArray[np.bool_]
) -> Strips:
    """Of run number `run` of each strip the bytes from `low` to `high`, where there are any."""
    start = it["begin"] + run * it["stride"]
    begin, end = np.maximum(start, low), np.minimum(start + it["run"], high)
    where = where & (end > begin)
    found = it[where]
    found["begin"] = begin[where]
    found["at"] += (run * it["step"] + begin - start)[where]
    found["run"] = (end - begin)[where]
    return _single(found)


def _single(of: Strips) -> Strips:
    of["count"], of["stride"], of["step"] = 1, of["run"], of["run"]
    return of


def _turns(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ..."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
