"""The cluster that cluster=<name> describes, as if a topology file had said it."""

from __future__ import annotations

from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node, Switch
from hpc_train.config.cluster import ClusterConfig, NodeConfig
from hpc_train.config.run import RunConfig
from hpc_train.placement.from_config import described_nodes, described_places, node_count

_LINKS = {"nvlink": "NVLINK", "nvswitch": "NVLINK", "xgmi": "XGMI"}
"""The number of links of a pair is not in conf/cluster."""
_LAYERS = {"infiniband": "infiniband", "slingshot": "slingshot", "ethernet": "ethernet", "roce": "ethernet"}


def described_cluster(config: RunConfig) -> Cluster:
    """Its first nodes: as many as the run asks for, at least one whole group or leaf unless cluster.nodes says less."""
    count = max(node_count(config), 0 if config.cluster.nodes else _unit(config.cluster))
    names = described_nodes(count)
    paths, domains = described_places(config, names)
    hardware = config.cluster.node
    nodes = tuple(_node(name, config.cluster, domains.get(name)) for name in names)
    links = tuple(link for name in names for link in _links(name, hardware))
    return Cluster(kind=f"conf:{config.cluster.name}", nodes=nodes, links=links, switches=_switches(paths))


def _unit(cluster: ClusterConfig) -> int:
    """Nodes of the largest part of the machine whose size is known."""
    return cluster.fabric.nodes_per_group or cluster.fabric.nodes_per_leaf or 1


def _node(name: str, cluster: ClusterConfig, domain: str | None) -> Node:
    node, kind = cluster.node, cluster.fabric.kind
    layer = _LAYERS.get(kind)
    gpus = tuple(Gpu(f"GPU{number}", name=cluster.gpu.name, clique=domain) for number in range(node.gpus))
    rate = node.nic_gbit_s or None
    return Node(name, gpus, tuple(Nic(f"NIC{number}", gbit_s=rate, layer=layer) for number in range(node.nics)))


def _links(name: str, node: NodeConfig) -> list[Link]:
    kind = _LINKS.get(node.gpu_link)
    if kind is None:
        return []
    return [Link(name, f"GPU{a}", f"GPU{b}", kind) for a in range(node.gpus) for b in range(a + 1, node.gpus)]


def _switches(paths: dict[str, tuple[str, ...]]) -> tuple[Switch, ...]:
    """A leaf for each last name of a path and a group for each name above it, with the same name once."""
    nodes: dict[str, list[str]] = {}
    leaves: dict[str, dict[str, None]] = {}
    for node, path in paths.items():
        if path:
            nodes.setdefault(path[-1], []).append(node)
        if len(path) > 1 and path[0] != path[-1]:
            leaves.setdefault(path[0], {})[path[-1]] = None
    groups = [Switch(name, 1, switches=tuple(below)) for name, below in leaves.items()]
    return (*(Switch(name, 0, nodes=tuple(held)) for name, held in nodes.items()), *groups)
