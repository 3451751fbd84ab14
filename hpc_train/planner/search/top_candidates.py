"""Candidates that a search keeps: the best of each of the best meshes, and the Pareto front.

Candidates whose times differ by less than EQUAL_TIME_TOLERANCE count as equal, and the simplest of them is taken:
layout_complexity counts what a user would have to understand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.parallel import AXES
from hpc_train.planner.model.jobs import SCHEDULES, Column
from hpc_train.planner.search.space import LAYOUT_COLUMNS, TECHNIQUE_COLUMNS, Columns

COLUMN_NAMES = (*LAYOUT_COLUMNS, *TECHNIQUE_COLUMNS)
EQUAL_TIME_TOLERANCE = 0.02
"""Candidates of one job whose times differ by less than this are equal, and the simplest of them is taken.

Much of the 10 % by which a time may be off is common to all candidates of a job and does not change their order; the
rest is 2.7 % between two measured configurations of one job (median over published runs that are predicted within 5 %
of each other), and up to 2 % choosing the simplest costs nothing against choosing the quickest (`plan validate`:
regret).
"""


@dataclass(frozen=True)
class RatedCandidates:
    """Candidates and what matters about them, [n]."""

    columns: Columns
    """Of NAMES."""
    step: Column
    """Seconds."""
    memory: Column
    """Bytes."""

    @property
    def count(self) -> int:
        return len(self.step)

    def take(self, rows: NDArray[np.int64]) -> RatedCandidates:
        return RatedCandidates(
            {name: it[rows] for name, it in self.columns.items()}, self.step[rows], self.memory[rows]
        )


def no_candidates() -> RatedCandidates:
    """No candidate."""
    return RatedCandidates({name: np.empty(0) for name in COLUMN_NAMES}, np.empty(0), np.empty(0))


def concatenate_rated(parts: Sequence[RatedCandidates]) -> RatedCandidates:
    """Concatenate parts."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in COLUMN_NAMES}
    return RatedCandidates(
        columns, *(np.concatenate([getattr(part, it) for part in parts]) for it in ("step", "memory"))
    )


class TopCandidates:
    """The `keep` meshes with the quickest candidates, and of each all that may yet turn out to be its best."""

    def __init__(self, keep: int) -> None:
        self._keep, self._rated = keep, no_candidates()
        self._quickest: Column = np.empty(0)
        """[meshes], ascending: times of the `keep` quickest."""

    @property
    def quickest(self) -> float:
        """Step time; infinite where there is none."""
        return float(self._quickest[0]) if len(self._quickest) else math.inf

    @property
    def limit(self) -> float:
        """Slower candidates change nothing."""
        if len(self._quickest) < self._keep:
            return math.inf
        return max(float(self._quickest[-1]), self.quickest * (1 + EQUAL_TIME_TOLERANCE)) * (1 + EQUAL_TIME_TOLERANCE)

    def offer(self, rated: RatedCandidates) -> None:
        """Keep what is worth it."""
        if not rated.count:
            return
        both = concatenate_rated([self._rated, rated])
        both = both.take(np.lexsort((*(both.columns[name] for name in reversed(COLUMN_NAMES)), both.memory, both.step)))
        mesh, quickest = _quickest(both)
        self._quickest = np.sort(quickest)[: self._keep]
        # A mesh that is not among the best yet may become so by a quicker candidate, and have this one as its simplest.
        near = (both.step <= self.limit) & (both.step <= quickest[mesh] * (1 + EQUAL_TIME_TOLERANCE))
        rows = np.flatnonzero(near)
        self._rated = both.take(rows[_simpler(mesh[rows], layout_complexity(both.take(rows).columns))])

    def ranked(self) -> RatedCandidates:
        """Return one candidate per mesh, the simplest of its quickest, at most `keep`.

        The best comes first, then those as quick, simplest first, then the others by time. What comes first does not
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
        one = np.sort(order[first])
        alike, slower = one[step[one] <= limit], one[step[one] > limit]
        alike = alike[np.lexsort((step[alike], simple[alike]))]
        slower = slower[np.argsort(step[slower], kind="stable")]
        return rated.take(np.concatenate([alike, slower])[: self._keep])


def _quickest(rated: RatedCandidates) -> tuple[NDArray[np.int64], Column]:
    """(the mesh of each candidate, dense from 0; step time of the quickest candidate of each mesh)."""
    _, mesh = np.unique(_meshes(rated), return_inverse=True)
    quickest = np.full(mesh.max() + 1, np.inf)
    np.minimum.at(quickest, mesh, rated.step)
    return mesh, quickest


def _meshes(rated: RatedCandidates) -> NDArray[np.int64]:
    """[n]: a number for each mesh."""
    found = np.zeros(rated.count, np.int64)
    for name in AXES:  # degrees are below 2^12 but for one of them at a time
        found = found * 1_000_003 + rated.columns[name].astype(np.int64)
    return found


def _simpler(mesh: NDArray[np.int64], simple: Column) -> NDArray[np.int64]:
    """Rows, sorted by time, that are simpler than all quicker ones of their mesh."""
    order = np.argsort(mesh, kind="stable")
    starts = np.flatnonzero(np.diff(mesh[order], prepend=-1))
    kept = []
    for rows in np.split(order, starts[1:]):
        lowest = np.minimum.accumulate(simple[rows])
        better = np.ones(len(rows), bool)
        better[1:] = simple[rows][1:] < lowest[:-1]
        kept.append(rows[better])
    found: NDArray[np.int64] = np.sort(np.concatenate(kept))
    return found


_MODEL_AXES = ("pp", "cp", "tp")
_SCHEDULE = {"1f1b": 0, "gpipe": 1, "interleaved_1f1b": 1, "looped_bfs": 1, "naive": 1}
"""Points by schedule; the others, which split backward, have 2."""
_STAGE, _LEVEL, _DEGREE = 0.1, 0.05, 0.0005
"""Fractions of a point: for a ZeRO stage, a second level of sharding, a doubling of a degree; below 1 in total."""


def layout_complexity(columns: Mapping[str, Column]) -> Column:
    """Map [n] columns of kept.NAMES to points; fewer is simpler."""
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
    """Indices of those for which nothing has less of both, ascending in the first; of equal ones the first."""
    order = np.lexsort((np.arange(len(one)), other, one))
    lowest = np.minimum.accumulate(other[order])
    first = np.ones(len(order), bool)
    first[1:] = other[order][1:] < lowest[:-1]
    return order[first]


class ParetoFront:
    """A Pareto front that grows."""

    def __init__(self) -> None:
        self._one = self._other = np.empty(0)

    def of(self, one: Column, other: Column) -> NDArray[np.int64]:
        """Replace it by the front of these; returns their indices."""
        rows = pareto_front(one, other)
        self._one, self._other = one[rows], other[rows]
        return rows

    def free(self, one: Column, other: Column) -> NDArray[np.bool_]:
        """[n]: nothing on the front is as good in both."""
        if not len(self._one):
            return np.ones(len(one), bool)
        place = np.searchsorted(self._one, one, side="right") - 1
        held = np.where(place >= 0, self._other[np.maximum(place, 0)], np.inf)
        result: NDArray[np.bool_] = other < held
        return result
