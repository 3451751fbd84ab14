"""How many nodes share a switch, and how much less than all of them send leaves it: from cluster.topology where it is
given, else from cluster.fabric."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpc_train.config.cluster import ClusterConfig
from hpc_train.placement.figures import Figures


@dataclass(frozen=True)
class Switches:
    """Of one level."""

    nodes: float
    """Under one switch (all that is below a pod, for a group); infinite where nothing leaves it."""
    oversubscription: float
    """What the nodes can send, over what leaves the switch."""


def switches_of(cluster: ClusterConfig, figures: Figures) -> tuple[Switches, Switches]:
    """Leaves and groups, as a job meets them whose nodes fill them up one after the other.

    Raises UserError for a topology that cannot be read or tells of no switch.
    """
    fabric = cluster.fabric
    leaf, group = fabric.nodes_per_leaf or math.inf, fabric.nodes_per_group or math.inf
    if cluster.topology:
        paths = paths_in(cluster).values()
        leaf, group = _size(it[-1:] for it in paths), _size(it[:-1][-1:] for it in paths)
    leaves = Switches(leaf, _reached(figures, "leaf", leaf, fabric.oversubscription))
    return leaves, Switches(group, _reached(figures, "group", group, fabric.group_oversubscription))


def _reached(figures: Figures, level: str, nodes: float, stated: float | None) -> float:
    """Return the taper from measured bandwidths, else the stated one; 1 if neither is known."""
    node, told = (figures.measured.of(name) if figures.measured else None for name in ("node", level))
    if told is None or not math.isfinite(nodes):
        return stated or 1.0
    return max(1.0, nodes * (node.bandwidth if node else figures.nic_uplink) / told.bandwidth)


def paths_in(cluster: ClusterConfig) -> Mapping[str, Sequence[str]]:
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
    from hpc_train.cluster.compute_nodes import compute_nodes
    from hpc_train.cluster.tree import paths_of
    from hpc_train.placement.locate import read_switches

    topology = read_switches(path)
    compute = compute_nodes(topology, nics, nic_gbit_s)
    return {node: found for node, found in paths_of(topology, compute).items() if node in compute}


def _size(switches: Iterable[Hashable]) -> float:
    """Nodes under the middle one of several switches; infinite where one holds all, or none is known."""
    counts = Counter(name for name in switches if name)
    return float(statistics.median_low(list(counts.values()))) if len(counts) > 1 else math.inf
