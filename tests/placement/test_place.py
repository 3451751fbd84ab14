"""The search: the best order of all on small jobs, never worse than the launcher's on any, and honest about it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_fabrics import GB, fabrics, flow_lists, meshes, problems, reordered, tree_fabric

from hpc_train.placement.cost.cost_model import build_cost_model, estimate_cost
from hpc_train.placement.fabric import Fabric, find_tapered_levels
from hpc_train.placement.mesh_groups import find_crossable_groups
from hpc_train.placement.node_orders import (
    find_nearest_order,
    list_order_classes,
    order_along_tree,
    order_largest_first,
    pack_cells,
)
from hpc_train.placement.search import MIN_GAIN, compute_lower_bound, search_placement
from hpc_train.traffic.axes import Flow

DATA = Flow(("dp_shard",), "all_reduce", 6e9, 1, "gradients")
PIPE = Flow(("pp",), "send_recv", 1e9, 1, "activations", ring=False)


def all_orders(count):
    return np.array(list(itertools.permutations(range(count))), np.int64)


def straddle(fabric, problem, orders):
    parts = [it.count_straddling_by_order(fabric, orders) for it in find_crossable_groups(fabric, problem.groups)]
    return sum(parts, np.zeros(len(orders), np.int64))


def check_optimal(fabric, sizes, flows):
    """Against every order of the nodes, by what `place` promises."""
    found = search_placement(fabric, sizes, flows)
    orders = all_orders(len(fabric.nodes))
    problem = build_cost_model(fabric, sizes, flows, len(fabric.nodes))
    sums, straddles = problem.compute_sums(orders), straddle(fabric, problem, orders)
    seconds, beside, crossed = sums.seconds, sums.busy_seconds, sums.crossings
    moved = (orders != orders[0]).sum(axis=1)
    allowed = np.ones(len(orders), bool)
    columns = [seconds, beside, crossed, straddles, moved]
    if seconds.min() >= seconds[0] * (1 - MIN_GAIN):
        allowed = (seconds <= seconds[0] * (1 + 1e-9)) & (beside <= beside[0] * (1 + 1e-9))
        columns = columns[1:]
        if beside[allowed].min() >= beside[0] * (1 - MIN_GAIN):
            allowed &= crossed <= crossed[0] * (1 + 1e-9)
            fewer = find_tapered_levels(fabric) and crossed[allowed].min() < crossed[0] * (1 - MIN_GAIN)
            fewer = fewer or straddles[allowed].min() < straddles[0]
            columns = [straddles, crossed, seconds, moved] if fewer else [moved]
    for column in columns:
        allowed &= column <= column[allowed].min() * (1 + 1e-9)
    assert found.nodes in {tuple(order) for order in orders[allowed].tolist()}
    assert found.placed.total == pytest.approx(estimate_cost(fabric, sizes, flows, found.nodes).total)


@settings(max_examples=120)
@given(problems(most=6))
def test_up_to_six_nodes_no_order_is_better(problem):
    check_optimal(*problem)


@settings(max_examples=8)
@given(problems(least=7, most=8))
def test_of_seven_and_eight_nodes_no_order_is_better(problem):
    check_optimal(*problem)


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ((4, 4), {"pp": 2, "dp_shard": 4}),
        ((3, 3, 2), {"pp": 4, "dp_shard": 2}),
        ((1, 3, 4), {"pp": 2, "dp_shard": 4}),
        ((2, 5, 1), {"dp_shard": 8}),
    ],
)
def test_of_eight_nodes_on_uneven_leaves_no_order_is_better(counts, sizes):
    places = [(leaf, leaf // 2) for leaf, count in enumerate(counts) for _ in range(count)]
    scattered = [places[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    check_optimal(tree_fabric(scattered, tapers=(2.0, 3.5)), sizes, [DATA, PIPE])


def likeness(fabric, order):
    """Which positions share a group of each level, and the uplinks of their groups: all that a cost can depend on."""
    return tuple(
        (
            tuple(level.group[a] == level.group[b] for a in order for b in order),
            tuple(level.uplink[level.group[order]]),
            tuple(level.busy_uplink[level.group[order]]),
        )
        for level in fabric.levels
    )


@settings(max_examples=60)
@given(fabrics(most=5))
def test_of_orders_that_are_alike_one_is_tried_and_the_nearest_is_taken(fabric):
    alike = {}
    for order in itertools.permutations(range(len(fabric.nodes))):
        alike.setdefault(likeness(fabric, list(order)), []).append(order)
    tried = [likeness(fabric, order) for order in list_order_classes(fabric).tolist()]
    assert len(tried) == len(set(tried))
    assert set(tried) == set(alike)
    for orders in alike.values():
        found = tuple(find_nearest_order(fabric, orders[-1]).tolist())
        assert found in orders
        in_place = [sum(at == node for at, node in enumerate(order)) for order in (*orders, found)]
        assert in_place[-1] == max(in_place)


@settings(max_examples=60)
@given(st.data())
def test_larger_jobs_never_get_worse_and_move_whole_nodes_once(data):
    fabric = data.draw(fabrics(least=9, most=24))
    sizes = data.draw(meshes(len(fabric.nodes) * fabric.ranks_per_node))
    flows = data.draw(flow_lists())
    found = search_placement(fabric, sizes, flows)
    assert found.placed.total <= found.identity.total * (1 + 1e-9)
    assert found.identity.total == pytest.approx(estimate_cost(fabric, sizes, flows).total)
    assert found.placed.total == pytest.approx(estimate_cost(fabric, sizes, flows, found.nodes).total)
    assert found.placed.total >= compute_lower_bound(build_cost_model(fabric, sizes, flows, len(fabric.nodes))) * (
        1 - 1e-9
    )
    slots = found.rank_to_slot
    assert sorted(slots) == list(range(len(slots)))
    size = fabric.ranks_per_node
    assert all(slot % size == rank % size for rank, slot in enumerate(slots)), "a local rank keeps its place"
    assert len({tuple(slot // size for slot in slots[i : i + size]) for i in range(0, len(slots), size)}) == len(
        found.nodes
    )


@settings(max_examples=40)
@given(problems(most=24))
def test_names_do_not_matter_and_the_answer_is_the_same_twice(problem):
    fabric, sizes, flows = problem
    renamed = Fabric(
        tuple(f"{len(name)}-{name[::-1]}" for name in fabric.nodes),
        fabric.ranks_per_node,
        fabric.inside_bandwidth,
        fabric.inside_latency,
        fabric.levels,
    )
    first, second, third = (
        search_placement(fabric, sizes, flows),
        search_placement(fabric, sizes, flows),
        search_placement(renamed, sizes, flows),
    )
    assert first.nodes == second.nodes == third.nodes
    assert first.reason == third.reason


@settings(max_examples=25)
@given(problems(most=7), st.randoms(use_true_random=False))
def test_the_launchers_order_does_not_change_what_can_be_had(problem, random):
    """Unless it was good enough to be kept."""
    fabric, sizes, flows = problem
    other = reordered(fabric, random.sample(range(len(fabric.nodes)), len(fabric.nodes)))
    first, second = (
        search_placement(fabric, sizes, flows).placed.total,
        search_placement(other, sizes, flows).placed.total,
    )
    assert first == pytest.approx(second, rel=1.02 * MIN_GAIN)


def test_a_wider_uplink_never_makes_the_placed_step_slower():
    places = [(i % 3, i % 3 // 2) for i in range(8)]
    sizes = {"pp": 2, "dp_shard": 4}
    placed = [
        search_placement(tree_fabric(places, tapers=(over, 1.5)), sizes, [DATA, PIPE]).placed.total
        for over in (8, 4, 2, 1)
    ]
    assert placed == sorted(placed, reverse=True)


def test_ranks_that_alternate_between_leaves_are_brought_together():
    fabric = tree_fabric([(i % 2,) for i in range(8)], ranks_per_node=2, tapers=(80.0,))
    found = search_placement(fabric, {"pp": 2, "dp_shard": 4, "tp": 2}, [DATA])
    leaf = fabric.levels[1].group
    assert {tuple(leaf[list(found.nodes[i : i + 4])]) for i in (0, 4)} == {(0, 0, 0, 0), (1, 1, 1, 1)}
    assert found.reason.startswith("communication of a step 1,440 s -> 18 s, 80.00x faster")
    assert found.straddling == {"dp_shard": {"leaf": {"groups": 4, "identity": 4, "placed": 0}}}
    assert sum(a == b for a, b in enumerate(found.nodes)) == 4, "half of the nodes can stay where they are"


def test_a_larger_job_is_as_good_as_its_floor():
    """64 nodes of 8 leaves, dealt out in turn: the pipeline crosses the leaves, the rings do not."""
    fabric = tree_fabric([(i % 8, i % 8 // 4) for i in range(64)], ranks_per_node=4, tapers=(4.0, 2.0))
    sizes, flows = {"pp": 8, "dp_shard": 8, "tp": 4}, [DATA, Flow(("tp",), "all_reduce", 1e9, 4, "activations")]
    found = search_placement(fabric, sizes, flows)
    assert found.placed.total == pytest.approx(compute_lower_bound(build_cost_model(fabric, sizes, flows, 64)))


@pytest.mark.parametrize(
    ("fabric", "flows", "why"),
    [
        (tree_fabric([("a",)]), [], "one node"),
        (tree_fabric([("a",)] * 4, names=()), [DATA], "all 4 nodes are on one switch"),
        (tree_fabric([(i % 2,) for i in range(4)]), [DATA], "no level of the fabric is oversubscribed"),
        (tree_fabric([(i % 2,) for i in range(4)], tapers=(4.0,)), [], "the axes of this mesh move nothing"),
        (
            tree_fabric([(i // 2,) for i in range(4)], tapers=(4.0,)),
            [DATA],
            "the launcher's order follows the topology",
        ),
    ],
)
def test_no_gain_is_said_and_nothing_moves(fabric, flows, why):
    found = search_placement(fabric, {"dp_shard": len(fabric.nodes)}, flows)
    assert found.nodes == tuple(range(len(fabric.nodes)))
    assert found.identity == found.placed
    assert found.reason.startswith("no gain expected: ")
    assert why in found.reason


def test_a_mesh_whose_inner_block_does_not_fit_a_node_still_moves_whole_nodes():
    """tp 4 on nodes of 6 ranks: every other group lies on two nodes."""
    fabric = tree_fabric([(i % 2,) for i in range(10)], ranks_per_node=6, tapers=(50.0,), inside=10 * GB)
    found = search_placement(fabric, {"dp_shard": 15, "tp": 4}, [Flow(("tp",), "all_reduce", GB, 1, "a")])
    assert found.placed.total < found.identity.total / 2
    assert sorted(found.nodes) == list(range(10))


@settings(max_examples=100)
@given(fabrics(most=30), st.integers(1, 12))
def test_every_order_holds_each_node_once(fabric, unit):
    everything = list(range(len(fabric.nodes)))
    for order in (order_along_tree(fabric), order_largest_first(fabric), pack_cells(fabric, unit)):
        assert sorted(order.tolist()) == everything


@settings(max_examples=100)
@given(fabrics(most=40), st.integers(2, 8))
def test_packing_makes_every_whole_cell_that_there_is(fabric, unit):
    group = fabric.levels[1].group
    cells = pack_cells(fabric, unit)[: len(group) // unit * unit].reshape(-1, unit)
    whole = sum(len(set(group[cell].tolist())) == 1 for cell in cells)
    assert whole == sum(np.bincount(group) // unit)


@settings(max_examples=100)
@given(fabrics(most=40))
def test_along_the_tree_no_group_is_left_and_entered_again(fabric):
    for order in (order_along_tree(fabric), order_largest_first(fabric)):
        for level in fabric.levels:
            assert len(list(itertools.groupby(level.group[order].tolist()))) == len(level.uplink)


def test_the_order_along_the_tree_of_a_sorted_launcher_is_its_own():
    fabric = tree_fabric([(0, 0)] * 2 + [(1, 0)] * 3 + [(2, 1)] * 4)
    assert order_along_tree(fabric).tolist() == list(range(9))
    assert order_largest_first(fabric).tolist() == [2, 3, 4, 0, 1, 5, 6, 7, 8]


def test_no_latency_and_no_bandwidth_is_lost_when_all_is_inside_one_node():
    fabric = tree_fabric([("a",)], ranks_per_node=8, inside=GB, inside_latency=1e-6)
    found = search_placement(fabric, {"tp": 8}, [Flow(("tp",), "all_gather", GB, 1, "p")])
    assert found.placed.total == pytest.approx(7e-6 + 7 / 8)
    assert math.isfinite(found.seconds)
