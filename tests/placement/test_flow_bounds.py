"""The seconds that placement counts, held against a linear program over the cables themselves.

The program knows nothing of units and levels: it may send each message over any cables, in any parts, and finds the
least seconds. Where a fabric is built evenly both must agree; where it is not, placement may only count too little, as
no routing can do better than all cables of a unit together. Fabrics are written as ibnetdiscover writes them and read
back, so the whole way from cables to seconds is checked.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from concurrent_flow import Ends, solve_concurrent_flow
from plain_cost import group_ranks, phases

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.placement.cost.cost_model import CostModel, build_cost_model
from hpc_train.placement.described_cluster import locate_described_cluster, name_described_nodes
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.fabric_from_config import build_located_fabric
from hpc_train.placement.node_locations import JobHost, locate_hosts
from hpc_train.placement.search import compute_lower_bound, search_placement
from hpc_train.traffic.axes import Collective, Flow

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from fake_fabric import FakeDevice, FakeFabric

RATES = {"4xHDR": 25.0, "4xEDR": 12.5}
"""GB/s of a cable."""
NICS = {"nics": 2, "rate": "4xHDR"}
FLOWS: tuple[tuple[dict[str, int], tuple[str, ...], Collective], ...] = (
    ({"dp_shard": 4}, ("dp_shard",), "all_gather"),
    ({"dp_shard": 4}, ("dp_shard",), "all_to_all"),
    ({"dp_replicate": 2, "dp_shard": 2}, ("dp_shard",), "all_reduce"),
    ({"dp_replicate": 2, "dp_shard": 2}, ("dp_replicate",), "reduce_scatter"),
)


@dataclass
class Cabled:
    """A fabric with its cables as links of a linear program."""

    fabric: FakeFabric = field(default_factory=FakeFabric)
    nics: int = 1

    def switch(self, name: str) -> FakeDevice:
        return self.fabric.switch(f"MF0;{name}:X/U1", 255)

    def cables(self, a: FakeDevice, b: FakeDevice, count: int) -> None:
        for _ in range(count):
            self.fabric.cable(a, b)

    def host(self, name: str, leaves: Sequence[FakeDevice]) -> None:
        for number, leaf in enumerate(leaves):
            self.fabric.cable(leaf, self.fabric.adapter(f"{name} mlx5_{number}"))

    def links(self) -> dict[Ends, float]:
        """GB/s between what sends and receives in hosts, which pass nothing on, and the switches."""
        found: dict[Ends, float] = defaultdict(float)
        for device in self.fabric.devices:
            for far, _, rate in device.cables.values():
                if device.letter == "H":
                    found[("out", device.name.split()[0]), far.id] += RATES[rate]
                elif far.letter == "H":
                    found[device.id, ("in", far.name.split()[0])] += RATES[rate]
                else:
                    found[device.id, far.id] += RATES[rate]
        return found

    def locate(self, hosts: Sequence[str], folder: Path) -> Fabric:
        """The job's fabric as placement reads it from the dump, without latencies."""
        file = folder / "dump"
        file.write_text(self.fabric.dump())
        words = ["cluster=slurm", "cluster.node.ranks=1", f"cluster.node.nics={self.nics}"]
        config = compose([*words, "cluster.node.nic_gbit_s=200", f"cluster.topology={file}"])
        return without_latency(
            build_located_fabric(config, locate_hosts(config.cluster, [*map(JobHost, hosts)], False), 1)
        )


def without_latency(fabric: Fabric) -> Fabric:
    levels = tuple(replace(level, latency=0.0) for level in fabric.levels)
    return replace(fabric, inside_latency=0.0, inside_bandwidth=math.inf, levels=levels)


def model_of(fabric: Fabric, sizes: Mapping[str, int], axes: tuple[str, ...], what: Collective) -> CostModel:
    return build_cost_model(fabric, sizes, [Flow(axes, what, 1e9, 1, "data")], len(fabric.nodes))


