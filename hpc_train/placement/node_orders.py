"""List the orders of nodes worth costing, and improve a good one by swaps.

Constructed orders come first: along the tree, and in whole cells, with the axes of the mesh nested in every way. For a
few nodes all orders that differ in cost are listed: groups of a level that are alike can change places without changing
any cost, so one order of each such class is enough. The local search exchanges two nodes, or two cells of nodes, as
long as a step gets cheaper.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.cost.cost_model import CostModel
from hpc_train.placement.fabric import Fabric

NodeOrder = NDArray[np.int64]
"""[positions]: node at each position."""


def order_along_tree(fabric: Fabric) -> NodeOrder:
    """Order nodes group by group at every level, in order of first appearance.

    This is the least change that makes groups contiguous.
    """
    # lexsort takes its last key first: levels come innermost first, so the topmost one decides, then the next below.
    return np.lexsort([np.arange(len(fabric.nodes)), *(level.group for level in fabric.levels[1:])])


def order_largest_first(fabric: Fabric) -> NodeOrder:
    """Order nodes along the tree, with larger groups before smaller ones within the group above them."""
    keys: list[NDArray[np.int64]] = []
    for level in reversed(fabric.levels[1:]):
        # The index of a group breaks ties: groups of one size would otherwise be mixed.
        keys += [-np.bincount(level.group)[level.group], level.group]
    return np.lexsort([np.arange(len(fabric.nodes)), *reversed(keys)])


def pack_cells(fabric: Fabric, unit: int) -> NodeOrder:
    """Pack nodes into cells of `unit` consecutive nodes.

    As many cells as possible lie inside one group of the innermost level, then of the next. The rest of a group is put
    together with the rests of its neighbours, largest first; nodes that fill no cell come last.
    """
    assert unit > 0, "a cell has nodes"
    left, cells = [np.array([node]) for node in range(len(fabric.nodes))], list[NodeOrder]()
    for number in range(1, len(fabric.levels) + 1):
        group = fabric.levels[number].group if number < len(fabric.levels) else np.zeros(len(fabric.nodes), np.int64)
        packed, left = _pack_level(left, group, unit)
        cells += packed
    place = np.empty(len(fabric.nodes), np.int64)
    place[order_along_tree(fabric)] = np.arange(len(fabric.nodes))
    # Cells were found level by level, but neighbours in the mesh should be neighbours in the tree: back to its order.
    cells.sort(key=lambda cell: int(place[cell[0]]))
    return np.concatenate([*cells, *left])


def _pack_level(left: list[NodeOrder], group: NDArray[np.int64], unit: int) -> tuple[list[NodeOrder], list[NodeOrder]]:
    """Return (whole cells, remaining nodes of each group that has any)."""
    members: dict[int, list[NodeOrder]] = {}
    for part in left:
        members.setdefault(int(group[part[0]]), []).append(part)
    cells, rest = list[NodeOrder](), list[NodeOrder]()
    for parts in members.values():
        # Large rests first, so that a cell that has to cross an edge of the level below crosses as few as possible.
        nodes = np.concatenate(sorted(parts, key=len, reverse=True))
        packed = len(nodes) // unit * unit
        cells += np.split(nodes[:packed], packed // unit) if packed else []
        rest += [nodes[packed:]] if packed < len(nodes) else []
    return cells, rest


def list_nestings(grid: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Yield every order of the axes of the node grid, outermost first, the mesh's own first: at most 5!.

    Each comes with [positions]: the index, along an order of nodes, of the node at each position of the mesh.
    """
    for nest in itertools.permutations(range(len(grid))):
        along = np.arange(math.prod(grid)).reshape([grid[axis] for axis in nest])
        yield nest, along.transpose(np.argsort(nest)).ravel() if nest else along.ravel()


def list_cell_sizes(grid: tuple[int, ...], nest: tuple[int, ...]) -> list[int]:
    """List the sizes, in nodes, of the blocks that the inner axes of a nesting fill; neither one node nor all."""
    sizes = itertools.accumulate((grid[axis] for axis in reversed(nest)), lambda a, b: a * b)
    return [size for size in sizes if 1 < size < math.prod(grid)]


@dataclass(frozen=True)
class SymmetryTree:
    """The fabric as groups within groups.

    A group is (level, index); level 0 are the nodes, the topmost level the whole.
    """

    fabric: Fabric

    @cached_property
    def paths(self) -> list[list[int]]:
        """[level][node]: the node's group at every level, from the node itself to the whole."""
        count = len(self.fabric.nodes)
        return [list(range(count)), *(level.group.tolist() for level in self.fabric.levels[1:]), [0] * count]

    @cached_property
    def parts(self) -> list[dict[int, list[int]]]:
        """[level][group]: its groups of the level below."""
        below: list[dict[int, list[int]]] = [{node: [] for node in self.paths[0]}]
        for low, high in zip(self.paths, self.paths[1:], strict=False):
            parts_of: dict[int, dict[int, None]] = {}
            for part, group in zip(low, high, strict=True):
                parts_of.setdefault(group, {})[part] = None
            below.append({group: list(parts) for group, parts in parts_of.items()})
        return below

    @cached_property
    def kinds(self) -> list[dict[int, int]]:
        """[level][group]: a number that two groups of a level share if and only if they are alike."""
        numbers: dict[Hashable, int] = {}
        kinds: list[dict[int, int]] = []
        for level, parts in enumerate(self.parts):
            # The whole, above the last level, has no uplink.
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


