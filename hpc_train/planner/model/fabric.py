"""Use the real switches: tapers for the closed form, and the estimate of a run placed on given nodes.

cluster.topology (a file with every switch) is used where it is given, else the sizes in cluster.fabric.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from hpc_train.cluster.switch_tree import UnitUplink
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.placement.collective_messages import Backend
from hpc_train.placement.cost import estimate_cost
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.fabric_from_config import (
    FabricFigures,
    build_located_fabric,
    collect_figures,
    count_ranks_per_node,
)
from hpc_train.placement.node_locations import JobHost, NodeLocations, locate_hosts
from hpc_train.placement.search import search_placement
from hpc_train.planner.model.step_time import Estimate
from hpc_train.traffic.flows import compute_flows


@dataclass(frozen=True)
class Switches:
    """The switches of one level."""

    nodes: float
    """Under one switch (all that is below a pod, for a group); infinite where nothing leaves it."""
    oversubscription: float
    """What the nodes can send, over what leaves the switch."""


def switch_sizes(cluster: ClusterConfig, figures: FabricFigures) -> tuple[Switches, Switches]:
    """Leaves and groups, as a job meets them whose nodes fill them up one after the other.

    Raises UserError for a topology that cannot be read or tells of no switch.
    """
    fabric = cluster.fabric
    leaf, group = fabric.nodes_per_leaf or math.inf, fabric.nodes_per_group or math.inf
    if cluster.topology:
        paths = switch_paths(cluster).values()
        leaf, group = _median_nodes(path[-1:] for path in paths), _median_nodes(path[:-1][-1:] for path in paths)
    leaves = Switches(leaf, _reached(figures, "leaf", leaf, fabric.oversubscription))
    return leaves, Switches(group, _reached(figures, "group", group, fabric.group_oversubscription))


def _reached(figures: FabricFigures, level: str, nodes: float, stated: float | None) -> float:
    """Return the taper from measured bandwidths, else the stated one; 1 if neither is known."""
    node, above = (figures.measured.get_level(name) if figures.measured else None for name in ("node", level))
    if above is None or not math.isfinite(nodes):
        return stated or 1.0
    return max(1.0, nodes * (node.bandwidth if node else figures.nic_uplink) / above.bandwidth)


def switch_paths(cluster: ClusterConfig) -> Mapping[str, Sequence[str]]:
    """Node -> its switches, top to leaf, in cluster.topology, in the file's order; empty without one.

    Raises UserError for a topology that cannot be read or tells of no switch.
    """
    if not cluster.topology:
        return {}
    path = Path(cluster.topology).expanduser()
    written = path.stat().st_mtime_ns if path.exists() else 0
    return _paths(path, written, cluster.node.nics, cluster.node.nic_gbit_s)


@cache
def _paths(path: Path, _: int, nics: int, nic_gbit_s: float) -> Mapping[str, Sequence[str]]:
    """Return the switch paths of a file's compute nodes; the file's modification time keeps cached answers apart."""
    from hpc_train.cluster.switch_tree import find_compute_nodes, find_paths
    from hpc_train.placement.node_locations import read_switch_file

    topology = read_switch_file(path)
    compute = find_compute_nodes(topology, nics, nic_gbit_s)
    return {node: found for node, found in find_paths(topology, compute).items() if node in compute}


def _median_nodes(switches: Iterable[Hashable]) -> float:
    """Nodes under the middle one of several switches; infinite where one holds all, or none is known."""
    counts = Counter(name for name in switches if name)
    return float(statistics.median_low(list(counts.values()))) if len(counts) > 1 else math.inf


_PARTS = {"tp": "tensor", "cp": "context", "pp": "pipeline"}
"""Axis -> part of the step; whatever goes over other axes, or over several, is of `data`."""


def estimate_placed(config: RunConfig, ranks: int, found: Estimate) -> Estimate:
    """The estimate of one job on the first nodes of cluster.topology; as it is without one, and where it has too few.

    Raises UserError for a topology that cannot be read or tells of no switch.
    """
    nodes = first_nodes(config, ranks)
    if not nodes:
        return found
    factors = _time_factors(config, ranks, nodes)
    spent = replace(found.time, **{name: getattr(found.time, name) * factor for name, factor in factors.items()})
    faster = found.time.step / spent.step
    rates = {name: getattr(found, name) * faster for name in ("mfu", "hfu", "tokens_per_second")}
    return replace(found, time=spent, **rates)


def first_nodes(config: RunConfig, ranks: int) -> tuple[str, ...]:
    """The first nodes of cluster.topology, as many as the ranks need; none without one, or if it has too few."""
    paths = switch_paths(config.cluster)
    count = math.ceil(ranks / count_ranks_per_node(config))
    return tuple(paths)[:count] if len(paths) >= count else ()


def _time_factors(config: RunConfig, ranks: int, nodes: Sequence[str]) -> dict[str, float]:
    """Part of the step -> its time over that on switches that are alike."""
    sizes, moved = asdict(resolve_degrees(config.parallel, ranks)), compute_flows(config, ranks)
    backend: Backend = "nccl" if config.cluster.node.gpus else "gloo"
    where = locate_hosts(config.cluster, [JobHost(name) for name in nodes], in_slurm=False)
    real, alike = _fabric(config, where), _fabric(config, _uniform_switches(config, nodes))
    if not moved:
        return {}
    before = _seconds_by_part(estimate_cost(alike, sizes, moved, backend=backend).per_axis)
    after = _seconds_by_part(search_placement(real, sizes, moved, backend).placed.per_axis)
    return {name: after[name] / seconds for name, seconds in before.items() if seconds}


def _fabric(config: RunConfig, where: NodeLocations) -> Fabric:
    """NVLink domains are filled in the order of the nodes, as the closed form has them."""
    within = config.cluster.node.nvlink_domain_gpus // max(config.cluster.node.gpus, 1)
    domains = {node: f"domain{at // within}" for at, node in enumerate(where.nodes)} if within > 1 else {}
    return build_located_fabric(config, replace(where, domains=domains), count_ranks_per_node(config))


def _uniform_switches(config: RunConfig, nodes: Sequence[str]) -> NodeLocations:
    """Switches of the sizes that the closed form knows."""
    leaf, group = switch_sizes(config.cluster, collect_figures(config.cluster))
    levels = (("group", group), ("leaf", leaf))
    sizes = [(name, switches.nodes) for name, switches in levels if math.isfinite(switches.nodes)]
    paths = {node: tuple(f"{name}{int(at // size)}" for name, size in sizes) for at, node in enumerate(nodes)}
    uplinks = {
        path[:end]: UnitUplink(int(size)) for path in paths.values() for end, (_, size) in enumerate(sizes, start=1)
    }
    return NodeLocations(tuple(nodes), paths, uplinks=uplinks)


def _seconds_by_part(per_axis: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for axes, seconds in per_axis.items():
        part = _PARTS.get(axes, "data")
        found[part] = found.get(part, 0.0) + seconds
    return found
