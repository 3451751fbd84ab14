"""Choose the nodes to place ranks on: those of a Slurm job, of a list on a topology file, or of a described cluster.

build_described_cluster makes a Cluster of cluster=<name>, as if it had been read from a topology file.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node, Switch
from hpc_train.config.cluster import ClusterConfig, NodeConfig
from hpc_train.config.parallel import requested_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.fabric_from_config import (
    count_nodes,
    find_described_places,
    locate_described_cluster,
    name_described_nodes,
)
from hpc_train.placement.node_locations import (
    JobHost,
    NodeLocations,
    choose_compute_nodes,
    locate_hosts,
    read_switch_file,
)


def find_allocation(config: RunConfig, listed: str | None, env: Mapping[str, str]) -> NodeLocations:
    """Choose the nodes of a run and locate them, in the same way as a job does.

    listed: a host list, in its order (None: the job's nodes inside a Slurm job, else the first nodes of the
    description). Raises UserError for a list or a file that is wrong, and for a node that appears twice.
    """
    inside = listed is None and "SLURM_JOB_ID" in env
    nodes = list_job_nodes(env) if inside else None if listed is None else _expand_list("--nodes", listed)
    notes: tuple[str, ...] = ()
    if config.cluster.topology:
        if nodes is None:
            nodes, notes = _choose_from_file(config, Path(config.cluster.topology))
    elif not inside:
        return locate_described_cluster(config, nodes or name_described_nodes(count_nodes(config)))
    assert nodes is not None
    locations = locate_hosts(config.cluster, [JobHost(name) for name in nodes], inside)
    return replace(locations, notes=(*notes, *locations.notes))


def list_job_nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """List the nodes of the Slurm job around this process, in Slurm's order."""
    return _expand_list("SLURM_JOB_NODELIST", env.get("SLURM_JOB_NODELIST", ""))


def shuffle_nodes(nodes: NodeLocations, seed: int) -> NodeLocations:
    """Put the nodes into a random order, to see what a bad one costs."""
    order = list(nodes.nodes)
    random.Random(seed).shuffle(order)
    return replace(nodes, nodes=tuple(order), source=f"{nodes.source}, shuffled with seed {seed}")


def _expand_list(what: str, text: str) -> tuple[str, ...]:
    from hpc_train.cluster.hostlist import expand_hostlist

    nodes = tuple(expand_hostlist(text))
    if not nodes:
        raise UserError(f"{what}: no node in it; give names such as node[01-08],node12")
    if len(set(nodes)) != len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise UserError(f"{what}: {twice} is in it twice; a node holds its ranks once")
    return nodes


def _choose_from_file(config: RunConfig, file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the file's first compute nodes, as many as the run takes; a note on the other hosts)."""
    nodes, notes = choose_compute_nodes(config.cluster, read_switch_file(file))
    asked = config.cluster.nodes or config.launch.ranks or -1 not in requested_degrees(config.parallel).values()
    count = count_nodes(config) if asked else len(nodes)
    if count > len(nodes):
        rest = f"; {notes[0]}" if notes else ""
        raise UserError(f"{config.cluster.topology}: has {len(nodes)} nodes, and the run needs {count}{rest}")
    return nodes[:count], notes


_LINKS = {"nvlink": "NVLINK", "nvswitch": "NVLINK", "xgmi": "XGMI"}
"""The number of links of a pair is not in conf/cluster."""
_LAYERS = {"infiniband": "infiniband", "slingshot": "slingshot", "ethernet": "ethernet", "roce": "ethernet"}


def build_described_cluster(config: RunConfig) -> Cluster:
    """Build the first nodes of cluster=<name>, as many as the run takes.

    If cluster.nodes is unset, at least one whole group or leaf.
    """
    count = max(count_nodes(config), 0 if config.cluster.nodes else _largest_unit_size(config.cluster))
    names = name_described_nodes(count)
    paths, domains = find_described_places(config, names)
    hardware = config.cluster.node
    nodes = tuple(_make_node(name, config.cluster, domains.get(name)) for name in names)
    links = tuple(link for name in names for link in _make_links(name, hardware))
    return Cluster(kind=f"conf:{config.cluster.name}", nodes=nodes, links=links, switches=_make_switches(paths))


def _largest_unit_size(cluster: ClusterConfig) -> int:
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
