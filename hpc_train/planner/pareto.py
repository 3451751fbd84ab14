"""The Pareto front of time and memory: candidates that no other beats in both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.jobs import Column


def front(one: Column, other: Column) -> NDArray[np.int64]:
    """Indices of those for which nothing has less of both, ascending in the first; of equal ones the first."""
    order = np.lexsort((np.arange(len(one)), other, one))
    lowest = np.minimum.accumulate(other[order])
    first = np.ones(len(order), bool)
    first[1:] = other[order][1:] < lowest[:-1]
    return order[first]


class Front:
    """One that grows."""

    def __init__(self) -> None:
        self._one = self._other = np.empty(0)

    def of(self, one: Column, other: Column) -> NDArray[np.int64]:
        """Replace it by the front of these; returns their indices."""
        rows = front(one, other)
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
