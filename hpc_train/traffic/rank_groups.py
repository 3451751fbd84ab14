"""Find the groups of ranks that communicate along each mesh axis, and convert to bus bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.config.parallel import AXES, Degrees
from hpc_train.traffic.axes import Collective

WORLD_AXIS = "world"


@dataclass(frozen=True)
class RankGroup:
    """The group of one rank along one axis. All groups of an axis communicate at the same time, as in training."""

    axis: str
    """A mesh axis, or world."""
    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    index: int
    """Position of this rank in the group."""
    groups: int
    """Number of groups of the axis."""


def list_groups_of_rank(degrees: Degrees, rank: int) -> list[RankGroup]:
    """List the groups of `rank` along axes of degree above 1, outermost first, and the world if no axis spans it."""
    groups = [_list_axis_group(degrees, axis, rank) for axis in AXES if getattr(degrees, axis) > 1]
    if not any(group.groups == 1 for group in groups):
        groups.append(RankGroup(WORLD_AXIS, tuple(range(degrees.world)), rank, 1))
    return groups


def _list_axis_group(degrees: Degrees, axis: str, rank: int) -> RankGroup:
    position = AXES.index(axis)
    # Ranks are numbered in row-major order of the mesh, outermost axis first.
    size, stride = degrees.sizes[position], math.prod(degrees.sizes[position + 1 :])
    index = rank // stride % size
    first = rank - index * stride
    return RankGroup(axis, tuple(first + i * stride for i in range(size)), index, degrees.world // size)


def compute_bus_factor(name: Collective, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth, as nccl-tests defines them (doc/PERFORMANCE.md).

    That is the share of the buffer that every rank's link has to carry:
    all_reduce 2 (n - 1) / n; all_gather, reduce_scatter, all_to_all (n - 1) / n; broadcast, reduce, send_recv 1.
    """
    if name == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0
