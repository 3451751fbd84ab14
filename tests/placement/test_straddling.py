"""Groups that lie in several groups of a level: how many, and what to ask the scheduler for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_fabrics import problems, tree_fabric
from plain_cost import group_ranks

from hpc_train.placement.cost.cost_model import build_cost_model
from hpc_train.placement.explanation import advise_allocation, count_least_straddling
from hpc_train.placement.mesh_groups import count_straddling, find_crossable_groups, find_node_grid, format_axes
from hpc_train.placement.search import search_placement
from hpc_train.traffic.axes import Flow

DATA = Flow(("dp_shard",), "all_reduce", 6e9, 1, "gradients")


@settings(max_examples=150)
@given(problems(most=12), st.randoms(use_true_random=False))
def test_every_group_that_straddles_is_counted(problem, random):
    fabric, sizes, flows = problem
    count = len(fabric.nodes)
    order = np.array(random.sample(range(count), count))
    table = count_straddling(fabric, build_cost_model(fabric, sizes, flows, count).groups, np.arange(count), order)
    expected = {}
    for axes in {flow.axes for flow in flows}:
        for level in fabric.levels[1:]:
            most = np.bincount(level.group).max()
            positions = [{rank // fabric.ranks_per_node for rank in ranks} for ranks in group_ranks(sizes, axes)]
            fitting = [it for it in positions if 1 < len(it) <= most]
            if fitting:
                ways = [
                    sum(len({level.group[way[at]] for at in it}) > 1 for it in fitting) for way in (range(count), order)
                ]
                counts = {"groups": len(fitting), "identity": ways[0], "placed": ways[1]}
                expected.setdefault(format_axes(axes), {})[level.name] = counts
    assert table == expected


@settings(max_examples=100)
@given(problems(most=10), st.randoms(use_true_random=False))
def test_no_order_has_fewer_straddling_groups_than_the_least(problem, random):
    fabric, sizes, flows = problem
    count = len(fabric.nodes)
    orders = np.array([random.sample(range(count), count) for _ in range(30)])
    for it in find_crossable_groups(fabric, build_cost_model(fabric, sizes, flows, count).groups):
        assert it.count_straddling_by_order(fabric, orders).min() >= count_least_straddling(fabric, it)


def test_leaves_too_small_for_whole_groups_are_said_so():
    """Three leaves of three nodes hold no two whole pairs each; two leaves of five would."""
    fabric = tree_fabric([("a",)] * 3 + [("b",)] * 3 + [("c",)] * 4, tapers=(10.0,))
    sizes = {"pp": 5, "dp_shard": 2}
    found = search_placement(fabric, sizes, [DATA])
    assert found.straddling["dp_shard"]["leaf"]["placed"] == 1
    assert advise_allocation(fabric, sizes, [DATA], found) == (
        "1 of 5 dp_shard groups (2 nodes each) lie in several leaves: no permutation can fix it (in any order of these "
        "nodes at least 1 do); ask for nodes in whole multiples of 2 a leaf (--nodelist), or for a smaller dp_shard",
    )


def test_fewer_leaves_are_asked_for_where_they_would_do():
    fabric = tree_fabric([("a",)] * 4 + [("b",)] * 3 + [("c",)], tapers=(10.0,))
    sizes = {"pp": 2, "dp_shard": 4}
    (line,) = advise_allocation(fabric, sizes, [DATA], search_placement(fabric, sizes, [DATA]))
    assert line.endswith("ask for --switches=2, or for a smaller dp_shard")


def test_nothing_is_advised_where_nothing_straddles_or_nothing_is_slower():
    sizes = {"pp": 2, "dp_shard": 4}
    for fabric in (tree_fabric([(i % 2,) for i in range(8)], tapers=(4.0,)), tree_fabric([(i % 3,) for i in range(8)])):
        assert advise_allocation(fabric, sizes, [DATA], search_placement(fabric, sizes, [DATA])) == ()


@pytest.mark.parametrize(
    ("sizes", "ranks_per_node", "grid"),
    [
        ({"pp": 16, "dp_shard": 128, "tp": 8}, 8, (16, 128)),
        ({"dp_shard": 4, "tp": 8}, 4, (4, 2)),
        ({"dp_shard": 6, "tp": 4}, 8, (3,)),
        ({"dp_shard": 2, "cp": 3, "tp": 4}, 8, (3,)),
        ({"pp": 2, "dp_shard": 9, "tp": 4}, 6, (12,)),
        ({"tp": 8}, 8, ()),
    ],
    ids=["whole axes", "an axis cut in two", "another", "the edge inside two axes", "no whole block", "one node"],
)
def test_what_of_the_mesh_lies_between_nodes(sizes, ranks_per_node, grid):
    assert find_node_grid(sizes, ranks_per_node) == grid
