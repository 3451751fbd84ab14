"""Gather the records of all ranks of a run into one table: ranks x bins of steps.

A run of at most MAX_BINS steps has a bin for each step; a longer one has bins of equally many steps. Files are read
block by block, so that memory is bounded by the table, whatever their size. If a step was repeated by a later attempt,
the later one counts. The first two steps of an attempt, which warm up, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.recfunctions import structured_to_unstructured

from hpc_train.step_clock import WAIT_BINS
from hpc_train.training.records.step_records import LEVELS, PATTERN, RECORD, SECONDS, read_blocks

Array = np.ndarray[Any, np.dtype[np.float64]]
WARM_UP_STEPS = 2
"""Steps at the beginning of an attempt that are left out."""
MAX_BINS = 512
"""Bins of a table: as many as a chart can show, and the bound of its memory."""
_SUMS = (*SECONDS, "tokens", "major_faults", "collectives", "steps")
_STATES = ("time", *LEVELS, "net_bytes")
"""Fields of which a bin has the last value, where _SUMS are added up."""
NEWEST_BYTES = 1 << 19
"""Bytes that are read from the end of each file for the newest steps."""
MAX_RANKS = 1 << 17
"""Records of a higher rank than this are taken for damaged."""


@dataclass(frozen=True)
class StepTable:
    """Measurements of a run. Rows are ranks, columns bins of steps; NaN: not measured."""

    ranks: tuple[int, ...]
    steps: Array
    """Last step of each bin, (bins,)."""
    fields: dict[str, Array]
    """(ranks, bins): means a step of SECONDS (seconds), tokens, collectives; last values of LEVELS and net_bytes."""
    waits: Array
    """Seconds a step by group of collectives, (ranks, bins, WAIT_BINS)."""

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]

    @property
    def bins(self) -> int:
        """Number of bins."""
        return len(self.steps)


def list_record_files(run: Path) -> list[tuple[int, list[Path]]]:
    """Return the record files of each attempt, in order."""
    folders = [folder for folder in (run / "logs").glob("*") if folder.name.isdecimal()]
    attempts = [
        (int(folder.name), sorted(folder.glob(PATTERN))) for folder in sorted(folders, key=lambda f: int(f.name))
    ]
    return [(attempt, files) for attempt, files in attempts if files]


def read_step_table(run: Path) -> StepTable | None:
    """Read what all ranks recorded; None if there is nothing yet."""
    return _read_attempts(list_record_files(run), None)


def read_newest_steps(run: Path) -> StepTable | None:
    """Read the newest steps of the newest attempt from the end of its files; None if there is nothing yet.

    For commands that read repeatedly: at most NEWEST_BYTES of each node's file are read.
    """
    return _read_attempts(list_record_files(run)[-1:], NEWEST_BYTES)


def _read_attempts(attempts: Sequence[tuple[int, list[Path]]], newest: int | None) -> StepTable | None:
    extents = [_find_extent(files, newest) for _, files in attempts]
    present = [extent for extent in extents if extent is not None]
    if not present:
        return None
    first = min(extent[0] for extent in present) - 1 if newest is not None else 0
    last, ranks = max(extent[1] for extent in present), max(extent[2] for extent in present) + 1
    # Steps per bin, rounded up, so that there are at most MAX_BINS bins.
    width = -(-max(last - first, 1) // MAX_BINS)
    grid = _Grid(ranks, first, width, -(-(last - first) // width))
    for (_, files), extent in zip(attempts, extents, strict=True):
        if extent is not None:
            grid.add_attempt(files, extent[0], newest)
    return grid.make_table()


def _find_extent(files: Sequence[Path], newest: int | None) -> tuple[int, int, int] | None:
    """Return the first step (from 1), the last one and the highest rank of an attempt."""
    extent: tuple[int, int, int] | None = None
    for file in files:
        try:
            for rank, records in read_blocks(file, newest):
                if rank < MAX_RANKS and _is_consistent(records):
                    begin = int(records["step"][0]) - int(records["steps"][0]) + 1
                    a, b, c = extent or (begin, 0, 0)
                    extent = min(a, max(begin, 1)), max(b, int(records["step"][-1])), max(c, rank)
        except OSError:  # of a node that took its file system with it
            continue
    return extent


def _read_all(files: Sequence[Path], newest: int | None) -> Iterator[tuple[int, np.ndarray[Any, Any]]]:
    """Read the records of each rank, file by file, without damaged ones: steps that do not follow those before."""
    for file in files:
        blocks: dict[int, list[np.ndarray[Any, Any]]] = {}
        try:
            for rank, records in read_blocks(file, newest):
                if rank < MAX_RANKS and _is_consistent(records):
                    blocks.setdefault(rank, []).append(records)
        except OSError:
            continue
        for rank, parts in blocks.items():
            # np.concatenate would look at each field of each part.
            records = np.frombuffer(b"".join(part.tobytes() for part in parts), RECORD)
            steps = records["step"].astype(np.int64)
            # A damaged step number that is too high would hide all steps after it; only steps beyond all before count.
            follows = np.diff(np.maximum.accumulate(steps), prepend=0) > 0
            if follows.any():
                yield rank, records[follows]


def _is_consistent(records: np.ndarray[Any, Any]) -> bool:
    """Whether each record of a block continues where the one before ended, which damaged ones do not."""
    steps, covered = records["step"].astype(np.int64), records["steps"].astype(np.int64)
    return bool(steps[0] >= covered[0] > 0 and (np.diff(steps) == covered[1:]).all())


class _Grid:
    """Adds up records by rank and bin."""

    def __init__(self, ranks: int, first: int, width: int, bins: int) -> None:
        self._first, self._width, self._bins = first, width, max(bins, 1)
        shape = (ranks, self._bins)
        self._sums = np.zeros((*shape, len(_SUMS)))
        self._states = np.full((*shape, len(_STATES)), np.nan)
        self._waits = np.zeros((*shape, WAIT_BINS), np.float32)

    def add_attempt(self, files: Sequence[Path], begin: int, newest: int | None) -> None:
        """Add an attempt that began with step `begin`; what earlier ones made of it is dropped."""
        drop = max(0, begin - 1 - self._first) // self._width
        # A resumed attempt makes some steps again: the records of the earlier one for these steps go.
        self._sums[:, drop:], self._states[:, drop:], self._waits[:, drop:] = 0.0, np.nan, 0.0
        for rank, records in _read_all(files, newest):
            self._add(rank, records[records["step"] >= begin + WARM_UP_STEPS])

    def _add(self, rank: int, records: np.ndarray[Any, Any]) -> None:
        if not len(records):
            return
        bins = (records["step"].astype(np.int64) - 1 - self._first) // self._width
        bins = np.clip(bins, 0, self._bins - 1)
        starts = np.flatnonzero(np.diff(bins, prepend=-1))  # records of a block are in order
        bin_of_block = bins[starts]
        sums = structured_to_unstructured(records[list(_SUMS)], dtype=np.float64)
        self._sums[rank, bin_of_block] += np.add.reduceat(sums, starts, axis=0)
        ends = np.append(starts[1:], len(bins)) - 1
        self._states[rank, bin_of_block] = structured_to_unstructured(records[list(_STATES)], dtype=np.float64)[ends]
        self._waits[rank, bin_of_block] += np.add.reduceat(records["waits"], starts, axis=0)

    def make_table(self) -> StepTable | None:
        """Return the table, without bins and ranks that have nothing."""
        counts = self._sums[..., _SUMS.index("steps")]
        bins, ranks = np.flatnonzero(counts.any(axis=0)), np.flatnonzero(counts.any(axis=1))
        if not len(bins):
            return None
        cells = np.ix_(ranks, bins)
        steps = counts[cells]
        with np.errstate(divide="ignore", invalid="ignore"):
            per_step = self._sums[cells] / steps[..., None]
            waits = self._waits[cells] / steps[..., None]
        fields = {name: per_step[..., index] for index, name in enumerate(_SUMS) if name != "steps"}
        fields |= {name: self._states[cells][..., index] for index, name in enumerate(_STATES)}
        last = np.asarray(self._first + (bins + 1) * self._width, np.float64)
        return StepTable(tuple(map(int, ranks)), last, {**fields, "steps": steps}, waits.astype(np.float64))


def compute_row_means(values: Array) -> Array:
    """Return the mean of each row without NaN; NaN for a row of nothing else, without numpy's warning."""
    is_measured = np.isfinite(values)
    return np.where(is_measured.any(axis=1), np.nansum(values, axis=1) / np.maximum(is_measured.sum(axis=1), 1), np.nan)


def round_finite(value: float, digits: int) -> float | None:
    """Round for JSON, which has neither NaN nor infinity."""
    return round(float(value), digits) if math.isfinite(value) else None


def describe_memory(table: StepTable | None) -> dict[str, Any]:
    """Return the peaks of memory over all ranks, in MiB."""
    if table is None:
        return {}
    return {
        f"{name}_mib": round_finite(np.nanmax(table[name]), 1)
        for name in ("resident", "allocated", "reserved")
        if np.isfinite(table[name]).any()
    }
