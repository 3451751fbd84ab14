"""Describe how the ranks of a rehearsal tile a tensor: the interval of each dimension at each mesh coordinate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train._torch.dtensor import cut_dimension, shard_rectangle
from hpc_train.config.parallel import Degrees
from hpc_train.parallel.mesh_axes import EXPERT_SHARD_AXIS, SHARD_CP_AXIS
from hpc_train.shard_rectangles import FusedParts

SHARED_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes along which the ranks of one stage differ."""
Interval = tuple[int, int]
"""(begin, length) along one dimension."""
Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""(offset, shape)"""


@dataclass(frozen=True)
class Tiling:
    """How one tensor is split into rectangles over the ranks of one stage."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[str, ...], ...]
    """For each dimension, the mesh axes that split it."""
    intervals: tuple[tuple[Interval, ...], ...]
    """For each dimension, the intervals that ranks hold, in the order of their coordinates on these axes; the last axis
    varies fastest."""
    ep: int = 1
    """Degree of ep for a tensor of experts, which is split over (expert_shard, ep) in place of (dp_shard, cp)."""
    fused: FusedParts | None = None
    """The parts of a fused matrix: intervals are in the order in which ranks store it."""

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """Return the axes along which the ranks of one stage differ, as this tensor's mesh has them."""
        return SHARED_AXES if self.ep == 1 else ("dp_replicate", EXPERT_SHARD_AXIS, "ep", "tp")

    @property
    def split(self) -> set[str]:
        """Return all axes that split the tensor."""
        return {axis for axes in self.cuts for axis in axes}

    def count_copies(self, degrees: Degrees) -> int:
        """Return how many ranks hold the same rectangle."""
        return math.prod(self._find_place(axis, {}, degrees)[0] for axis in self.shared_axes if axis not in self.split)

    def number_copy(self, at: Mapping[str, int], degrees: Degrees) -> int:
        """Return the number of the copy, from 0, that the rank at these coordinates holds."""
        return self._flatten_index([axis for axis in self.shared_axes if axis not in self.split], at, degrees)

    def find_rectangles(self, at: Mapping[str, int], degrees: Degrees) -> list[Rectangle]:
        """Return (offset, shape) of each rectangle that the rank at these coordinates holds: one of most tensors."""
        pairs = zip(self.cuts, self.intervals, strict=True)
        intervals_here = [intervals[self._flatten_index(axes, at, degrees)] for axes, intervals in pairs]
        offset, shape = tuple(begin for begin, _ in intervals_here), tuple(length for _, length in intervals_here)
        if self.fused is None or 0 in shape:
            return [(offset, shape)]
        return [(place, size) for _, place, size in self.fused.find_rectangles(offset, shape)]

    def _flatten_index(self, axes: Sequence[str], at: Mapping[str, int], degrees: Degrees) -> int:
        index = 0
        for axis in axes:
            size, place = self._find_place(axis, at, degrees)
            index = index * size + place
        return index

    def _find_place(self, axis: str, at: Mapping[str, int], degrees: Degrees) -> tuple[int, int]:
        """Return the degree of an axis and the index on it; ep is the inner part of dp_shard x cp."""
        if axis not in ("ep", EXPERT_SHARD_AXIS):
            return int(getattr(degrees, axis)), at.get(axis, 0)
        outer, inner = divmod(at.get("dp_shard", 0) * degrees.cp + at.get("cp", 0), self.ep)
        return (self.ep, inner) if axis == "ep" else (degrees.dp_shard * degrees.cp // self.ep, outer)

    def shrink(self, shape: tuple[int, ...]) -> Tiling:
        """Return the tiling of optimizer state with fewer entries along some dimensions: sums, or scales of blocks.

        A dimension with one entry is not split; one with an entry for so many elements is split as these are.
        """
        cuts: list[tuple[str, ...]] = []
        intervals: list[tuple[Interval, ...]] = []
        for full_size, size, axes, pieces in zip(self.shape, shape, self.cuts, self.intervals, strict=True):
            splits, block = size == full_size or size > 1, full_size // size
            cuts.append(axes if splits else ())
            intervals.append(
                tuple((begin // block, length // block) for begin, length in pieces) if splits else ((0, 1),)
            )
        fused = None if self.fused is None else self.fused.fit(shape)
        return replace(self, shape=shape, cuts=tuple(cuts), intervals=tuple(intervals), fused=fused)

    @property
    def rectangles(self) -> int:
        """Number of different rectangles that are not empty."""
        counts = [sum(length > 0 for _, length in intervals) for intervals in self.intervals]
        if self.fused is not None:
            intervals = self.intervals[self.fused.dim]
            counts[self.fused.dim] = sum(len(self.fused.list_runs(begin, length)) for begin, length in intervals)
        return math.prod(counts)

    def find_problem(self) -> str | None:
        """Return what is missing or held twice; None if the ranks hold every element once, not counting copies."""
        for dimension, (size, intervals) in enumerate(zip(self.shape, self.intervals, strict=True)):
            end = 0
            for begin, length in sorted(interval for interval in intervals if interval[1]):
                if begin != end:
                    what = "is on no rank" if begin > end else "is on two ranks"
                    return f"of dimension {dimension}, {min(begin, end)} to {max(begin, end)} {what}"
                end = begin + length
            if end != size:
                return f"of dimension {dimension}, only {end} of {size} are on any rank"
        return None


@dataclass(frozen=True)
class Tilings:
    """Makes tilings. Tensors with the same shape and layout share one object."""

    by_layout: dict[object, Tiling]

    def make_tiling(self, tensor: Tensor, fused: FusedParts | None = None) -> Tiling:
        """Return the tiling of a parameter or buffer of a model that has been split; fused: parts of a fused matrix."""
        if not isinstance(tensor, DTensor):
            return make_whole_tiling(tuple(tensor.shape))
        mesh = tensor.device_mesh
        key = (tensor.shape, tensor.placements, mesh.mesh_dim_names, mesh.shape, fused)
        if key not in self.by_layout:
            self.by_layout[key] = replace(_make_tiling(tensor), fused=fused)
        return self.by_layout[key]


def make_whole_tiling(shape: tuple[int, ...]) -> Tiling:
    """Return the tiling of a tensor that every rank of a stage holds whole."""
    return Tiling(shape, ((),) * len(shape), tuple(((0, size),) for size in shape))


def _make_tiling(tensor: DTensor) -> Tiling:
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None
    cuts, intervals = [], []
    for dimension in range(tensor.ndim):
        axes = [axis for axis, how in enumerate(tensor.placements) if cut_dimension(how) == dimension]
        cuts.append(tuple(axis for index in axes for axis in _split_axis(names[index])))
        intervals.append(tuple(_list_intervals(tensor, dimension, axes)))
    ep = tensor.device_mesh.size(names.index("ep")) if "ep" in names else 1
    return Tiling(tuple(tensor.shape), tuple(cuts), tuple(intervals), ep)


def _split_axis(axis: str) -> tuple[str, ...]:
    return ("dp_shard", "cp") if axis == SHARD_CP_AXIS else (axis,)


def _list_intervals(tensor: DTensor, dimension: int, axes: list[int]) -> list[Interval]:
    mesh, intervals = tensor.device_mesh, []
    at = [0] * mesh.ndim
    for place in product(*(range(mesh.size(axis)) for axis in axes)):
        for axis, index in zip(axes, place, strict=True):
            at[axis] = index
        shape, offset = shard_rectangle(tensor, tuple(at))
        intervals.append((offset[dimension], shape[dimension]))
    return intervals
