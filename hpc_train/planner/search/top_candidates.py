"""The candidates that a search keeps: the best of each of the best meshes, and the Pareto front.

Of candidates whose step times differ by less than EQUAL_TIME_TOLERANCE the simplest is chosen: layout_complexity counts
the techniques that a user would have to understand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.parallel import AXES
from hpc_train.planner.model.inputs import SCHEDULES, Column
from hpc_train.planner.search.space import LAYOUT_COLUMNS, TECHNIQUE_COLUMNS, Columns

COLUMN_NAMES = (*LAYOUT_COLUMNS, *TECHNIQUE_COLUMNS)
EQUAL_TIME_TOLERANCE = 0.02
"""Step times of one job that differ by less than this (a fraction) count as equal.

Predictions are off by up to 10 %, but most of that error is common to all candidates of a job and does not change their
order. The rest is 2.7 % between two measured configurations of one job (median over published runs that are predicted
within 5 % of each other). Up to 2 %, choosing the simplest instead of the fastest costs nothing (`plan validate`:
regret).
"""


@dataclass(frozen=True)
class RatedCandidates:
    """Candidates with their estimated step time and memory, [n]."""

    columns: Columns
    """Columns COLUMN_NAMES."""
    step: Column
    """Seconds."""
    memory: Column
    """Bytes."""

    @property
    def count(self) -> int:
        return len(self.step)

    def take(self, rows: NDArray[np.int64]) -> RatedCandidates:
        return RatedCandidates(
            {name: column[rows] for name, column in self.columns.items()}, self.step[rows], self.memory[rows]
        )


def no_candidates() -> RatedCandidates:
    """Return an empty set of candidates."""
    return RatedCandidates({name: np.empty(0) for name in COLUMN_NAMES}, np.empty(0), np.empty(0))


def concatenate_rated(parts: Sequence[RatedCandidates]) -> RatedCandidates:
    """Concatenate several sets of candidates."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in COLUMN_NAMES}
    return RatedCandidates(
        columns, *(np.concatenate([getattr(part, name) for part in parts]) for name in ("step", "memory"))
    )


class TopCandidates:
    """Keeps the `keep` meshes with the fastest candidates, and all candidates that may still be the best of theirs."""

    def __init__(self, keep: int) -> None:
        self._keep, self._rated = keep, no_candidates()
        self._quickest: Column = np.empty(0)
        """Step times of the fastest `keep` meshes, ascending, [meshes]."""

    @property
    def quickest(self) -> float:
        """Return the shortest step time; infinite if there is no candidate."""
        return float(self._quickest[0]) if len(self._quickest) else math.inf

    @property
    def limit(self) -> float:
        """Return the step time beyond which a candidate cannot change the result."""
        if len(self._quickest) < self._keep:
            return math.inf
        # A mesh is represented by its simplest candidate, which may be slower than its fastest by the tolerance.
        return max(float(self._quickest[-1]), self.quickest * (1 + EQUAL_TIME_TOLERANCE)) * (1 + EQUAL_TIME_TOLERANCE)

    def offer(self, rated: RatedCandidates) -> None:
        """Add candidates, and drop those that can no longer be chosen."""
        if not rated.count:
            return
        every = concatenate_rated([self._rated, rated])
        mesh, quickest = _quickest(every)
        self._quickest = np.sort(quickest)[: self._keep]
        # A faster candidate may still bring this mesh among the best, and this candidate may be its simplest.
        near = np.flatnonzero((every.step <= self.limit) & (every.step <= quickest[mesh] * (1 + EQUAL_TIME_TOLERANCE)))
        chosen, mesh = every.take(near), mesh[near]
        # Sort by time, then memory, then all columns, so that the result does not depend on the order of offers.
        ties = (chosen.columns[name] for name in reversed(COLUMN_NAMES))
        order = np.lexsort((*ties, chosen.memory, chosen.step))
        chosen = chosen.take(order)
        self._rated = chosen.take(_simpler(mesh[order], layout_complexity(chosen.columns)))

    def ranked(self) -> RatedCandidates:
        """Return one candidate per mesh, the simplest of its fastest, at most `keep`.

        The best comes first, then those that are as fast, simplest first, then the others by time. The order does not
        depend on `keep`.
        """
        if not self._rated.count:
            return self._rated
        limit = self.quickest * (1 + EQUAL_TIME_TOLERANCE)
        mesh, quickest = _quickest(self._rated)
        rated = self._rated.take(np.flatnonzero(quickest[mesh] <= max(float(self._quickest[-1]), limit)))
        simple, step = layout_complexity(rated.columns), rated.step
        order = np.lexsort((step, simple, step > limit, _meshes(rated)))  # candidates equal to the best first
        first = np.ones(len(order), bool)
        first[1:] = np.diff(_meshes(rated)[order]) != 0
        chosen = np.sort(order[first])
        equal, slower = chosen[step[chosen] <= limit], chosen[step[chosen] > limit]
        equal = equal[np.lexsort((step[equal], simple[equal]))]
        slower = slower[np.argsort(step[slower], kind="stable")]
        return rated.take(np.concatenate([equal, slower])[: self._keep])


