"""What a search keeps of the candidates it has seen: of each mesh the best, of the best meshes only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.jobs import Column
from hpc_train.planner.simplicity import complexity
from hpc_train.planner.space import INNER, OUTER, Columns

NAMES = (*OUTER, *INNER)
MESH = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ALIKE = 0.02
"""Candidates of one job whose times differ by less than this are equal, and the simplest of them is taken.

Much of the 10 % by which a time may be off is common to all candidates of a job and does not change their order; the
rest is 2.7 % between two measured configurations of one job (median over published runs that are predicted within 5 %
of each other), and up to 2 % choosing the simplest costs nothing against choosing the quickest (`plan validate`:
regret).
"""


@dataclass(frozen=True)
class Rated:
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

    def take(self, rows: NDArray[np.int64]) -> Rated:
        return Rated({name: it[rows] for name, it in self.columns.items()}, self.step[rows], self.memory[rows])


def nothing() -> Rated:
    """No candidate."""
    return Rated({name: np.empty(0) for name in NAMES}, np.empty(0), np.empty(0))


def joined(parts: Sequence[Rated]) -> Rated:
    """One after the other."""
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in NAMES}
    return Rated(columns, *(np.concatenate([getattr(part, it) for part in parts]) for it in ("step", "memory")))


class Best:
    """The `keep` meshes with the quickest candidates, and of each all that may yet turn out to be its best."""

    def __init__(self, keep: int) -> None:
        self._keep, self._rated = keep, nothing()
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
        return max(float(self._quickest[-1]), self.quickest * (1 + ALIKE)) * (1 + ALIKE)

    def offer(self, rated: Rated) -> None:
        """Keep what is worth it."""
        if not rated.count:
            return
        both = joined([self._rated, rated])
        both = both.take(np.lexsort((*(both.columns[name] for name in reversed(NAMES)), both.memory, both.step)))
        mesh, quickest = _quickest(both)
        self._quickest = np.sort(quickest)[: self._keep]
        # A mesh that is not among the best yet may become so by a quicker candidate, and have this one as its simplest.
        near = (both.step <= self.limit) & (both.step <= quickest[mesh] * (1 + ALIKE))
        rows = np.flatnonzero(near)
        self._rated = both.take(rows[_simpler(mesh[rows], complexity(both.take(rows).columns))])

    def ranked(self) -> Rated:
        """Return one candidate per mesh, the simplest of its quickest, at most `keep`.

        The best comes first, then those as quick, simplest first, then the others by time. What comes first does not
        depend on `keep`.
        """
        if not self._rated.count:
            return self._rated
        limit = self.quickest * (1 + ALIKE)
        mesh, quickest = _quickest(self._rated)
        rated = self._rated.take(np.flatnonzero(quickest[mesh] <= max(float(self._quickest[-1]), limit)))
        simple, step = complexity(rated.columns), rated.step
        order = np.lexsort((step, simple, step > limit, _meshes(rated)))  # candidates equal to the best first
        first = np.ones(len(order), bool)
        first[1:] = np.diff(_meshes(rated)[order]) != 0
        one = np.sort(order[first])
        alike, slower = one[step[one] <= limit], one[step[one] > limit]
        alike = alike[np.lexsort((step[alike], simple[alike]))]
        slower = slower[np.argsort(step[slower], kind="stable")]
        return rated.take(np.concatenate([alike, slower])[: self._keep])


def _quickest(rated: Rated) -> tuple[NDArray[np.int64], Column]:
    """(the mesh of each candidate, dense from 0; step time of the quickest candidate of each mesh)."""
    _, mesh = np.unique(_meshes(rated), return_inverse=True)
    quickest = np.full(mesh.max() + 1, np.inf)
    np.minimum.at(quickest, mesh, rated.step)
    return mesh, quickest


def _meshes(rated: Rated) -> NDArray[np.int64]:
    """[n]: a number for each mesh."""
    found = np.zeros(rated.count, np.int64)
    for name in MESH:  # degrees are below 2^12 but for one of them at a time
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
