"""Search the order of nodes in which a step's communication is cheapest.

`search_placement` works on one fabric; `place_nodes` takes a job with the locations of its nodes. `topology place` and
the job call the same function, and so get the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.run import RunConfig
from hpc_train.placement.cost.collective_phases import Backend
from hpc_train.placement.cost.cost_model import CostModel, build_cost_model
from hpc_train.placement.explanation import explain_placement
from hpc_train.placement.fabric import Fabric, FabricLevel, find_tapered_levels, is_uniform
from hpc_train.placement.fabric_from_config import build_located_fabric, find_unknown_tapers, list_capacity_notes
from hpc_train.placement.mesh_groups import count_straddling, find_crossable_groups, find_node_grid
from hpc_train.placement.node_locations import NodeLocations
from hpc_train.placement.node_orders import (
    MAX_SWAPPED_NODES,
    NodeOrder,
    find_nearest_order,
    improve_by_swaps,
    list_cell_sizes,
    list_nestings,
    list_order_classes,
    order_along_tree,
    order_largest_first,
    pack_cells,
)
from hpc_train.placement.placement_result import FAIR_SHARE, NO_NEIGHBOURS, CostCase, Placement
from hpc_train.traffic.axes import Flow
from hpc_train.traffic.flows import compute_flows, list_axis_sizes

MAX_EXACT_NODES = 8
"""Maximum number of nodes for which every order is tried."""
MIN_GAIN = 0.01
"""Minimum gain of communication time; below it the launcher's order stays, as the constants are no more precise."""
_TOLERANCE = 1e-9
"""Relative difference that counts as equal: floating-point sums of the same seconds in another order."""
_MAX_ORDERED_NODES = 1 << 18
"""Orders times nodes above which only the best nestings are tried in cells, to bound the time."""
_MAX_NESTINGS = 6
"""Nestings that are then tried in cells."""


def search_placement(
    fabric: Fabric, sizes: Mapping[str, int], flows: Sequence[Flow], backend: Backend = "nccl"
) -> Placement:
    """Find the best order of the fabric's nodes for a mesh and the traffic of its axes.

    sizes: mesh axis -> degree; their product is the world size. Raises UserError if they do not fill the nodes. Same
    input, same answer.

    Up to 8 nodes every order is tried: the answer has the fewest seconds per step, then seconds next to busy
    neighbours, then bytes x levels crossed, then groups that straddle a level, then nodes moved. For more nodes it is
    the best of the launcher's order, orders along the tree and orders packed in whole cells, each with every nesting of
    the axes, and, up to 256 nodes, swaps of nodes and cells.

    If that gains less than 1 % of the seconds, with and without neighbours, uplinks may still be busier than either
    assumption: then the order with the fewest straddling groups, then crossings, is taken, if it has fewer than the
    launcher's and nothing gets worse (crossings count on tapered fabrics only). Else the launcher's order stays.
    """
    start = time.perf_counter()
    problem = build_cost_model(fabric, sizes, flows, len(fabric.nodes), backend)
    identity = np.arange(len(fabric.nodes))
    chosen = identity
    if problem.terms and not is_uniform(fabric):
        chosen = _choose_order(problem, _list_candidates(problem, find_node_grid(sizes, fabric.ranks_per_node)))
    before, after = problem.compute_cost(identity.tolist()), problem.compute_cost(chosen.tolist())
    table = count_straddling(fabric, problem.groups, identity, chosen)
    cases = compare_cases(problem, (identity.tolist(), chosen.tolist()))
    return Placement(
        nodes=tuple(chosen.tolist()),
        ranks_per_node=fabric.ranks_per_node,
        identity=before,
        placed=after,
        straddling=table,
        seconds=time.perf_counter() - start,
        reason=explain_placement(fabric, cases, table, bool((chosen == identity).all()), MIN_GAIN),
        cases=cases,
    )


def compare_cases(
    problem: CostModel, orders: Sequence[Sequence[int]], taper: float | None = None
) -> tuple[CostCase, ...]:
    """Compare the launcher's order with the placed one, alone and, if nodes have neighbours, next to busy ones."""
    sums = problem.compute_sums(np.asarray(orders, np.int64))
    cases = [CostCase(taper, NO_NEIGHBOURS, *sums.seconds.tolist())]
    if any(level.share is not None for level in problem.fabric.levels):
        cases.append(CostCase(taper, FAIR_SHARE, *sums.busy_seconds.tolist()))
    return tuple(cases)