def list_order_classes(fabric: Fabric) -> NDArray[np.int64]:
    """Return [orders, positions]: one order of every class of orders that cost the same by symmetry of the fabric."""
    tree = SymmetryTree(fabric)
    count, orders = len(fabric.nodes), list[list[int]]()
    choices: dict[frozenset[int], list[int]] = {}

    def extend(order: list[int]) -> None:
        if len(order) == count:
            orders.append(order)
            return
        # What may come next depends on which nodes are placed, not on where: orders of the same nodes share the answer.
        used = frozenset(order)
        if used not in choices:
            choices[used] = _list_different_nodes(tree, used)
        for node in choices[used]:
            extend([*order, node])

    extend([])
    return np.array(orders, np.int64)


def _list_different_nodes(tree: SymmetryTree, used: frozenset[int]) -> list[int]:
    """List the first node of each set of unused nodes that symmetries fixing the used ones can exchange."""
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


def find_nearest_order(fabric: Fabric, order: Sequence[int]) -> NDArray[np.int64]:
    """Among the orders that cost the same as `order` by symmetry, find one that moves the fewest nodes."""
    tree = SymmetryTree(fabric)
    position = {node: index for index, node in enumerate(order)}
    _, exchange = _match_groups(tree, position, len(tree.paths) - 1, 0, 0)
    return np.array([exchange[node] for node in order], np.int64)


def _match_groups(
    tree: SymmetryTree, position: dict[int, int], level: int, group: int, other: int
) -> tuple[int, dict[int, int]]:
    """Map the nodes of `group` to those of `other`, a group of its kind. Returns (nodes unmoved, node -> node)."""
    from scipy.optimize import linear_sum_assignment  # a third of a second, which a plan need not wait for

    if level == 0:
        return int(position[group] == other), {group: other}
    kind, parts, other_parts = tree.kinds[level - 1], tree.parts[level][group], tree.parts[level][other]
    fits = {
        (row, column): _match_groups(tree, position, level - 1, part, target)
        for row, part in enumerate(parts)
        for column, target in enumerate(other_parts)
        if kind[part] == kind[target]
    }
    # Pairs of different kinds must not be matched: they count as worse than all nodes moved.
    unmoved = np.full((len(parts), len(other_parts)), -len(position), np.int64)
    for at, (count, _) in fits.items():
        unmoved[at] = count
    pairs = zip(*linear_sum_assignment(unmoved, maximize=True), strict=True)
    chosen = [fits[int(row), int(column)] for row, column in pairs]
    return sum(count for count, _ in chosen), {a: b for _, exchange in chosen for a, b in exchange.items()}


MAX_SWAPPED_NODES = 256
"""Maximum number of nodes for the local search; beyond it, whole cells are close enough to the best."""

_SWAPS_PER_ROUND = 48
"""Number of random exchanges of which a round of the search makes the best one."""
_MAX_COSTED_NODES = 1 << 17
"""Limit on orders times nodes that are costed in total, so that results do not depend on the machine's speed."""
_MAX_VAIN_ROUNDS = 6
"""Number of rounds without a better order after which the search stops."""
_IMPROVEMENT = 1 - 1e-9
"""Factor on the cost below which an order counts as better: sums in another order are rounded differently."""
_NEIGHBOUR_WEIGHT = 1e-4
"""Weight of the cost next to busy neighbours; so small that it only breaks ties."""


def improve_by_swaps(model: CostModel, order: NodeOrder, cells: Sequence[int], floor: float) -> NodeOrder:
    """Improve an order by local search; returns it unchanged if nothing better is found.

    cells: sizes of blocks of positions to exchange besides single nodes. floor: seconds that no order can be faster
    than; a search that reaches them stops. The random numbers have a fixed seed.
    """
    random, best = np.random.default_rng(0), order
    seconds = float(_score_orders(model, best[None])[0])
    vain_rounds = 0
    for _ in range(_MAX_COSTED_NODES // (_SWAPS_PER_ROUND * len(order))):
        # `seconds` includes the small share of busy neighbours, which the floor does not.
        if vain_rounds == _MAX_VAIN_ROUNDS or seconds * _IMPROVEMENT <= floor * (1 + _NEIGHBOUR_WEIGHT):
            break
        swapped = np.stack([_exchange_blocks(best, random, cells) for _ in range(_SWAPS_PER_ROUND)])
        scores = _score_orders(model, swapped)
        at = int(scores.argmin())
        if scores[at] < seconds * _IMPROVEMENT:
            best, seconds, vain_rounds = swapped[at], float(scores[at]), 0
        else:
            vain_rounds += 1
    return best


def _score_orders(model: CostModel, orders: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [orders]: seconds of a step with the full uplinks; those next to busy neighbours break ties."""
    sums = model.compute_sums(orders)
    return sums.seconds + _NEIGHBOUR_WEIGHT * sums.busy_seconds


def _exchange_blocks(order: NodeOrder, random: np.random.Generator, cells: Sequence[int]) -> NodeOrder:
    """Exchange two blocks of one size, drawn at random."""
    size = int(random.choice([1, *cells]))
    first, second = random.choice(len(order) // size, 2, replace=False) * size
    result = order.copy()
    result[first : first + size], result[second : second + size] = (
        order[second : second + size],
        order[first : first + size],
    )
    return result
