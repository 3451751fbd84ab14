"""Answer from a cluster's description alone, without a job or a topology: how many nodes there are, and where they are.

The nodes of conf/cluster/<name>.yaml are node0001, node0002, ..., and fill its leaves and groups in this order.
build_described_cluster makes a Cluster of them, as if it had been read from a topology file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node, Switch
from hpc_train.cluster.switch_tree import UnitUplink
from hpc_train.config.cluster import ClusterConfig, NodeConfig
from hpc_train.config.parallel import compute_smallest_world
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.node_locations import NodeLocations

LOCAL_RANKS = 2
"""Ranks of a machine without a description: as many as `launch=local` starts without GPUs."""


def locate_described_cluster(config: RunConfig, nodes: Sequence[str]) -> NodeLocations:
    """Locate nodes of the described cluster, named as `name_described_nodes` names them."""
    fabric = config.cluster.fabric
    paths, domains = find_described_places(config, nodes)
    size = {"group": fabric.nodes_per_group, "leaf": fabric.nodes_per_leaf}
    uplinks = {
        path[:end]: UnitUplink(size[path[end - 1].rstrip("0123456789")])
        for path in set(paths.values())
        for end in range(1, len(path) + 1)
    }
    return NodeLocations(tuple(nodes), paths, domains, f"conf/cluster/{config.cluster.name}.yaml", uplinks)


def name_described_nodes(count: int) -> tuple[str, ...]:
    """Name the first nodes of a described cluster: node0001, node0002, ..."""
    width = max(4, len(str(count)))
    return tuple(f"node{number:0{width}d}" for number in range(1, count + 1))


def find_described_places(config: RunConfig, nodes: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return (paths, domains) of described nodes; leaves and groups are filled in the order of the nodes' numbers.

    Raises UserError for a node of another name, and for two names of one node.
    """
    cluster, fabric = config.cluster, config.cluster.fabric
    group = ("group", fabric.nodes_per_group)
    leaf = ("leaf", fabric.nodes_per_leaf) if fabric.nodes_per_leaf else group
    sizes = [(name, size) for name, size in (group, leaf) if size]
    numbers = {node: _parse_node_number(node, cluster.total_nodes) for node in nodes}
    if len(set(numbers.values())) < len(numbers):
        raise UserError(f"nodes {', '.join(_find_shared_names(numbers))}: different names of the same node")
    paths = {node: tuple(f"{name}{at // size + 1}" for name, size in sizes) for node, at in numbers.items()}
    within = cluster.node.nvlink_domain_gpus // max(cluster.node.gpus, 1)
    return paths, {node: f"domain{at // within + 1}" for node, at in numbers.items()} if within > 1 else {}


def count_nodes(config: RunConfig) -> int:
    """Count the nodes of the run: cluster.nodes, else as many as launch.ranks or the degrees need."""
    if config.cluster.nodes:
        return config.cluster.nodes
    return math.ceil((config.launch.ranks or compute_smallest_world(config.parallel)) / count_ranks_per_node(config))


def count_ranks_per_node(config: RunConfig) -> int:
    """Count the ranks of a node: the cluster's; on a machine that is not described, all ranks of a local run."""
    cluster = config.cluster
    described = cluster.node.gpus or cluster.node.ranks or cluster.nodes or config.launch.kind != "local"
    if described:
        return min(cluster.ranks_per_node, config.launch.ranks or cluster.ranks_per_node)
    return config.launch.ranks or max(compute_smallest_world(config.parallel), LOCAL_RANKS)


def _parse_node_number(node: str, total: int) -> int:
    """Return the index of a described node, from 0."""
    digits = node.removeprefix("node")
    if not (digits.isascii() and digits.isdecimal() and digits != node and len(digits) <= 9 and int(digits) > 0):
        raise UserError(
            f"node {node}: nothing says where it is; give cluster.topology=FILE, or nodes of the described cluster, "
            f"such as node[0001-0008]"
        )
    if total and int(digits) > total:
        raise UserError(f"node {node}: the described cluster has {total} nodes")
    return int(digits) - 1


def _find_shared_names(numbers: Mapping[str, int]) -> list[str]:
    """Return the names of the first node that has several."""
    counts = Counter(numbers.values())
    return [node for node, number in numbers.items() if number == next(count for count in counts if counts[count] > 1)]


_LINKS = {"nvlink": "NVLINK", "nvswitch": "NVLINK", "xgmi": "XGMI"}
"""Kind of a topology's link by node.gpu_link, without a number as in NV18: conf/cluster has no number of links."""
_LAYERS = {"infiniband": "infiniband", "slingshot": "slingshot", "ethernet": "ethernet", "roce": "ethernet"}
"""Link layer of a NIC by fabric.kind; RoCE is Ethernet to the NIC."""


def build_described_cluster(config: RunConfig) -> Cluster:
    """Build the first nodes of cluster=<name>, as many as the run takes.

    If cluster.nodes is unset, at least one whole group or leaf.
    """
    count = max(count_nodes(config), 0 if config.cluster.nodes else _get_largest_unit_size(config.cluster))
    names = name_described_nodes(count)
    paths, domains = find_described_places(config, names)
    hardware = config.cluster.node
    nodes = tuple(_make_node(name, config.cluster, domains.get(name)) for name in names)
    links = tuple(link for name in names for link in _make_links(name, hardware))
    return Cluster(kind=f"conf:{config.cluster.name}", nodes=nodes, links=links, switches=_make_switches(paths))


def _get_largest_unit_size(cluster: ClusterConfig) -> int:
    """Return the number of nodes of the largest unit whose size is known."""
    return cluster.fabric.nodes_per_group or cluster.fabric.nodes_per_leaf or 1


def _make_node(name: str, cluster: ClusterConfig, domain: str | None) -> Node:
    node, kind = cluster.node, cluster.fabric.kind
    layer = _LAYERS.get(kind)
    gpus = tuple(Gpu(f"GPU{number}", name=cluster.gpu.name, clique=domain) for number in range(node.gpus))
    rate = node.nic_gbit_s or None
    return Node(name, gpus, tuple(Nic(f"NIC{number}", gbit_s=rate, layer=layer) for number in range(node.nics)))


def _make_links(name: str, node: NodeConfig) -> list[Link]:
    kind = _LINKS.get(node.gpu_link)
    if kind is None:
        return []
    return [Link(name, f"GPU{a}", f"GPU{b}", kind) for a in range(node.gpus) for b in range(a + 1, node.gpus)]


def _make_switches(paths: dict[str, tuple[str, ...]]) -> tuple[Switch, ...]:
    """Make a leaf for each last name of a path, and a group for each name above one."""
    nodes: dict[str, list[str]] = {}
    leaves: dict[str, dict[str, None]] = {}
    for node, path in paths.items():
        if path:
            nodes.setdefault(path[-1], []).append(node)
        if len(path) > 1 and path[0] != path[-1]:
            leaves.setdefault(path[0], {})[path[-1]] = None
    groups = [Switch(name, 1, switches=tuple(below)) for name, below in leaves.items()]
    return (*(Switch(name, 0, nodes=tuple(names)) for name, names in nodes.items()), *groups)