def compute_lower_bound(problem: CostModel) -> float:
    """Compute seconds that no order can undercut.

    Only links inside nodes and the nodes' own uplinks count, at the shortest latency.
    """
    fabric = problem.fabric
    node = fabric.levels[0]
    # A fabric with the node level only, all nodes with the best uplink: every order costs the same there.
    best_uplink = np.full_like(node.uplink, node.uplink.max())
    least_latency = min(level.latency for level in fabric.levels)
    fastest = replace(fabric, levels=(FabricLevel(node.name, node.group, best_uplink, least_latency),))
    alone = CostModel(fastest, problem.groups, problem.patterns, problem.terms, problem.labels)
    return float(alone.compute_seconds(np.arange(len(fabric.nodes))[None])[0])


def _list_candidates(problem: CostModel, grid: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the orders to compare, [orders, positions], the launcher's first."""
    fabric = problem.fabric
    identity = np.arange(len(fabric.nodes))[None]
    if len(fabric.nodes) <= MAX_EXACT_NODES:
        return np.concatenate([identity, list_order_classes(fabric)])
    orders = np.concatenate([identity, _list_nested_orders(problem, grid)])
    if len(fabric.nodes) <= MAX_SWAPPED_NODES and find_tapered_levels(fabric):
        best = orders[int(problem.compute_seconds(orders).argmin())]
        cells = list_cell_sizes(grid, tuple(range(len(grid))))
        # Swaps start from the best constructed order; the lower bound ends them as soon as nothing can be gained.
        orders = np.concatenate([orders, improve_by_swaps(problem, best, cells, compute_lower_bound(problem))[None]])
    return orders


def _list_nested_orders(problem: CostModel, grid: tuple[int, ...]) -> NDArray[np.int64]:
    """Return [orders, positions]: orders along the tree and in whole cells, with every nesting of the axes.

    Of a large job with many axes only the best nestings along the tree are tried in cells too.
    """
    fabric = problem.fabric
    tree = np.stack([order_along_tree(fabric), order_largest_first(fabric)])
    nests = list(list_nestings(grid))
    along_tree = np.concatenate([tree[:, along] for _, along in nests])
    # Up to 5! nestings of many nodes would take minutes. How well a nesting does along the tree is a good forecast of
    # how it does in cells.
    if along_tree.size > _MAX_ORDERED_NODES:
        seconds = problem.compute_seconds(along_tree).reshape(len(nests), -1).min(axis=1)
        nests = [nests[at] for at in np.sort(np.argsort(seconds, kind="stable")[:_MAX_NESTINGS])]
        along_tree = np.concatenate([tree[:, along] for _, along in nests])
    packed = {
        size: pack_cells(fabric, size) for size in {size for nest, _ in nests for size in list_cell_sizes(grid, nest)}
    }
    in_cells = [packed[size][along][None] for nest, along in nests for size in list_cell_sizes(grid, nest)]
    return np.concatenate([along_tree, *in_cells])


def _choose_order(problem: CostModel, orders: NDArray[np.int64]) -> NodeOrder:
    """Choose among the candidates, of which the first is the launcher's, by the rule of `search_placement`."""
    sums = problem.compute_sums(orders)
    seconds, busy_seconds, crossings = sums.seconds, sums.busy_seconds, sums.crossings
    # 1. A step gets faster even if all neighbours are silent: take the fastest, then the best beside neighbours.
    if seconds.min() < seconds[0] * (1 - MIN_GAIN):
        best = _select_least(busy_seconds, _select_least(seconds, np.arange(len(orders))))
        return _select_fewest_crossings(problem, orders, _select_least(crossings, best))
    # 2. It gets faster only beside busy neighbours, and no slower without them.
    no_worse = np.flatnonzero(_is_at_most(seconds, seconds[0]) & _is_at_most(busy_seconds, busy_seconds[0]))
    if busy_seconds[no_worse].min() < busy_seconds[0] * (1 - MIN_GAIN):
        return _select_fewest_crossings(
            problem, orders, _select_least(crossings, _select_least(busy_seconds, no_worse))
        )
    # 3. No modelled gain: still prefer fewer straddling groups, then crossings, if nothing gets worse.
    no_worse = no_worse[_is_at_most(crossings[no_worse], crossings[0])]
    straddle = _count_all_straddling(problem, orders[no_worse])
    fewer_crossings = find_tapered_levels(problem.fabric) and crossings[no_worse].min() < crossings[0] * (1 - MIN_GAIN)
    if straddle.min() == straddle[0] and not fewer_crossings:  # the launcher's order is no worse than itself
        return np.array(orders[0])
    best = no_worse[straddle == straddle.min()]
    return _select_least_moved(problem.fabric, orders[_select_least(seconds, _select_least(crossings, best))])


def _select_fewest_crossings(problem: CostModel, orders: NDArray[np.int64], best: NDArray[np.int64]) -> NodeOrder:
    """Among equally good orders, return the one with the fewest straddling groups, then the fewest nodes moved."""
    best = best[_select_least(_count_all_straddling(problem, orders[best]), np.arange(len(best)))]
    return _select_least_moved(problem.fabric, orders[best])


def _is_at_most(values: NDArray[np.float64], limit: float) -> NDArray[np.bool_]:
    return np.asarray(values <= limit * (1 + _TOLERANCE))


def _select_least(values: NDArray[Any], index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those of the indices that have the least value."""
    return np.array(index[values[index] <= values[index].min() * (1 + _TOLERANCE)])


def _count_all_straddling(problem: CostModel, orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [orders]: groups that straddle a level's group that could hold them, at any level above the node."""
    counted = find_crossable_groups(problem.fabric, problem.groups)
    return sum(
        (groups.count_straddling_by_order(problem.fabric, orders) for groups in counted),
        np.zeros(len(orders), np.int64),
    )


def _select_least_moved(fabric: Fabric, orders: NDArray[np.int64]) -> NodeOrder:
    """Return the order with the fewest nodes moved, the first of equals."""
    if len(fabric.nodes) <= MAX_EXACT_NODES:
        orders = np.stack([find_nearest_order(fabric, order.tolist()) for order in orders])
    moved = np.count_nonzero(orders != np.arange(orders.shape[1]), axis=1)
    return np.array(orders[int(moved.argmin())])


ASSUMED_TAPER = 2.0
"""Taper assumed for unknown uplinks: the smallest that is built. Its gain is reported as conditional."""


@dataclass(frozen=True)
class PlacementJob:
    """A job to place, and the fabric to place it on."""

    fabric: Fabric
    """Fabric in which uplinks of unknown taper count as non-blocking."""
    sizes: dict[str, int]
    """Mesh axis -> degree."""
    flows: tuple[Flow, ...]
    backend: Backend
    tapered: Fabric | None
    """Fabric in which uplinks of unknown taper have ASSUMED_TAPER; None if all are known."""
    unknown: tuple[str, ...]
    """Levels whose taper is unknown."""
    notes: tuple[str, ...]


def make_placement_job(
    config: RunConfig, locations: NodeLocations, ranks_per_node: int, parameters: int | None = None
) -> PlacementJob:
    """Make the job to be placed.

    parameters: of a custom model, whose shape is not known here. Raises UserError for degrees that do not fit.
    """
    world = len(locations.nodes) * ranks_per_node
    unknown = find_unknown_tapers(config, locations)
    return PlacementJob(
        fabric=build_located_fabric(config, locations, ranks_per_node),
        sizes=list_axis_sizes(config, world),
        flows=tuple(compute_flows(config, world, parameters)),
        backend="nccl" if config.cluster.node.gpus else "gloo",
        tapered=build_located_fabric(config, locations, ranks_per_node, ASSUMED_TAPER) if unknown else None,
        unknown=unknown,
        notes=(*locations.notes, *list_capacity_notes(config, locations)),
    )


def place_nodes(job: PlacementJob) -> Placement:
    """Return the best order found for the job's nodes, and its gain under each assumption.

    If a taper is unknown, the order is the best one for ASSUMED_TAPER: it has the fewest crossings, and costs nothing
    if the fabric is non-blocking. The costs are then those of a non-blocking fabric, the lowest possible.
    """
    start = time.perf_counter()
    if job.tapered is None:
        return replace(search_placement(job.fabric, job.sizes, job.flows, job.backend), notes=job.notes)
    placement = search_placement(job.tapered, job.sizes, job.flows, job.backend)
    flat, narrow = (
        build_cost_model(fabric, job.sizes, job.flows, len(fabric.nodes), job.backend)
        for fabric in (job.fabric, job.tapered)
    )
    identity = tuple(range(len(placement.nodes)))
    before, after = flat.compute_cost(identity), flat.compute_cost(placement.nodes)
    # The order that is best on a tapered fabric may be slower on a non-blocking one (more hops): then place for that.
    if after.total > before.total * (1 + MIN_GAIN):
        placement = search_placement(job.fabric, job.sizes, job.flows, job.backend)
        after = flat.compute_cost(placement.nodes)
    orders = (identity, placement.nodes)
    cases = (*compare_cases(flat, orders, 1.0), *compare_cases(narrow, orders, ASSUMED_TAPER))
    unchanged = placement.nodes == identity
    return replace(
        placement,
        identity=before,
        placed=after,
        cases=cases,
        reason=explain_placement(job.tapered, cases, placement.straddling, unchanged, MIN_GAIN, job.unknown),
        notes=job.notes,
        seconds=time.perf_counter() - start,
    )