def demands_of(
    fabric: Fabric, sizes: Mapping[str, int], axes: tuple[str, ...], what: Collective, order: Sequence[int]
) -> dict[tuple[str, str], float]:
    """GB that each node sends each other one, of all groups of the axes together."""
    demands: dict[tuple[str, str], float] = defaultdict(float)
    for group in group_ranks(sizes, axes):
        for _, messages in phases(Flow(axes, what, 1.0, 1, "data"), group, "nccl", inside=False):
            for a, b, size in messages:
                ends = (order[rank // fabric.ranks_per_node] for rank in (a, b))
                source, target = (fabric.nodes[node] for node in ends)
                if source != target:
                    demands[source, target] += size
    return demands


def least_seconds(links: Mapping[Ends, float], demands: Mapping[tuple[str, str], float]) -> float:
    return solve_concurrent_flow({(("out", a), ("in", b)): amount for (a, b), amount in demands.items()}, links)


def two_planes(cables: Sequence[Sequence[int]], hosts: int = 2) -> Cabled:
    """Hosts with a NIC on each of two planes that meet nowhere else. cables: [plane][unit], of a leaf to its spine."""
    cabled = Cabled(nics=2)
    planes = []
    for plane, counts in enumerate(cables):
        spine = cabled.switch(f"spine{plane}")
        leaves = [cabled.switch(f"leaf{plane}-{unit}") for unit in range(len(counts))]
        for leaf, count in zip(leaves, counts, strict=True):
            cabled.cables(leaf, spine, count)
        planes.append(leaves)
    for unit in range(len(cables[0])):
        for host in range(hosts):
            cabled.host(f"n{unit}-{host}", [leaves[unit] for leaves in planes])
    return cabled


def pods(up: Sequence[int], top: Sequence[int], even: bool = True) -> Cabled:
    """Two pods of two leaves of two hosts, two spines a pod, two cores. up, top: cables of a leaf, and of a spine."""
    cabled = Cabled()
    cores = [cabled.switch(f"core{number}") for number in range(2)]
    for pod in range(2):
        spines = [cabled.switch(f"spine{pod}-{number}") for number in range(2)]
        for spine, core in itertools.product(spines, cores):
            cabled.cables(spine, core, top[pod])
        for number in range(2):
            leaf = cabled.switch(f"leaf{pod}-{number}")
            for at, spine in enumerate(spines):
                cabled.cables(leaf, spine, up[pod] + (at if not even else 0))
            for host in range(2):
                cabled.host(f"n{pod}-{number}-{host}", [leaf])
    return cabled


@dataclass(frozen=True)
class Case:
    cabled: Cabled
    hosts: tuple[str, ...]
    even: bool


CASES = {
    "two planes": Case(two_planes([[1, 1], [1, 1]]), ("n0-0", "n1-0", "n0-1", "n1-1"), True),
    "two planes, three units": Case(two_planes([[1, 2, 3], [1, 2, 3]]), ("n0-0", "n1-0", "n2-0", "n1-1"), True),
    "two unlike planes": Case(two_planes([[1, 3], [3, 1]]), ("n0-0", "n1-0", "n0-1", "n1-1"), False),
    "tapered leaves": Case(pods((1, 1), (4, 4)), ("n0-0-0", "n1-0-0", "n0-0-1", "n1-1-0"), True),
    "tapered pods": Case(pods((2, 2), (1, 1)), ("n0-0-0", "n1-0-0", "n0-1-0", "n1-1-0"), True),
    "unlike pods": Case(pods((1, 2), (2, 1)), ("n0-0-0", "n0-0-1", "n1-0-0", "n1-0-1"), True),
    "unlike spines": Case(pods((1, 1), (1, 2), even=False), ("n0-0-0", "n1-0-0", "n0-0-1", "n1-1-0"), False),
}


@pytest.mark.parametrize("name", list(CASES))
def test_every_order_takes_what_the_cables_allow(name: str, tmp_path: Path) -> None:
    """All orders of four nodes: placement's seconds against the program's, and its choice against the best of all."""
    case = CASES[name]
    fabric, links = case.cabled.locate(case.hosts, tmp_path), case.cabled.links()
    for sizes, axes, what in FLOWS:
        model, best = model_of(fabric, sizes, axes, what), math.inf
        orders = list(itertools.permutations(range(4)))
        counted = model.compute_seconds(np.array(orders))
        solved: dict[tuple[tuple[tuple[str, str], float], ...], float] = {}
        for order, seconds in zip(orders, counted.tolist(), strict=True):
            demands = demands_of(fabric, sizes, axes, what, order)
            key = tuple(sorted(demands.items()))
            least = solved[key] = solved[key] if key in solved else least_seconds(links, demands)
            best = min(best, least)
            assert seconds <= least * (1 + 1e-6), (what, order)
            if case.even:
                assert seconds == pytest.approx(least), (what, order)
        assert compute_lower_bound(model) <= best * (1 + 1e-6)
        placed = search_placement(fabric, sizes, [Flow(axes, what, 1e9, 1, "data")]).nodes
        if case.even:
            assert solved[tuple(sorted(demands_of(fabric, sizes, axes, what, placed).items()))] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_random_planes_and_tapers_are_never_counted_slower_than_they_can_be(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    if seed % 2:
        cabled = two_planes(rng.integers(1, 4, (2, 3)).tolist(), hosts=int(rng.integers(1, 3)))
    else:
        cabled = pods(rng.integers(1, 4, 2).tolist(), rng.integers(1, 4, 2).tolist(), even=bool(rng.integers(2)))
    names = sorted({device.name.split()[0] for device in cabled.fabric.devices if device.letter == "H"})
    hosts = [str(name) for name in rng.permutation(names)[: 2 * (len(names) // 2)]]
    fabric, links = cabled.locate(hosts, tmp_path), cabled.links()
    count = len(hosts)
    for sizes, axes, what in (
        ({"dp_shard": count}, ("dp_shard",), "all_gather"),
        ({"dp_replicate": 2, "dp_shard": count // 2}, ("dp_shard",), "all_to_all"),
    ):
        model = model_of(fabric, sizes, axes, what)  # type: ignore[arg-type]
        order = rng.permutation(count).tolist()
        demands = demands_of(fabric, sizes, axes, what, order)  # type: ignore[arg-type]
        if demands:
            least = least_seconds(links, demands)
            assert compute_lower_bound(model) * (1 - 1e-6) <= model.compute_cost(order).total <= least * (1 + 1e-6)


def racks(nvlink: float, nic: float, taper: float) -> tuple[RunConfig, Fabric]:
    """Three NVLink domains of two nodes with two GPUs, each domain on a leaf of its own; GB/s of a GPU and of a NIC."""
    config = compose(
        [
            *("cluster=slurm", "cluster.node.gpus=2", "cluster.node.gpu_link=nvswitch", "cluster.node.nics=2"),
            *(f"cluster.node.gpu_link_gb_s={nvlink}", f"cluster.node.nic_gbit_s={8 * nic}"),
            *("cluster.node.nvlink_domain_gpus=4", "cluster.fabric.nodes_per_leaf=2", "cluster.total_nodes=6"),
            f"cluster.fabric.oversubscription={taper}",
        ]
    )
    names = name_described_nodes(6)
    return config, without_latency(build_located_fabric(config, locate_described_cluster(config, names), 2))


def rack_seconds(
    fabric: Fabric, demands: Mapping[tuple[str, str], float], nvlink: float, nic: float, taper: float
) -> float:
    """Least seconds: NVLink carries what stays in a domain, each node's own NICs what leaves it."""
    domain = {node: number // 2 for number, node in enumerate(name_described_nodes(6))}
    inside, outside = (
        {ends: size for ends, size in demands.items() if (domain[ends[0]] == domain[ends[1]]) is same}
        for same in (True, False)
    )
    switched: dict[Ends, float] = {}
    network: dict[Ends, float] = {}
    for node, rack in domain.items():
        switched["out", node], switched["in", node] = 0.0, 0.0
        for links, hub, rate in ((switched, "nvswitch", 2 * nvlink), (network, "leaf", 2 * nic)):
            links[("out", node), (hub, rack)] = links[(hub, rack), ("in", node)] = rate
        network[("leaf", rack), "spine"] = network["spine", ("leaf", rack)] = 4 * nic / taper
    switched = {ends: rate for ends, rate in switched.items() if rate}
    return max(least_seconds(links, part) if part else 0.0 for links, part in ((switched, inside), (network, outside)))


@pytest.mark.parametrize("taper", [1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_racks_of_nvl72_take_what_nvlink_and_their_nics_allow(seed: int, taper: float) -> None:
    """Rings and exchanges within racks, across them, and mixed; NVLink is 18 times as fast as the NICs of a GPU."""
    nvlink, nic = 900.0, 50.0
    _, fabric = racks(nvlink, nic, taper)
    assert [level.name for level in fabric.levels] == ["node", "domain", "leaf"]
    rng = np.random.default_rng(seed)
    for sizes, axes, what in (
        ({"dp_shard": 12}, ("dp_shard",), "all_gather"),
        ({"dp_replicate": 3, "dp_shard": 4}, ("dp_shard",), "all_to_all"),
        ({"dp_replicate": 6, "tp": 2}, ("dp_replicate",), "all_reduce"),
        ({"dp_replicate": 2, "dp_shard": 6}, ("dp_shard",), "all_to_all"),
    ):
        model = model_of(fabric, sizes, axes, what)  # type: ignore[arg-type]
        for order in (list(range(6)), rng.permutation(6).tolist()):
            demands = demands_of(fabric, sizes, axes, what, order)  # type: ignore[arg-type]
            least, counted = rack_seconds(fabric, demands, nvlink, nic, taper), model.compute_cost(order).total
            # What leaves a domain passes no NVLink, but the level of nodes counts all that leaves a node.
            leaving = max(sum(size for ends, size in demands.items() if ends[0] == node) for node in fabric.nodes)
            assert counted == pytest.approx(max(least, leaving / (2 * nvlink))), (what, order)
            assert compute_lower_bound(model) <= least * (1 + 1e-6) or least < leaving / (2 * nvlink)
