"""place: the order of nodes in which a step's communication is cheapest, or the launcher's where nothing is won."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.algorithm import Backend
from hpc_train.placement.cost import Model, model
from hpc_train.placement.exact import classes, nearest
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.mesh import node_grid
from hpc_train.placement.order import Order, cell_sizes, largest_first, nestings, pack, tree_order
from hpc_train.placement.reason import explain
from hpc_train.placement.result import FAIR_SHARE, NO_NEIGHBOURS, Case, Placement
from hpc_train.placement.straddling import crossable, straddling
from hpc_train.placement.swaps import MOST_NODES, improve
from hpc_train.placement.tree import tapered, uniform
from hpc_train.traffic.flow import Flow

MOST_EXACT = 8
"""Nodes up to which every order is tried."""
WORTH = 0.01
"""Gain of a step's communication below which the launcher's order stays: no constant is known better than that."""
_SAME = 1e-9
"""Relative: sums of the same seconds in another order."""
_NODES_ORDERED = 1 << 18
"""Orders times nodes above which not every nesting is tried in cells."""
_NESTS_KEPT = 6


def place(fabric: Fabric, sizes: Mapping[str, int], flows: Sequence[Flow], backend: Backend = "nccl") -> Placement:
    """The best order of the fabric's nodes for a mesh and what its axes move in a step.

    sizes: mesh axis -> degree; their product is the world size. Up to 8 nodes the order is the best there is, by
    seconds of a step, then seconds next to busy neighbours, then bytes x levels crossed, then groups that straddle a
    level, then nodes moved. Beyond, it is the best of: the launcher's order; along the tree; packed in whole cells;
    each with every nesting of the axes; and, up to 256 nodes, with nodes and cells exchanged. Where that wins less than
    1 % of the seconds, with and without neighbours, the order with the fewest straddling groups, then crossings, is
    taken if it has fewer than the launcher's and more of neither nor of seconds, because uplinks may be busier than
    either assumption has it (crossings count on tapered fabrics only); else the launcher's stays. Same input, same
    answer. Raises UserError where degrees do not fill the nodes.
    """
    start = time.perf_counter()
    problem = model(fabric, sizes, flows, len(fabric.nodes), backend)
    identity = np.arange(len(fabric.nodes))
    chosen = identity
    if problem.terms and not uniform(fabric):
        chosen = _choose(problem, _candidates(problem, node_grid(sizes, fabric.ranks_per_node)))
    before, after = problem.cost(identity.tolist()), problem.cost(chosen.tolist())
    table = straddling(fabric, problem.groups, identity, chosen)
    cases = cases_of(problem, (identity.tolist(), chosen.tolist()))
    return Placement(
        nodes=tuple(chosen.tolist()),
        ranks_per_node=fabric.ranks_per_node,
        identity=before,
        placed=after,
        straddling=table,
        seconds=time.perf_counter() - start,
        reason=explain(fabric, cases, table, bool((chosen == identity).all()), WORTH),
        cases=cases,
    )


def cases_of(problem: Model, orders: Sequence[Sequence[int]], taper: float | None = None) -> tuple[Case, ...]:
    """Compare the launcher's order with the placed one, alone and, if nodes have neighbours, next to busy ones."""
    sums = problem.sums(np.asarray(orders, np.int64))
    cases = [Case(taper, NO_NEIGHBOURS, *sums.seconds.tolist())]
    if any(level.share is not None for level in problem.fabric.levels):
        cases.append(Case(taper, FAIR_SHARE, *sums.beside.tolist()))
    return tuple(cases)


def floor_seconds(problem: Model) -> float:
    """Seconds that no order can undercut: links inside nodes, and nodes' own uplinks, with the shortest latency."""
    fabric = problem.fabric
    node = fabric.levels[0]
    fastest = Fabric(
        fabric.nodes,
        fabric.ranks_per_node,
        fabric.inside_bandwidth,
        fabric.inside_latency,
        (type(node)(node.name, node.group, np.full_like(node.uplink, node.uplink.max()), _least_latency(fabric)),),
    )
    alone = Model(fastest, problem.groups, problem.patterns, problem.terms, problem.labels)
    return float(alone.totals(np.arange(len(fabric.nodes))[None])[0])


def _least_latency(fabric: Fabric) -> float:
    return min(level.latency for level in fabric.levels)


