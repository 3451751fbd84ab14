"""How one tensor lies on all the ranks that share it, and the proof that they hold every element of it once.

A mesh axis cuts one dimension of a tensor, so what the ranks hold is every combination of one interval of each
dimension: it covers the tensor exactly once if and only if the intervals of each dimension do. That is checked for all
ranks, however many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train.compat import cut_dimension, rectangle
from hpc_train.config.degrees import Degrees
from hpc_train.parallel.axes import SHARD_CONTEXT

SHARED = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes over which the ranks of one stage lie."""

Interval = tuple[int, int]
"""(begin, length)"""


@dataclass(frozen=True)
class Tiling:
    """One tensor on the ranks of one stage."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    """Of each dimension, the axes that cut it."""
    intervals: tuple[tuple[Interval, ...], ...]
    """Of each dimension, what the ranks hold of it, by their coordinates on these axes, the last of which varies
    fastest."""

    @property
    def split(self) -> set[str]:
        """All axes that cut."""
        return {axis for axes in self.cuts for axis in axes}

    def copies(self, degrees: Degrees) -> int:
        """Ranks that hold the same part."""
        return math.prod(getattr(degrees, axis) for axis in SHARED if axis not in self.split)

    def copy(self, at: Mapping[str, int], degrees: Degrees) -> int:
        """Which of these copies the rank at some coordinates has."""
        return _flat([axis for axis in SHARED if axis not in self.split], at, degrees)

    def held(self, at: Mapping[str, int], degrees: Degrees) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of the rectangle of the rank at some coordinates."""
        pairs = zip(self.cuts, self.intervals, strict=True)
        found = [intervals[_flat(axes, at, degrees)] for axes, intervals in pairs]
        return tuple(begin for begin, _ in found), tuple(length for _, length in found)

    @property
    def rectangles(self) -> int:
        """Different ones that are not empty."""
        return math.prod(sum(length > 0 for _, length in intervals) for intervals in self.intervals)

    def problem(self) -> str | None:
        """What is missing, or there twice; None: the ranks hold every element exactly once, copies aside."""
        for dimension, (size, intervals) in enumerate(zip(self.shape, self.intervals, strict=True)):
            end = 0
            for begin, length in sorted(it for it in intervals if it[1]):
                if begin != end:
                    what = "is on no rank" if begin > end else "is on two ranks"
                    return f"of dimension {dimension}, {min(begin, end)} to {max(begin, end)} {what}"
                end = begin + length
            if end != size:
                return f"of dimension {dimension}, only {end} of {size} are on any rank"
        return None


def _flat(axes: tuple[str, ...] | list[str], at: Mapping[str, int], degrees: Degrees) -> int:
    index = 0
    for axis in axes:
        index = index * int(getattr(degrees, axis)) + at[axis]
    return index


@dataclass(frozen=True)
class Tilings:
    """Makes them; tensors of a shape that lie alike share one."""

    known: dict[object, Tiling]

    def of(self, tensor: Tensor) -> Tiling:
        """A parameter or a buffer of a model that has been split."""
        if not isinstance(tensor, DTensor):
            return whole(tuple(tensor.shape))
        mesh = tensor.device_mesh
        key = (tensor.shape, tensor.placements, mesh.mesh_dim_names, mesh.shape)
        if key not in self.known:
            self.known[key] = _tiling(tensor)
        return self.known[key]


def whole(shape: tuple[int, ...]) -> Tiling:
    """Of a tensor that every rank of a stage holds whole."""
    return Tiling(shape, ((),) * len(shape), tuple(((0, size),) for size in shape))


def _tiling(tensor: DTensor) -> Tiling:
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    cuts, intervals = [], []
    for dimension in range(tensor.ndim):
        axes = [axis for axis, how in enumerate(tensor.placements) if cut_dimension(how) == dimension]
        cuts.append(tuple(axis for index in axes for axis in _parts(names[index])))
        intervals.append(tuple(_intervals(tensor, dimension, axes)))
    return Tiling(tuple(tensor.shape), tuple(cuts), tuple(intervals))


def _parts(axis: str) -> tuple[str, ...]:
    return ("dp_shard", "cp") if axis == SHARD_CONTEXT else (axis,)


def _intervals(tensor: DTensor, dimension: int, axes: list[int]) -> list[Interval]:
    mesh, found = tensor.device_mesh, []
    at = [0] * mesh.ndim
    for place in product(*(range(mesh.size(axis)) for axis in axes)):
        for axis, index in zip(axes, place, strict=True):
            at[axis] = index
        shape, offset = rectangle(tensor, tuple(at))
        found.append((offset[dimension], shape[dimension]))
    return found
