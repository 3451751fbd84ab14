"""Add the cluster's switches to the estimate: sizes and oversubscription of leaves and groups, and placed runs.

The closed forms of network.py assume that all switches of a level are alike. If cluster.topology names a file with
every switch, sizes come from there, and estimate_placed corrects an estimate for the real positions of its nodes.
Otherwise sizes come from cluster.fabric.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from hpc_train.cluster.switch_tree import UnitUplink
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.run import RunConfig
from hpc_train.placement.cost.collective_phases import Backend
from hpc_train.placement.cost.cost_model import estimate_cost
from hpc_train.placement.described_cluster import count_ranks_per_node
from hpc_train.placement.fabric import Fabric
from hpc_train.placement.fabric_from_config import FabricFigures, build_located_fabric, collect_figures
from hpc_train.placement.node_locations import JobHost, NodeLocations, locate_hosts
from hpc_train.placement.search import search_placement
from hpc_train.planner.model.step_time import Estimate
from hpc_train.traffic.flows import compute_flows, list_axis_sizes


@dataclass(frozen=True)
class Switches:
    """The switches of one level of the fabric, taken as all alike."""

    nodes: float
    """Nodes below one switch; infinite if no traffic ever leaves it."""
    oversubscription: float
    """Bandwidth of the nodes below a switch over the bandwidth of its uplinks."""


def switch_sizes(cluster: ClusterConfig, figures: FabricFigures) -> tuple[Switches, Switches]:
    """Return the leaves and the groups (pods, dragonfly groups) of a cluster.

    Raises UserError for a topology that cannot be read or has no switch.
    """
    fabric = cluster.fabric
    leaf, group = fabric.nodes_per_leaf or math.inf, fabric.nodes_per_group or math.inf
    if cluster.topology:
        paths = switch_paths(cluster).values()
        # A path goes from the top switch to the leaf, so path[-1] is the leaf and path[-2] its group.
        leaf, group = (
            _compute_median_nodes(path[-1:] for path in paths),
            _compute_median_nodes(path[:-1][-1:] for path in paths),
        )
    leaves = Switches(leaf, _compute_oversubscription(figures, "leaf", leaf, fabric.oversubscription))
    return leaves, Switches(group, _compute_oversubscription(figures, "group", group, fabric.group_oversubscription))


def _compute_oversubscription(figures: FabricFigures, level: str, nodes: float, stated: float | None) -> float:
    """Return the oversubscription of a level from measured bandwidths, else the stated one; 1 if neither is known."""
    node, above = (figures.measured.get_level(name) if figures.measured else None for name in ("node", level))
    if above is None or not math.isfinite(nodes):
        return stated or 1.0
    # `above` is the measured bandwidth that all nodes below one switch share when they send out of it.
    return max(1.0, nodes * (node.bandwidth if node else figures.nic_uplink) / above.bandwidth)


def switch_paths(cluster: ClusterConfig) -> Mapping[str, Sequence[str]]:
    """Return the switches above each node, from the top one to the leaf; empty without cluster.topology.

    Nodes are in the order of the file. Raises UserError for a topology that cannot be read or has no switch.
    """
    if not cluster.topology:
        return {}
    path = Path(cluster.topology).expanduser()
    written = path.stat().st_mtime_ns if path.exists() else 0
    return _read_paths(path, written, cluster.node.nics, cluster.node.nic_gbit_s)


@cache
def _read_paths(path: Path, _: int, nics: int, nic_gbit_s: float) -> Mapping[str, Sequence[str]]:
    """Return the switch paths of a file's compute nodes.

    The second argument is the file's modification time: it is part of the cache's key, so a changed file is read again.
    """
    from hpc_train.cluster.compute_nodes import find_compute_nodes
    from hpc_train.cluster.switch_tree import find_paths
    from hpc_train.placement.node_locations import read_switch_file

    topology = read_switch_file(path)
    compute = find_compute_nodes(topology, nics, nic_gbit_s)
    return {node: switches for node, switches in find_paths(topology, compute).items() if node in compute}


def _compute_median_nodes(switches: Iterable[Hashable]) -> float:
    """Return the median number of nodes per switch; infinite if one switch has all nodes, or none is known."""
    counts = Counter(name for name in switches if name)
    return float(statistics.median_low(list(counts.values()))) if len(counts) > 1 else math.inf


_PARTS = {"tp": "tensor", "cp": "context", "ep": "experts", "pp": "pipeline"}
"""Field of StepTime for the traffic of an axis; traffic over other axes, or over several, is `data`."""


def estimate_placed(config: RunConfig, ranks: int, estimate: Estimate) -> Estimate:
    """Correct the estimate of one job for the real switches of cluster.topology, taking its first nodes.

    Returns the estimate unchanged without a topology, or if that has too few nodes. Each communication part of the step
    is scaled by (cost of the best placement on the real switches) / (cost on switches that are all alike).
    Raises UserError for a topology that cannot be read or has no switch.
    """
    nodes = first_nodes(config, ranks)
    if not nodes:
        return estimate
    factors = _compute_time_factors(config, ranks, nodes)
    spent = replace(estimate.time, **{name: getattr(estimate.time, name) * factor for name, factor in factors.items()})
    faster = estimate.time.step / spent.step
    rates = {name: getattr(estimate, name) * faster for name in ("mfu", "hfu", "tokens_per_second")}
    return replace(estimate, time=spent, **rates)


def first_nodes(config: RunConfig, ranks: int) -> tuple[str, ...]:
    """Return the first nodes of cluster.topology, as many as the ranks need; none without one, or if it has too few."""
    paths = switch_paths(config.cluster)
    count = math.ceil(ranks / count_ranks_per_node(config))
    return tuple(paths)[:count] if len(paths) >= count else ()


def _compute_time_factors(config: RunConfig, ranks: int, nodes: Sequence[str]) -> dict[str, float]:
    """Return by how much the real switches slow down each part of the step, compared with switches that are alike."""
    sizes, moved = list_axis_sizes(config, ranks), compute_flows(config, ranks)
    backend: Backend = "nccl" if config.cluster.node.gpus else "gloo"
    where = locate_hosts(config.cluster, [JobHost(name) for name in nodes], in_slurm=False)
    real, uniform = _build_fabric(config, where), _build_fabric(config, _make_uniform_switches(config, nodes))
    if not moved:
        return {}
    before = _add_up_by_part(estimate_cost(uniform, sizes, moved, backend=backend).per_axis)
    after = _add_up_by_part(search_placement(real, sizes, moved, backend).placed.per_axis)
    return {name: after[name] / seconds for name, seconds in before.items() if seconds}


def _build_fabric(config: RunConfig, where: NodeLocations) -> Fabric:
    """Build the fabric of some nodes; NVLink domains are filled in the order of the nodes, as in the closed forms."""
    within = config.cluster.node.nvlink_domain_gpus // max(config.cluster.node.gpus, 1)
    domains = {node: f"domain{index // within}" for index, node in enumerate(where.nodes)} if within > 1 else {}
    return build_located_fabric(config, replace(where, domains=domains), count_ranks_per_node(config))


def _make_uniform_switches(config: RunConfig, nodes: Sequence[str]) -> NodeLocations:
    """Return locations on an idealised fabric, whose switches all have the sizes that the closed forms assume."""
    leaf, group = switch_sizes(config.cluster, collect_figures(config.cluster))
    levels = (("group", group), ("leaf", leaf))
    sizes = [(name, switches.nodes) for name, switches in levels if math.isfinite(switches.nodes)]
    paths = {node: tuple(f"{name}{int(index // size)}" for name, size in sizes) for index, node in enumerate(nodes)}
    uplinks = {
        path[:end]: UnitUplink(int(size)) for path in paths.values() for end, (_, size) in enumerate(sizes, start=1)
    }
    return NodeLocations(tuple(nodes), paths, uplinks=uplinks)


def _add_up_by_part(per_axis: Mapping[str, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for axes, seconds in per_axis.items():
        part = _PARTS.get(axes, "data")
        sums[part] = sums.get(part, 0.0) + seconds
    return sums
