"""Messages that take one NIC: their time is that of a maximum concurrent flow over NICs, rail leaves and spines."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from concurrent_flow import Ends, solve_concurrent_flow

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.placement.cost.cost_model import build_cost_model
from hpc_train.placement.cost.dragonfly import bound_routing
from hpc_train.placement.described_cluster import locate_described_cluster, name_described_nodes
from hpc_train.placement.fabric import Fabric, FabricLevel
from hpc_train.placement.fabric_from_config import build_located_fabric
from hpc_train.placement.node_locations import NodeLocations
from hpc_train.traffic.axes import Collective, Flow

SPINES = 2


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


def make_dragonfly(config: RunConfig, nodes: int) -> Fabric:
    """Return nodes dealt to the first groups of a described dragonfly, without latencies."""
    names = name_described_nodes(nodes)
    located = build_located_fabric(config, locate_described_cluster(config, names), 1)
    return replace(located, inside_latency=0.0, levels=tuple(replace(level, latency=0.0) for level in located.levels))


@pytest.mark.parametrize("what", ["all_gather", "all_to_all", "send_recv"])
@pytest.mark.parametrize("seed", range(2))
def test_a_dragonfly_lies_between_its_bounds(what: Collective, seed: int) -> None:
    """The best routing is no faster than `ideal`; with direct cables only it takes `minimal`."""
    config = compose(
        [
            *("cluster=slurm", "cluster.node.ranks=1", "cluster.node.nics=1", "cluster.node.nic_gbit_s=8"),
            *("cluster.fabric.topology=dragonfly", "cluster.fabric.nodes_per_group=2", "cluster.total_nodes=10"),
            *("cluster.fabric.oversubscription=1", "cluster.fabric.group_oversubscription=4"),
        ]
    )
    fabric = make_dragonfly(config, 6)
    model = build_cost_model(fabric, {"dp_replicate": 6}, [Flow(("dp_replicate",), what, 1e9, 1, "data")], 6)
    order = np.random.default_rng(seed).permutation(6).tolist()
    bounds = bound_routing(config.cluster, model, order)
    assert bounds is not None
    assert bounds.groups == 5
    group = fabric.levels[-1].group[order]
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b] if what == "all_to_all" else around(6)
    size = {"all_gather": 5 / 6, "all_to_all": 1 / 6, "send_recv": 1.0}[what]
    demands: dict[Ends, float] = defaultdict(float)
    for a, b in pairs:
        if group[a] != group[b]:
            demands[int(group[a]), int(group[b])] += size
    cables = {(a, b): float(fabric.levels[-1].uplink[0]) / 1e9 / 4 for a in range(5) for b in range(5) if a != b}
    best = solve_concurrent_flow(demands, cables)
    assert bounds.ideal <= best * (1 + 1e-9)
    assert best <= min(bounds.valiant, bounds.minimal) * (1 + 1e-9)
    direct = max(demand / cables[ends] for ends, demand in demands.items())
    assert bounds.minimal == pytest.approx(direct)
    assert bounds.minimal > bounds.ideal


def around(count: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % count) for rank in range(count)]


def test_routing_is_said_of_dragonflies_that_a_job_leaves_a_group_of(capsys: pytest.CaptureFixture[str]) -> None:
    from hpc_train.cli.main import main

    words = ["topology", "place", "model=llama_1b", "parallel=hsdp", "train.global_batch=4096", "--json"]
    words += ["cluster=frontier", "parallel.dp_replicate=2", "parallel.dp_shard=-1"]
    assert main([*words, "cluster.nodes=256"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["routing"]["groups"] == 77
    assert shown["routing"]["ideal"] == pytest.approx(shown["cost"]["placed"])
    assert shown["routing"]["minimal"] > 1.05 * shown["routing"]["ideal"]
    assert any("Valiant" in note for note in shown["notes"])
    assert main([*words, "cluster.nodes=128"]) == 0
    assert "routing" not in json.loads(capsys.readouterr().out)


_FLOWS = (("pp", "send_recv"), ("dp_replicate", "all_gather"))


def test_one_message_has_one_nic_and_a_ring_has_all() -> None:
    config = compose(["cluster=dgx_h100", "cluster.nodes=4"])
    fabric = build_located_fabric(config, NodeLocations(("a", "b", "c", "d")), 8)
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
