"""The cost model: against a plain one, message by message; against rings played step by step; and by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_fabrics import GB, fabrics, flow_lists, meshes, problems, tree_fabric
from plain_cost import plain_cost

from hpc_train.errors import UserError
from hpc_train.placement.cost.collective_messages import DOMAIN_LEVEL
from hpc_train.placement.cost.cost_model import build_cost_model, estimate_cost
from hpc_train.placement.fabric import Fabric, FabricLevel
from hpc_train.traffic.axes import Flow

TWO_LEAVES = [("a",)] * 2 + [("b",)] * 2


@settings(max_examples=200)
@given(problems(), st.randoms(use_true_random=False), st.sampled_from(["nccl", "gloo"]))
def test_the_cost_is_that_of_every_message_counted(problem, random, backend):
    fabric, sizes, flows = problem
    order = random.sample(range(len(fabric.nodes)), len(fabric.nodes))
    found = estimate_cost(fabric, sizes, flows, order, backend)
    assert found.total == pytest.approx(plain_cost(fabric, sizes, flows, order, backend), rel=1e-9)
    assert found.total == pytest.approx(sum(found.per_axis.values()))


@settings(max_examples=50)
@given(problems(), st.randoms(use_true_random=False))
def test_many_orders_at_once_cost_what_each_costs(problem, random):
    fabric, sizes, flows = problem
    count = len(fabric.nodes)
    orders = np.array([random.sample(range(count), count) for _ in range(5)])
    together = build_cost_model(fabric, sizes, flows, count).compute_seconds(orders)
    assert together == pytest.approx([estimate_cost(fabric, sizes, flows, order.tolist()).total for order in orders])


def played(latency, seconds_per_chunk, steps):
    """When the last rank of a ring has everything: a message waits for the last one on its edge and in its chain."""
    n = len(latency)
    has, edge_free = [0.0] * n, [0.0] * n
    for _ in range(steps):
        arrives = [0.0] * n
        for sender in range(n):
            sent = max(has[sender], edge_free[sender])
            edge_free[sender] = sent + seconds_per_chunk[sender]
            arrives[(sender + 1) % n] = edge_free[sender] + latency[sender]
        has = arrives
    return max(has)


def both_ways(order, size):
    """(predicted, played): seconds of an all-reduce of 8 nodes on two leaves; crossing edges share the uplink."""
    fabric = tree_fabric([("a",)] * 4 + [("b",)] * 4, tapers=(40.0,), latencies=(5e-5, 5e-3))
    leaf = fabric.levels[1]
    crosses = [leaf.group[order[i]] != leaf.group[order[(i + 1) % 8]] for i in range(8)]
    share = leaf.uplink[0] / (sum(crosses) / 2)
    chunk = [size / 8 / (share if it else GB) for it in crosses]
    latency = [leaf.latency if it else fabric.levels[0].latency for it in crosses]
    flow = [Flow(("dp_replicate",), "all_reduce", size, 1, "gradients")]
    return estimate_cost(fabric, {"dp_replicate": 8}, flow, order).total, played(latency, chunk, 14)


ORDERS = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 4, 5, 2, 3, 6, 7]]


@pytest.mark.parametrize("size", [1e3, 1e9])
@pytest.mark.parametrize("order", ORDERS)
def test_a_ring_that_is_played_step_by_step_takes_as_long(order, size):
    """Small messages: what counts is latency; large ones: bandwidth."""
    predicted, seconds = both_ways(order, size)
    assert predicted == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("order", ORDERS)
def test_where_latency_and_bandwidth_weigh_the_same_their_sum_is_the_most_it_can_be(order):
    """A slow edge sends its next chunk while the last one is under way; the model adds the two."""
    predicted, seconds = both_ways(order, 1e6)
    assert seconds * 0.999 <= predicted <= 1.5 * seconds


def test_two_leaves_by_hand():
    """100 Mbit/s out of a leaf, 1 GB/s out of a node; 4 MB over four ranks: 6 MB on every edge."""
    slow = 100e6 / 8
    fabric = tree_fabric(TWO_LEAVES, nic=GB, tapers=(2 * GB / slow,))
    flow = [Flow(("dp_replicate",), "all_reduce", 4e6, 1, "gradients")]
    assert estimate_cost(fabric, {"dp_replicate": 4}, flow, [0, 1, 2, 3]).total == pytest.approx(6e6 / slow)
    assert estimate_cost(fabric, {"dp_replicate": 4}, flow, [0, 2, 1, 3]).total == pytest.approx(2 * 6e6 / slow)
    inside = estimate_cost(fabric, {"pp": 2, "dp_replicate": 2}, flow, [0, 1, 2, 3]).total
    assert inside == pytest.approx(4e6 / GB)
    assert estimate_cost(fabric, {"pp": 2, "dp_replicate": 2}, flow, [0, 2, 1, 3]).total == pytest.approx(
        2 * 4e6 / slow
    )


def test_each_way_of_a_link_counts_by_itself():
    fabric = tree_fabric(TWO_LEAVES, tapers=(10.0,))
    chain = [Flow(("pp",), "send_recv", GB, 1, "activations", ring=False)]
    ring = [Flow(("pp",), "send_recv", GB, 1, "keys", ring=True)]
    assert (
        estimate_cost(fabric, {"pp": 4}, chain).total
        == pytest.approx(estimate_cost(fabric, {"pp": 4}, ring).total)
        == pytest.approx(5)
    )
    there_and_back = estimate_cost(fabric, {"pp": 4}, chain, [0, 2, 1, 3]).total
    assert there_and_back == pytest.approx(10), "two messages one way, one the other"


def test_axes_of_one_group_are_one_ring_and_have_one_name():
    fabric = tree_fabric(TWO_LEAVES)
    together = estimate_cost(fabric, {"dp_shard": 2, "cp": 2}, [Flow(("cp", "dp_shard"), "all_gather", GB, 1, "p")])
    alone = estimate_cost(fabric, {"dp_shard": 4}, [Flow(("dp_shard",), "all_gather", GB, 1, "p")])
    assert together.per_axis == {"dp_shard+cp": pytest.approx(0.75)}
    assert together.total == alone.total


def test_an_axis_of_degree_one_moves_nothing():
    fabric = tree_fabric(TWO_LEAVES)
    found = estimate_cost(fabric, {"pp": 4}, [Flow(("tp",), "all_reduce", GB, 1, "activations")])
    assert (found.total, found.per_axis) == (0, {"tp": 0})


def test_over_gloo_a_reduce_scatter_is_an_all_reduce():
    fabric, sizes = tree_fabric(TWO_LEAVES), {"dp_shard": 4}
    scatter, reduce = (Flow(("dp_shard",), name, GB, 1, "g") for name in ("reduce_scatter", "all_reduce"))
    assert estimate_cost(fabric, sizes, [scatter], backend="gloo") == estimate_cost(
        fabric, sizes, [reduce], backend="gloo"
    )
    assert estimate_cost(fabric, sizes, [scatter]).total == estimate_cost(fabric, sizes, [reduce]).total / 2


def test_over_gloo_a_reduce_scatter_inside_one_node_is_an_exchange_of_parts():
    fabric = tree_fabric([("a",)] * 2, ranks_per_node=4, nic=GB, inside=2 * GB)
    sizes = {"dp_replicate": 2, "dp_shard": 4}
    scatter, exchange, reduce = (
        estimate_cost(fabric, sizes, [Flow(("dp_shard",), name, GB, 1, "g")], backend="gloo").total
        for name in ("reduce_scatter", "all_to_all", "all_reduce")
    )
    assert (scatter, scatter) == (exchange, reduce / 2)
    over_nodes = {
        estimate_cost(fabric, sizes, [Flow(("dp_replicate", "dp_shard"), name, GB, 1, "g")], backend="gloo").total
        for name in ("reduce_scatter", "all_reduce")
    }
    assert len(over_nodes) == 1


def test_ranks_of_a_node_share_its_uplink_and_not_each_others_links():
    fabric = tree_fabric([("a",)] * 2, ranks_per_node=4, nic=GB, inside=2 * GB)
    flows = [Flow(("dp_shard",), "send_recv", GB, 1, "x"), Flow(("tp",), "send_recv", GB, 1, "y")]
    assert estimate_cost(fabric, {"dp_shard": 2, "tp": 4}, flows).per_axis == {"dp_shard": 4.0, "tp": 0.5}


@settings(max_examples=100)
@given(problems(), st.randoms(use_true_random=False), st.floats(1.0, 10.0))
def test_more_bandwidth_never_costs_more(problem, random, factor):
    fabric, sizes, flows = problem
    order = random.sample(range(len(fabric.nodes)), len(fabric.nodes))
    number, before = random.randrange(len(fabric.levels)), estimate_cost(fabric, sizes, flows, order).total
    level = fabric.levels[number]
    uplink = level.uplink.copy()
    uplink[random.randrange(len(uplink))] *= factor
    levels = list(fabric.levels)
    levels[number] = FabricLevel(level.name, level.group, uplink, level.latency)
    wider = Fabric(fabric.nodes, fabric.ranks_per_node, fabric.inside_bandwidth, fabric.inside_latency, tuple(levels))
    assert estimate_cost(wider, sizes, flows, order).total <= before * (1 + 1e-12)


@settings(max_examples=50)
@given(st.data())
def test_link_bytes_are_what_the_busiest_link_carries(data):
    """Of one flow without latencies, the largest bytes over uplink is the cost.

    NVLink domains are taken for switches: a domain has no link of its own, but each of its nodes an equal share.
    """
    fabric = data.draw(fabrics(least=2))
    names = {DOMAIN_LEVEL: "switch"}
    quiet = tuple(FabricLevel(names.get(it.name, it.name), it.group, it.uplink, 0.0) for it in fabric.levels)
    fabric = Fabric(fabric.nodes, 1, math.inf, 0.0, quiet)
    sizes, flows = data.draw(meshes(len(fabric.nodes))), data.draw(flow_lists())[:1]
    built = build_cost_model(fabric, sizes, flows, len(fabric.nodes))
    order = list(range(len(fabric.nodes)))[::-1]
    carried = built.compute_link_bytes(order)
    longest = max((carried[level.name] / level.uplink).max() for level in fabric.levels)
    assert longest == pytest.approx(built.compute_cost(order).total)


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"dp_shard": 3}, "dp_shard 3 x cp 1 x tp 1 = 3 ranks, but 4 nodes x 1 ranks per node are 4"),
        ({"xp": 4}, "xp: not a mesh axis"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(sizes, line):
    with pytest.raises(UserError, match=line) as error:
        estimate_cost(tree_fabric(TWO_LEAVES), sizes, [])
    assert "\n" not in str(error.value)
