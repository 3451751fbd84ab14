"""From the configuration, and what is known of an allocation, to the Fabric that ranks are placed on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from hpc_train.config.degrees import smallest_world
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.fabric import Fabric, Level
from hpc_train.placement.figures import Figures, figures_of
from hpc_train.placement.levels import NamedLevel, levels_of

LOCAL_RANKS = 2
"""Ranks of a machine of which nothing is described, as `launch=local` starts them without GPUs."""


def fabric_of(
    config: RunConfig,
    nodes: Sequence[str],
    ranks_per_node: int,
    paths: Mapping[str, Sequence[str]] | None = None,
    domains: Mapping[str, str] | None = None,
) -> Fabric:
    """The fabric of a job on `nodes` (launcher's order).

    paths: switches of a node, top to leaf, from Slurm or a topology file. domains: its NVLink domain, where that spans
    nodes. Levels, innermost first: node, domain, leaf, group, level3, ...; one that holds all nodes in one group is
    left out, for nothing leaves it. Uplinks: a node its NICs, or in a domain that spans nodes its GPUs' NVLink; a
    domain its nodes' NICs; a leaf its nodes' NICs over cluster.fabric.oversubscription; a group and what is above it
    over group_oversubscription. A level of cluster.calibration replaces both its uplink, of one group, and its latency.
    Raises UserError for a calibration that cannot be read.
    """
    named = levels_of(nodes, paths, domains)
    figures = figures_of(config.cluster)
    spans = any(level.name == "domain" for level in named)
    node, *above = named
    kept = [node, *(level for level in above if len(level.labels) > 1)]
    return Fabric(
        nodes=tuple(nodes),
        ranks_per_node=ranks_per_node,
        inside_bandwidth=figures.inside_bandwidth,
        inside_latency=figures.inside_latency,
        levels=tuple(_level(level, figures, number, spans) for number, level in enumerate(kept)),
    )


def synthetic(config: RunConfig) -> Fabric:
    """The fabric that cluster=<name> describes, for a job of its first nodes: node0001, node0002, ..."""
    nodes = described_nodes(node_count(config))
    return fabric_of(config, nodes, ranks_per_node(config), *described_places(config, nodes))


def described_nodes(count: int) -> tuple[str, ...]:
    """Names of the first nodes of a described cluster."""
    width = max(4, len(str(count)))
    return tuple(f"node{number:0{width}d}" for number in range(1, count + 1))


def described_places(config: RunConfig, nodes: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """(paths, domains) of nodes named as `described_nodes` names them, filled up in the order of their numbers.

    Raises UserError for a node of another name, and for two names of one node.
    """
    cluster, fabric = config.cluster, config.cluster.fabric
    group = ("group", fabric.nodes_per_group)
    leaf = ("leaf", fabric.nodes_per_leaf) if fabric.nodes_per_leaf else group
    sizes = [(name, size) for name, size in (group, leaf) if size]
    numbers = {node: _number(node, cluster.total_nodes) for node in nodes}
    if len(set(numbers.values())) < len(numbers):
        raise UserError(f"nodes {', '.join(_same(numbers))}: different names of the same node")
    paths = {node: tuple(f"{name}{at // size + 1}" for name, size in sizes) for node, at in numbers.items()}
    within = cluster.node.nvlink_domain_gpus // max(cluster.node.gpus, 1)
    return paths, {node: f"domain{at // within + 1}" for node, at in numbers.items()} if within > 1 else {}


def node_count(config: RunConfig) -> int:
    """Nodes of the run as it is described: cluster.nodes, or what launch.ranks or the degrees need."""
    if config.cluster.nodes:
        return config.cluster.nodes
    return math.ceil((config.launch.ranks or smallest_world(config.parallel)) / ranks_per_node(config))


def ranks_per_node(config: RunConfig) -> int:
    """The cluster's; of a machine of which nothing is described: all ranks of a local run."""
    cluster = config.cluster
    described = cluster.node.gpus or cluster.node.ranks or cluster.nodes or config.launch.kind != "local"
    if described:
        return min(cluster.ranks_per_node, config.launch.ranks or cluster.ranks_per_node)
    return config.launch.ranks or max(smallest_world(config.parallel), LOCAL_RANKS)


def _level(level: NamedLevel, figures: Figures, number: int, spans: bool) -> Level:
    sizes = np.bincount(level.group, minlength=len(level.labels)).astype(np.int64)
    uplink = figures.uplink(level.name, sizes, spans)
    return Level(level.name, level.group, uplink, figures.latency(level.name, number, spans))


def _number(node: str, total: int) -> int:
    """Index of a described node, from 0."""
    digits = node.removeprefix("node")
    if not (digits.isascii() and digits.isdecimal() and digits != node and len(digits) <= 9 and int(digits) > 0):
        raise UserError(
            f"node {node}: nothing says where it is; give cluster.topology=FILE, or nodes of the described cluster, "
            f"such as node[0001-0008]"
        )
    if total and int(digits) > total:
        raise UserError(f"node {node}: the described cluster has {total} nodes")
    return int(digits) - 1


def _same(numbers: Mapping[str, int]) -> list[str]:
    """The names of the first node that has several."""
    counts = Counter(numbers.values())
    return [node for node, number in numbers.items() if number == next(it for it in counts if counts[it] > 1)]
