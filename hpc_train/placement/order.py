"""Orders of nodes worth trying: along the tree, in whole cells, and with the axes of the mesh nested otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.fabric import Fabric

Order = NDArray[np.int64]
"""[positions]: node at each position."""


def tree_order(fabric: Fabric) -> Order:
    """Group by group at every level, in order of first appearance: the least change that makes groups contiguous."""
    return np.lexsort([np.arange(len(fabric.nodes)), *(level.group for level in fabric.levels[1:])])


def largest_first(fabric: Fabric) -> Order:
    """As tree_order, but larger groups before smaller ones within the group above them."""
    keys: list[NDArray[np.int64]] = []
    for level in reversed(fabric.levels[1:]):
        keys += [-np.bincount(level.group)[level.group], level.group]
    return np.lexsort([np.arange(len(fabric.nodes)), *reversed(keys)])


def pack(fabric: Fabric, unit: int) -> Order:
    """Cells of `unit` consecutive nodes, as many as can be inside one group of the innermost level, then of the next.

    What is left of a group after its whole cells is put together with what is left of its neighbours, largest remainder
    first; nodes that fill no cell at all come last.
    """
    assert unit > 0, "a cell has nodes"
    left, cells = [np.array([node]) for node in range(len(fabric.nodes))], list[Order]()
    for number in range(1, len(fabric.levels) + 1):
        group = fabric.levels[number].group if number < len(fabric.levels) else np.zeros(len(fabric.nodes), np.int64)
        whole, left = _cells_of_level(left, group, unit)
        cells += whole
    place = np.empty(len(fabric.nodes), np.int64)
    place[tree_order(fabric)] = np.arange(len(fabric.nodes))
    cells.sort(key=lambda cell: int(place[cell[0]]))
    return np.concatenate([*cells, *left])


def _cells_of_level(left: list[Order], group: NDArray[np.int64], unit: int) -> tuple[list[Order], list[Order]]:
    """(whole cells, what is left of each group that has anything left)."""
    members: dict[int, list[Order]] = {}
    for part in left:
        members.setdefault(int(group[part[0]]), []).append(part)
    cells, rest = list[Order](), list[Order]()
    for parts in members.values():
        nodes = np.concatenate(sorted(parts, key=len, reverse=True))
        whole = len(nodes) // unit * unit
        cells += np.split(nodes[:whole], whole // unit) if whole else []
        rest += [nodes[whole:]] if whole < len(nodes) else []
    return cells, rest


def nestings(grid: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Every order of the axes of the node grid, outermost first, the mesh's own first, with [positions]: which node
    along an order of nodes stands at each position of the mesh. At most 5! of them."""
    for nest in itertools.permutations(range(len(grid))):
        along = np.arange(math.prod(grid)).reshape([grid[axis] for axis in nest])
        yield nest, along.transpose(np.argsort(nest)).ravel() if nest else along.ravel()


def cell_sizes(grid: tuple[int, ...], nest: tuple[int, ...]) -> list[int]:
    """Nodes of the blocks that the inner axes of a nesting fill, ascending; not one node, not all."""
    sizes = itertools.accumulate((grid[axis] for axis in reversed(nest)), lambda a, b: a * b)
    return [size for size in sizes if 1 < size < math.prod(grid)]
