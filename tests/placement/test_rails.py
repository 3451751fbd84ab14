"""Messages that take one NIC: their time is that of a maximum concurrent flow over NICs, rail leaves and spines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from scipy.optimize import linprog

from hpc_train.config.compose import compose
from hpc_train.placement.cost import build_cost_model
from hpc_train.placement.fabric import Fabric, FabricLevel
from hpc_train.placement.fabric_from_config import build_fabric
from hpc_train.traffic.axes import Flow

Ends = tuple[object, object]
SPINES = 2


def solve_concurrent_flow(demands: Mapping[Ends, float], capacity: Mapping[Ends, float]) -> float:
    """Return the seconds in which all demands can be moved at once, each over any paths of the directed links."""
    links, points = list(capacity), sorted({end for link in capacity for end in link}, key=repr)
    wanted = list(demands)
    # Variables: the flow of each demand on each link, then the share of all demands that moves in a second.
    count = len(wanted) * len(links)
    balance = np.zeros((len(wanted) * len(points), count + 1))
    room = np.zeros((len(links), count + 1))
    for number, (start, end) in enumerate(wanted):
        for at, (a, b) in enumerate(links):
            column = number * len(links) + at
            balance[number * len(points) + points.index(a), column] += 1
            balance[number * len(points) + points.index(b), column] -= 1
            room[at, column] = 1
        balance[number * len(points) + points.index(start), count] = -demands[start, end]
        balance[number * len(points) + points.index(end), count] = demands[start, end]
    goal = np.zeros(count + 1)
    goal[count] = -1
    limits = np.array([capacity[link] for link in links])
    found = linprog(goal, A_ub=room, b_ub=limits, A_eq=balance, b_eq=np.zeros(len(balance)), method="highs")
    assert found.status == 0, found.message
    return 1 / float(found.x[count])


def make_links(
    units: Sequence[int], rails: int, nic: float, uplinks: Sequence[float], own_leaves: bool
) -> dict[Ends, float]:
    """Return the links of nodes with one NIC a rail, leaves (of each rail, or one a unit) and spines."""
    links: dict[Ends, float] = {}
    for node, unit in enumerate(units):
        for rail in range(rails):
            leaf = ("leaf", unit, rail if own_leaves else 0)
            links[("out", node, rail), leaf] = links[leaf, ("in", node, rail)] = nic
    for leaf in {end for link in links for end in link if end[0] == "leaf"}:  # type: ignore[index]
        each = uplinks[leaf[1]] / (rails if own_leaves else 1) / SPINES  # type: ignore[index]
        for spine in range(SPINES):
            # Rails meet nowhere: each has spines of its own.
            top = ("spine", leaf[2] if own_leaves else 0, spine)  # type: ignore[index]
            links[leaf, top] = links[top, leaf] = each
    return links


@pytest.mark.parametrize("seed", range(6))
def test_a_pipeline_takes_the_time_of_a_maximum_flow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rails, nodes, own_leaves = 2, 4, bool(seed % 2)
    sizes = [{"pp": 8, "tp": 1}, {"pp": 2, "dp_replicate": 2, "tp": 2}, {"pp": 4, "dp_replicate": 2}][seed // 2]
    units = np.array([0, 0, 1, 1])
    nic, uplinks = 50.0, rng.choice([40.0, 100.0, 200.0], 2)
    levels = (
        FabricLevel("node", np.arange(nodes), np.full(nodes, rails * nic), 0.0, rails=rails),
        FabricLevel("leaf", units, uplinks, 0.0, rails=rails if own_leaves else 1),
    )
    fabric = Fabric(tuple("abcd"), 2, math.inf, 0.0, levels)
    model = build_cost_model(fabric, sizes, [Flow(("pp",), "send_recv", 1.0, 1, "activations", ring=False)], nodes)
    links = make_links(units.tolist(), rails, nic, uplinks.tolist(), own_leaves)
    stages, across = sizes["pp"], 8 // sizes["pp"]
    for _ in range(3):
        order = rng.permutation(nodes)
        demands: dict[Ends, float] = defaultdict(float)
        for rank in range((stages - 1) * across):
            source, target = rank // 2, (rank + across) // 2
            if source != target:
                rail = (rank + across) % 2
                demands[("out", order[source], rail), ("in", order[target], rail)] += 1.0
        expected = solve_concurrent_flow(demands, links)
        assert model.compute_cost(order.tolist()).total == pytest.approx(expected)


_FLOWS = (("pp", "send_recv"), ("dp_replicate", "all_gather"))


def test_one_message_has_one_nic_and_a_ring_has_all() -> None:
    config = compose(["cluster=dgx_h100", "cluster.nodes=4"])
    fabric = build_fabric(config, ("a", "b", "c", "d"), 8)
    send, ring = (Flow((axis,), what, 1e9, 1, "data", ring=False) for axis, what in _FLOWS)
    lone = build_cost_model(fabric, {"pp": 32}, [send], 4).compute_cost(range(4)).total
    wide = build_cost_model(fabric, {"pp": 4, "tp": 8}, [send], 4).compute_cost(range(4)).total
    # Eight messages over eight NICs take as long as one over one: 1 GB at 400 Gbit/s.
    assert lone == pytest.approx(wide)
    assert lone == pytest.approx(1 / 50, rel=0.01)
    whole = build_cost_model(fabric, {"dp_replicate": 32}, [ring], 4).compute_cost(range(4)).total
    assert whole < lone / 7
    gloo = build_cost_model(fabric, {"pp": 32}, [send], 4, "gloo").compute_cost(range(4)).total
    assert gloo < lone / 7
