"""Find which ranks form the groups of a mesh axis, and the positions of their nodes.

The last functions find the groups that straddle a level of the fabric although one group of that level could hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.parallel import AXES
from hpc_train.errors import UserError
from hpc_train.placement.fabric import Fabric


@dataclass(frozen=True)
class GroupRows:
    """The groups of an axis as positions of nodes; groups on the same positions share a row."""

    position: NDArray[np.int64]
    """[rows, ranks of a group]: node of each rank, counted along the rank map; ascending within a row."""
    copies: NDArray[np.int64]
    """[rows]: number of groups that the row stands for."""

    @property
    def spread(self) -> NDArray[np.int64]:
        """Number of nodes of each row's group, [rows]."""
        return np.asarray(1 + np.count_nonzero(np.diff(self.position, axis=1), axis=1))


EXPERT_AXES = ("expert_shard", "ep")
"""The two parts, outermost first, into which expert parallelism cuts dp_shard x cp."""


def list_degrees(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the degrees in the order of AXES; missing axes have degree 1. `ep` may also be given: see EXPERT_AXES."""
    unknown = [axis for axis in sizes if axis not in (*AXES, "ep")]
    if unknown:
        raise UserError(f"{unknown[0]}: not a mesh axis; the axes are {', '.join(AXES)}")
    return tuple(int(sizes.get(axis, 1)) for axis in AXES)


def check_world(fabric: Fabric, sizes: Mapping[str, int], nodes: int) -> None:
    """Raise UserError, one line, if the degrees do not fill `nodes` nodes exactly."""
    degrees = list_degrees(sizes)
    if math.prod(degrees) != nodes * fabric.ranks_per_node:
        equation = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, degrees, strict=True))
        raise UserError(
            f"{equation} = {math.prod(degrees)} ranks, but {nodes} nodes x {fabric.ranks_per_node} ranks per node are "
            f"{nodes * fabric.ranks_per_node}; a placement needs as many of one as of the other"
        )


def list_groups(sizes: Mapping[str, int], axes: tuple[str, ...]) -> NDArray[np.int64]:
    """Return [groups, ranks]: the ranks of every group along the axes together, ascending, as torch orders a group.

    Ranks are row-major over AXES, the last fastest.
    """
    degrees, names = list_degrees(sizes), AXES
    if set(axes) & set(EXPERT_AXES):
        pp, replicate, shard, cp, tp = degrees
        degrees, names = (pp, replicate, shard * cp // sizes["ep"], sizes["ep"], tp), (*AXES[:2], *EXPERT_AXES, "tp")
    inside = [number for number, axis in enumerate(names) if axis in axes]
    outside = [number for number in range(len(names)) if number not in inside]
    # With the axes of the group innermost, each row of the reshaped array is one group.
    ranks = np.arange(math.prod(degrees)).reshape(degrees).transpose(*outside, *inside)
    return ranks.reshape(-1, math.prod(degrees[number] for number in inside))


def list_rows(sizes: Mapping[str, int], axes: tuple[str, ...], ranks_per_node: int) -> GroupRows:
    """Return the groups along the axes as rows of positions.

    Groups come with ascending ranks, and so with ascending positions in every column: equal rows are neighbours.
    """
    position = list_groups(sizes, axes) // ranks_per_node
    first = np.ones(len(position), bool)
    first[1:] = (position[1:] != position[:-1]).any(axis=1)
    starts = np.flatnonzero(first)
    return GroupRows(position[starts], np.diff(starts, append=len(position)))


def format_axes(axes: tuple[str, ...]) -> str:
    """Name axes as cost tables do: dp_shard, or dp_shard+cp."""
    return "+".join(axis for axis in (*AXES, *EXPERT_AXES) if axis in axes)


def find_node_grid(sizes: Mapping[str, int], ranks_per_node: int) -> tuple[int, ...]:
    """Return the degrees of the part of the mesh that lies between nodes, outermost first, without those of 1.

    The inner axes fill a node; the axis that the edge of the node cuts keeps the part beyond it. Where a node's ranks
    are no whole block of the mesh, the grid is one axis: nodes still move, but only as a line.
    """
    grid, room = list(list_degrees(sizes)), ranks_per_node
    for number in reversed(range(len(grid))):
        # Axes fill a node from the innermost one on. Each either fits whole, or the node cuts it into equal parts.
        common = math.gcd(grid[number], room)
        if common != min(grid[number], room):
            return (math.prod(list_degrees(sizes)) // ranks_per_node,)
        grid[number], room = grid[number] // common, room // common
        if room == 1:
            break
    return tuple(size for size in grid if size > 1)


@dataclass(frozen=True)
class CrossableGroups:
    """The groups of one axis that a single group of a level could hold."""

    axis: str
    """Label of the axis, or of several joined by +."""
    level: int
    """Index in fabric.levels."""
    rows: NDArray[np.int64]
    """[rows, ranks]: positions of nodes."""
    spread: NDArray[np.int64]
    """[rows]: number of nodes of each group."""
    copies: NDArray[np.int64]
    """[rows]: number of groups that the row stands for."""

    @property
    def count(self) -> int:
        """Return the number of groups."""
        return int(self.copies.sum())

    def count_straddling_by_order(self, fabric: Fabric, orders: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return [orders]: how many groups lie in several groups of the level. orders: [orders, positions]."""
        group = fabric.levels[self.level].group[orders]
        # All members are compared with the first, not only the last: an order may leave a group and come back to it.
        counts = [(part[self.rows] != part[self.rows[:, :1]]).any(axis=1) @ self.copies for part in group]
        return np.array(counts, np.int64)


def find_crossable_groups(fabric: Fabric, groups: dict[str, GroupRows]) -> list[CrossableGroups]:
    """List the groups that a level could hold, for every axis and level above the node that have any."""
    crossable = []
    for axis, rows in groups.items():
        spread = rows.spread
        for number in range(1, len(fabric.levels)):
            fits = (spread > 1) & (spread <= np.bincount(fabric.levels[number].group).max())
            if fits.any():
                crossable.append(CrossableGroups(axis, number, rows.position[fits], spread[fits], rows.copies[fits]))
    return crossable


def count_straddling(
    fabric: Fabric, groups: dict[str, GroupRows], identity: NDArray[np.int64], placed: NDArray[np.int64]
) -> dict[str, dict[str, dict[str, int]]]:
    """Count straddling groups for Placement.straddling."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for crossable in find_crossable_groups(fabric, groups):
        before, after = crossable.count_straddling_by_order(fabric, np.stack([identity, placed])).tolist()
        counts = {"groups": crossable.count, "identity": before, "placed": after}
        table.setdefault(crossable.axis, {})[fabric.levels[crossable.level].name] = counts
    return table