def _candidates(problem: Model, grid: tuple[int, ...]) -> NDArray[np.int64]:
    """[orders, positions], the launcher's first."""
    fabric = problem.fabric
    identity = np.arange(len(fabric.nodes))[None]
    if len(fabric.nodes) <= MOST_EXACT:
        return np.concatenate([identity, classes(fabric)])
    found = np.concatenate([identity, _nested(problem, grid)])
    if len(fabric.nodes) <= MOST_NODES and tapered(fabric):
        best = found[int(problem.totals(found).argmin())]
        cells = cell_sizes(grid, tuple(range(len(grid))))
        found = np.concatenate([found, improve(problem, best, cells, floor_seconds(problem))[None]])
    return found


def _nested(problem: Model, grid: tuple[int, ...]) -> NDArray[np.int64]:
    """[orders, positions]: orders along the tree and in whole cells, with every nesting of the axes.

    Of a large job with many axes only the best nestings along the tree are tried in cells too.
    """
    fabric = problem.fabric
    tree = np.stack([tree_order(fabric), largest_first(fabric)])
    nests = list(nestings(grid))
    along_tree = np.concatenate([tree[:, along] for _, along in nests])
    if along_tree.size > _NODES_ORDERED:
        seconds = problem.totals(along_tree).reshape(len(nests), -1).min(axis=1)
        nests = [nests[at] for at in np.sort(np.argsort(seconds, kind="stable")[:_NESTS_KEPT])]
        along_tree = np.concatenate([tree[:, along] for _, along in nests])
    packed = {size: pack(fabric, size) for size in {size for nest, _ in nests for size in cell_sizes(grid, nest)}}
    in_cells = [packed[size][along][None] for nest, along in nests for size in cell_sizes(grid, nest)]
    return np.concatenate([along_tree, *in_cells])


def _choose(problem: Model, orders: NDArray[np.int64]) -> Order:
    """Of the candidates, the launcher's order first, by the rule that `place` states."""
    sums = problem.sums(orders)
    seconds, beside, crossings = sums.seconds, sums.beside, sums.crossings
    if seconds.min() < seconds[0] * (1 - WORTH):
        best = _least(beside, _least(seconds, np.arange(len(orders))))
        return _fewest_crossings(problem, orders, _least(crossings, best))
    no_worse = np.flatnonzero(_at_most(seconds, seconds[0]) & _at_most(beside, beside[0]))
    if beside[no_worse].min() < beside[0] * (1 - WORTH):
        return _fewest_crossings(problem, orders, _least(crossings, _least(beside, no_worse)))
    no_worse = no_worse[_at_most(crossings[no_worse], crossings[0])]
    straddle = _straddling(problem, orders[no_worse])
    fewer_crossings = tapered(problem.fabric) and crossings[no_worse].min() < crossings[0] * (1 - WORTH)
    if straddle.min() == straddle[0] and not fewer_crossings:  # the launcher's order is no worse than itself
        return np.array(orders[0])
    best = no_worse[straddle == straddle.min()]
    return _least_moved(problem.fabric, orders[_least(seconds, _least(crossings, best))])


def _fewest_crossings(problem: Model, orders: NDArray[np.int64], best: NDArray[np.int64]) -> Order:
    """Among equally good orders, return the one with the fewest straddling groups, then the fewest nodes moved."""
    best = best[_least(_straddling(problem, orders[best]), np.arange(len(best)))]
    return _least_moved(problem.fabric, orders[best])


def _at_most(values: NDArray[np.float64], limit: float) -> NDArray[np.bool_]:
    return np.asarray(values <= limit * (1 + _SAME))


def _least(values: NDArray[Any], index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of the indices, those with the least value."""
    return np.array(index[values[index] <= values[index].min() * (1 + _SAME)])


def _straddling(problem: Model, orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [orders]: groups that straddle a level's group that could hold them, at any level above the node."""
    counted = crossable(problem.fabric, problem.groups)
    return sum((it.straddle(problem.fabric, orders) for it in counted), np.zeros(len(orders), np.int64))


def _least_moved(fabric: Fabric, orders: NDArray[np.int64]) -> Order:
    """The order with the fewest nodes moved, the first of equals."""
    if len(fabric.nodes) <= MOST_EXACT:
        orders = np.stack([nearest(fabric, order.tolist()) for order in orders])
    moved = np.count_nonzero(orders != np.arange(orders.shape[1]), axis=1)
    return np.array(orders[int(moved.argmin())])