def _quickest(rated: RatedCandidates) -> tuple[NDArray[np.int64], Column]:
    """Return (mesh number of each candidate, counted from 0; shortest step time of each mesh)."""
    _, mesh = np.unique(_meshes(rated), return_inverse=True)
    quickest = np.full(mesh.max() + 1, np.inf)
    np.minimum.at(quickest, mesh, rated.step)
    return mesh, quickest


def _meshes(rated: RatedCandidates) -> NDArray[np.int64]:
    """Return a number for each candidate that is equal for equal meshes, [n]."""
    numbers = np.zeros(rated.count, np.int64)
    for name in (*AXES, "ep"):  # no two degrees exceed 2^12 at once, so the numbers do not collide
        numbers = numbers * 1_000_003 + rated.columns[name].astype(np.int64)
    return numbers


def _simpler(mesh: NDArray[np.int64], simple: Column) -> NDArray[np.int64]:
    """Return the rows that are simpler than all faster rows of their mesh. Rows are sorted by time."""
    order = np.argsort(mesh, kind="stable")
    starts = np.flatnonzero(np.diff(mesh[order], prepend=-1))
    chosen = []
    for rows in np.split(order, starts[1:]):
        lowest = np.minimum.accumulate(simple[rows])
        better = np.ones(len(rows), bool)
        better[1:] = simple[rows][1:] < lowest[:-1]
        chosen.append(rows[better])
    simpler: NDArray[np.int64] = np.sort(np.concatenate(chosen))
    return simpler


_MODEL_AXES = ("pp", "cp", "tp", "ep")
_SCHEDULE = {"1f1b": 0, "gpipe": 1, "interleaved_1f1b": 1, "looped_bfs": 1, "naive": 1}
"""Complexity points of a schedule; the others, which split backward, have 2."""
_STAGE, _LEVEL, _DEGREE = 0.1, 0.05, 0.0005
"""Fractions of a point for a ZeRO stage, for sharding on two levels, and for each doubling of a degree; below 1 in
total, so that they only break ties."""


def layout_complexity(columns: Mapping[str, Column]) -> Column:
    """Return the complexity points of each candidate, [n]; fewer is simpler. columns: COLUMN_NAMES."""
    order = np.array([_SCHEDULE.get(name, 2) for name in SCHEDULES], np.float64)
    axes = sum(2.0 * (columns[name] > 1) for name in _MODEL_AXES)
    offload = 2.0 * (columns["offload"] > 0) + columns["offload_activations"]
    recompute = (columns["recompute"] > 0) + 1.0 * (columns["recompute_every"] > 1)
    tensor = columns["overlap_tensor"] + (columns["sequence_parallel"] == 0)
    others = order[columns["schedule"].astype(np.int64)] + columns["ulysses"] + (columns["reshard"] == 0)
    hybrid = (columns["dp_shard"] > 1) & (columns["dp_replicate"] > 1)
    degrees = sum(np.log2(columns[name]) for name in (*_MODEL_AXES, "dp_shard", "virtual_stages"))
    points: Column = axes + offload + recompute + tensor + others
    return points + _STAGE * columns["zero"] + _LEVEL * hybrid + _DEGREE * degrees


def pareto_front(one: Column, other: Column) -> NDArray[np.int64]:
    """Return the indices of the Pareto front (least of both), ascending in `one`; of equal points the first."""
    order = np.lexsort((np.arange(len(one)), other, one))
    lowest = np.minimum.accumulate(other[order])
    first = np.ones(len(order), bool)
    first[1:] = other[order][1:] < lowest[:-1]
    return order[first]


class ParetoFront:
    """A Pareto front that is updated with new points."""

    def __init__(self) -> None:
        self._one = self._other = np.empty(0)

    def update(self, one: Column, other: Column) -> NDArray[np.int64]:
        """Set the front to that of the given points, and return their indices."""
        rows = pareto_front(one, other)
        self._one, self._other = one[rows], other[rows]
        return rows

    def is_undominated(self, one: Column, other: Column) -> NDArray[np.bool_]:
        """Whether no point of the front is as good in both, [n]."""
        if not len(self._one):
            return np.ones(len(one), bool)
        # `_one` ascends and `_other` descends along the front, so the last point with no more of `one` has the least
        # `other`.
        place = np.searchsorted(self._one, one, side="right") - 1
        best = np.where(place >= 0, self._other[np.maximum(place, 0)], np.inf)
        result: NDArray[np.bool_] = other < best
        return result
