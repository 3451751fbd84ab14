"""All orders of a few nodes that differ in cost at all, and of two that do not, the one nearer to the launcher's.

Groups of a level that are alike (same uplink and share of it, same parts) can change places without changing any cost,
so one order of each such class is enough: 8! orders of 8 nodes are 1 to a few thousand classes on the trees that exist.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from hpc_train.placement.fabric import Fabric


@dataclass(frozen=True)
class Tree:
    """The fabric as groups within groups; a group is (level, index), level 0 the nodes, the topmost level the whole."""

    fabric: Fabric

    @cached_property
    def paths(self) -> list[list[int]]:
        """[level][node]: the node's group of every level, nodes themselves first and the whole last."""
        count = len(self.fabric.nodes)
        return [list(range(count)), *(level.group.tolist() for level in self.fabric.levels[1:]), [0] * count]

    @cached_property
    def parts(self) -> list[dict[int, list[int]]]:
        """[level][group]: groups of the level below within it."""
        below: list[dict[int, list[int]]] = [{node: [] for node in self.paths[0]}]
        for low, high in zip(self.paths, self.paths[1:], strict=False):
            found: dict[int, dict[int, None]] = {}
            for part, whole in zip(low, high, strict=True):
                found.setdefault(whole, {})[part] = None
            below.append({whole: list(parts) for whole, parts in found.items()})
        return below

    @cached_property
    def kinds(self) -> list[dict[int, int]]:
        """[level][group]: a number that two groups of a level share if and only if they are alike."""
        numbers: dict[Hashable, int] = {}
        kinds: list[dict[int, int]] = []
        for level, parts in enumerate(self.parts):
            uplink = self.fabric.levels[level].uplink if level < len(self.fabric.levels) else [0.0]
            share = self.fabric.levels[level].busy_uplink if level < len(self.fabric.levels) else [0.0]
            below = kinds[-1] if kinds else {}
            kinds.append(
                {
                    group: numbers.setdefault(
                        (level, float(uplink[group]), float(share[group]), *sorted(below[part] for part in within)),
                        len(numbers),
                    )
                    for group, within in parts.items()
                }
            )
        return kinds


def classes(fabric: Fabric) -> NDArray[np.int64]:
    """[orders, positions]: one order of every class of orders that cost the same by symmetry of the fabric."""
    tree = Tree(fabric)
    count, orders = len(fabric.nodes), list[list[int]]()
    choices: dict[frozenset[int], list[int]] = {}

    def extend(order: list[int]) -> None:
        if len(order) == count:
            orders.append(order)
            return
        used = frozenset(order)
        if used not in choices:
            choices[used] = _different(tree, used)
        for node in choices[used]:
            extend([*order, node])

    extend([])
    return np.array(orders, np.int64)


def _different(tree: Tree, used: frozenset[int]) -> list[int]:
    """Of the unused nodes, the first of each set that symmetries which leave the used ones in place can exchange."""
    touched = [{path[node] for node in used} for path in tree.paths]
    first: dict[tuple[tuple[bool, int], ...], int] = {}
    for node in range(len(tree.paths[0])):
        if node not in used:
            # A group that holds a used node stays where it is; one that holds none is as good as any of its kind.
            key = tuple(
                (True, path[node]) if path[node] in seen else (False, kind[path[node]])
                for path, seen, kind in zip(tree.paths, touched, tree.kinds, strict=True)
            )
            first.setdefault(key, node)
    return list(first.values())


def nearest(fabric: Fabric, order: Sequence[int]) -> NDArray[np.int64]:
    """Of all orders in the class of `order`, one that leaves the most nodes where the launcher has them."""
    tree = Tree(fabric)
    position = {node: at for at, node in enumerate(order)}
    _, exchange = _match(tree, position, len(tree.paths) - 1, 0, 0)
    return np.array([exchange[node] for node in order], np.int64)


def _match(tree: Tree, position: dict[int, int], level: int, group: int, other: int) -> tuple[int, dict[int, int]]:
    """(nodes left in place, node -> node) when what `group` holds moves to `other`, a group of its kind."""
    if level == 0:
        return int(position[group] == other), {group: other}
    kind, parts, others = tree.kinds[level - 1], tree.parts[level][group], tree.parts[level][other]
    fits = {
        (row, column): _match(tree, position, level - 1, part, target)
        for row, part in enumerate(parts)
        for column, target in enumerate(others)
        if kind[part] == kind[target]
    }
    kept = np.full((len(parts), len(others)), -len(position), np.int64)
    for at, (count, _) in fits.items():
        kept[at] = count
    pairs = zip(*linear_sum_assignment(kept, maximize=True), strict=True)
    chosen = [fits[int(row), int(column)] for row, column in pairs]
    return sum(count for count, _ in chosen), {a: b for _, exchange in chosen for a, b in exchange.items()}
