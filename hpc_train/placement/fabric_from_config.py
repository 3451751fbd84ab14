"""Build the fabric of a job from the configuration and the locations of its nodes.

Bandwidths and latencies are measured ones where there are any, else from conf/cluster, else stated defaults.
`list_assumptions` names every figure that was neither given nor measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.calibration import Calibration, read_calibration
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.run import RunConfig
from hpc_train.placement.fabric import Fabric, FabricLevel, NamedLevel, build_levels
from hpc_train.placement.node_locations import NodeLocations

DEFAULT_UPLINK = 1e9
"""Assumed bandwidth of a node whose NICs are unknown, bytes/s: 8 Gbit/s. The best order of nodes depends on ratios
only."""
DEFAULT_INSIDE = 1e10
"""Assumed bandwidth between ranks of a node whose links are unknown, bytes/s."""

# Seconds of a hop: NCCL's own tuning constants (src/graph/tuning.cc,
# ring, protocol Simple); `none` and sockets: a TCP message.
_INSIDE_LATENCY = {"nvlink": 3.4e-6, "nvswitch": 3.4e-6, "xgmi": 3.4e-6, "pcie": 5.7e-6, "none": 2e-5}
_NETWORK_LATENCY = 1.4e-5
_SOCKET_LATENCY = 5e-5
_SWITCH_LATENCY = 1e-6
"""Seconds added by each further level of switches: two more switches and their cables."""


@dataclass(frozen=True)
class FabricFigures:
    """Bandwidths of a cluster, bytes/s in one direction, and latencies, seconds."""

    inside_bandwidth: float
    pair_bandwidth: float
    """Bandwidth between two GPUs of one node; infinite if a GPU can send all that it has to one peer."""
    inside_latency: float
    nic_uplink: float
    """Network bandwidth of a node, all its NICs together."""
    nvlink_uplink: float
    """NVLink bandwidth of a node to the others of its domain; nic_uplink if unknown."""
    port: float
    """Rate of one NIC, and of a cable whose rate is unknown."""
    network_latency: float
    oversubscription: float | None
    """Oversubscription of a leaf; None: unknown."""
    group_oversubscription: float | None
    nodes_per_leaf: int
    """Nodes on a leaf; 0: unknown."""
    nodes_per_group: int
    measured: Calibration | None
    nics: int = 1
    """NICs of a node; 1 if unknown."""
    rail_optimised: bool = False
    """Whether each NIC of a node is on a leaf switch of its own."""

    def get_measured_uplink(self, level: str) -> float | None:
        """Return the measured bytes/s out of one group of the level, if any."""
        constants = self.measured.get_level(level) if self.measured is not None else None
        return constants.bandwidth if constants is not None else None

    def get_taper(self, level: str) -> float | None:
        """Return the taper: what the nodes below a switch of the level can send over what leaves it; None: unknown."""
        return self.oversubscription if level == "leaf" else self.group_oversubscription

    def count_nodes_below(self, level: str) -> int:
        """Return the number of cluster nodes below a switch of the level; 0: unknown."""
        return {"leaf": self.nodes_per_leaf, "group": self.nodes_per_group}.get(level, 0)

    def get_latency(self, level: str, above: int, domains: bool) -> float:
        """Return the seconds of a message that leaves a group of the level.

        above: levels of switches that it has passed.
        """
        if self.measured is not None and (constants := self.measured.get_level(level)) is not None:
            return constants.latency
        return self.inside_latency if level == "node" and domains else self.network_latency + above * _SWITCH_LATENCY


def collect_figures(cluster: ClusterConfig, nics: int = 0, node_gbit_s: float = 0.0) -> FabricFigures:
    """Collect the figures of a cluster.

    nics, node_gbit_s: NICs of a node and their total rate according to a topology, used if the cluster does not say.
    Raises UserError, one line, for a calibration file that cannot be read.
    """
    node, fabric = cluster.node, cluster.fabric
    nic_uplink = (node.nics * node.nic_gbit_s or node_gbit_s) / 8 * 1e9 or DEFAULT_UPLINK
    inside = node.gpu_link_gb_s * 1e9 or node.pcie_gb_s * 1e9 or max(DEFAULT_INSIDE, nic_uplink)
    measured = read_calibration(Path(cluster.calibration)) if cluster.calibration else None
    within = measured.get_level("inside") if measured else None
    return FabricFigures(
        inside_bandwidth=within.bandwidth if within else inside,
        pair_bandwidth=node.gpu_pair_gb_s * 1e9 or math.inf,
        inside_latency=within.latency if within else _INSIDE_LATENCY[node.gpu_link],
        nic_uplink=nic_uplink,
        nvlink_uplink=node.gpus * node.gpu_link_gb_s * 1e9 or nic_uplink,
        port=node.nic_gbit_s / 8 * 1e9 or nic_uplink / (node.nics or nics or 1),
        network_latency=_SOCKET_LATENCY if fabric.kind == "none" else _NETWORK_LATENCY,
        oversubscription=fabric.oversubscription,
        group_oversubscription=fabric.group_oversubscription,
        nodes_per_leaf=fabric.nodes_per_leaf,
        nodes_per_group=fabric.nodes_per_group,
        measured=measured,
        nics=node.nics or nics or 1,
        rail_optimised=fabric.topology == "rail_optimised",
    )


def list_assumptions(cluster: ClusterConfig, node_gbit_s: float = 0.0) -> tuple[str, ...]:
    """Return one line for each figure a cost rests on that was neither given nor measured.

    node_gbit_s: total rate of a node's NICs according to a topology; 0: unknown.
    """
    node = cluster.node
    measured = read_calibration(Path(cluster.calibration)) if cluster.calibration else None
    measured_levels = {constants.level for constants in measured.levels} if measured else set()
    notes = []
    if not node.nics * node.nic_gbit_s and not node_gbit_s and "node" not in measured_levels:
        notes.append(
            f"cluster.node.nics and nic_gbit_s are not known: {DEFAULT_UPLINK / 1e9:g} GB/s per node are assumed; "
            f"ratios hold, seconds do not"
        )
    if not node.gpu_link_gb_s and not node.pcie_gb_s and "inside" not in measured_levels:
        notes.append(
            f"cluster.node.gpu_link_gb_s is not known: {DEFAULT_INSIDE / 1e9:g} GB/s between the ranks of a node is "
            f"assumed"
        )
    return tuple(notes)


Floats = NDArray[np.float64]
_CONTRADICTS = 0.1
"""Relative difference that counts as a contradiction; a few broken cables or an additional host do not."""


def build_located_fabric(
    config: RunConfig, locations: NodeLocations, ranks_per_node: int, unknown_taper: float = 1.0
) -> Fabric:
    """Build the fabric of a job on located nodes.

    Levels, innermost first: node, domain, leaf, group, level3, ...; one that holds all nodes in one group is left out,
    for nothing leaves it. Uplinks: a node its NICs, or in a domain that spans nodes its GPUs' NVLink; a domain its
    nodes' NICs; a switch the cables that the topology lists, else the NICs of all compute nodes below it (of the job or
    not) over its taper, which is cluster.fabric.oversubscription of a leaf and group_oversubscription above. Where
    Slurm's LinkSpeed= differs within a level, that is the uplink of the fastest ones, and the others have as much less
    as their LinkSpeed says (it has no unit). Next to busy neighbours the job has its share, by nodes, of an uplink.
    A level of cluster.calibration replaces both its uplink, of one group, and its latency.

    unknown_taper: where a taper is not known. Raises UserError for a calibration that cannot be read.
    """
    named = build_levels(locations.nodes, locations.paths, locations.domains)
    figures = collect_figures(config.cluster, locations.nics, locations.node_gbit_s)
    spans = any(level.name == "domain" for level in named)
    node, *above = named
    levels = [node, *(level for level in above if len(level.labels) > 1)]
    return Fabric(
        nodes=locations.nodes,
        ranks_per_node=ranks_per_node,
        inside_bandwidth=figures.inside_bandwidth,
        inside_latency=figures.inside_latency,
        levels=tuple(
            replace(
                _make_level(level, figures, number, spans, locations, unknown_taper),
                rails=_count_rails(level, figures, ranks_per_node, spans),
            )
            for number, level in enumerate(levels)
        ),
        pair_bandwidth=figures.pair_bandwidth,
    )


def find_unknown_tapers(config: RunConfig, locations: NodeLocations) -> tuple[str, ...]:
    """Return the levels whose uplinks are unknown: no cables, no taper, no measurement. Innermost first."""
    figures = collect_figures(config.cluster, locations.nics, locations.node_gbit_s)
    levels = [level for level in build_levels(locations.nodes, locations.paths, locations.domains) if level.switches]
    placed = np.array([bool(locations.paths.get(node)) for node in locations.nodes])
    return tuple(
        level.name
        for level in levels
        if len(set(level.group[placed].tolist())) > 1
        and figures.get_taper(level.name) is None
        and figures.get_measured_uplink(level.name) is None
        and not all(
            any(_list_cables(locations, switch) for switch in level.switches[group])
            for group in set(level.group[placed].tolist())
        )
    )


def list_capacity_notes(config: RunConfig, locations: NodeLocations) -> tuple[str, ...]:
    """Return one line for each stated taper that the topology's cables contradict, and for LinkSpeeds that differ."""
    figures = collect_figures(config.cluster, locations.nics, locations.node_gbit_s)
    notes = []
    for level in build_levels(locations.nodes, locations.paths, locations.domains):
        if not level.switches or len(level.labels) < 2 or figures.get_measured_uplink(level.name) is not None:
            continue
        sizes = np.bincount(level.group, minlength=len(level.labels)).astype(np.float64)
        below = np.maximum(sizes, _count_nodes_below(level, sizes, figures, locations))
        cabled = np.array([_sum_cables(locations, switches, figures) for switches in level.switches])
        stated = figures.get_taper(level.name)
        if (cabled > 0).all():
            cabled_taper = float(np.median(below * figures.nic_uplink / cabled))
            if stated is not None and abs(cabled_taper / stated - 1) > _CONTRADICTS:
                notes.append(
                    f"the {level.name} uplinks are {cabled_taper:.2g}:1 by the cables of {locations.source}; the "
                    f"{stated:g}:1 of cluster={config.cluster.name} is not used"
                )
        elif (_compute_relative_speeds(level, locations) < 1).any():
            notes.append(
                f"LinkSpeed= differs between the {level.name} switches of {locations.source}: the fastest have "
                "the uplink that the taper gives, the others as much less as their LinkSpeed says"
            )
    return tuple(notes)


def _count_rails(level: NamedLevel, figures: FabricFigures, ranks_per_node: int, spans: bool) -> int:
    """Return into how many parts the uplinks of a level fall, of which a message between two ranks has one.

    Nodes, and NVLink domains whose nodes' NICs these are, have a part for each NIC that has ranks; a leaf has them if
    it is a unit of rail-optimised leaves.
    """
    rails = min(figures.nics, ranks_per_node)
    if level.name == "domain" or (level.name == "node" and not spans):
        return rails
    return rails if level.name == "leaf" and figures.rail_optimised else 1


def _make_level(
    level: NamedLevel, figures: FabricFigures, number: int, spans: bool, locations: NodeLocations, unknown_taper: float
) -> FabricLevel:
    sizes = np.bincount(level.group, minlength=len(level.labels)).astype(np.float64)
    latency = figures.get_latency(level.name, number, spans)
    measured = figures.get_measured_uplink(level.name)
    if measured is not None:
        return FabricLevel(level.name, level.group, np.full(len(sizes), measured), latency)
    if not level.switches:
        each = figures.nvlink_uplink if level.name == "node" and spans else figures.nic_uplink
        return FabricLevel(level.name, level.group, sizes * each, latency)
    below = np.maximum(sizes, _count_nodes_below(level, sizes, figures, locations))
    cabled = np.array([_sum_cables(locations, switches, figures) for switches in level.switches])
    taper = figures.get_taper(level.name) or unknown_taper
    # Uplink of a switch = what its nodes' NICs can send / taper; slower switches of a level by their LinkSpeed.
    computed = below * (figures.nic_uplink / taper) * _compute_relative_speeds(level, locations)
    uplink = np.where(cabled > 0, cabled, computed)
    # The job's fair share of an uplink is its share of the nodes below the switch.
    share = uplink * sizes / below if (sizes < below).any() else None
    return FabricLevel(level.name, level.group, uplink, latency, share)


def _count_nodes_below(level: NamedLevel, sizes: Floats, figures: FabricFigures, locations: NodeLocations) -> Floats:
    """Return [groups]: number of compute nodes below each group.

    If unknown: the median of the other groups, else the cluster's description, else the job's nodes on its fullest
    group.
    """
    counts = [
        [locations.uplinks[switch].nodes for switch in switches if switch in locations.uplinks]
        for switches in level.switches
    ]
    middle = statistics.median([sum(nodes) for nodes in counts if nodes] or [figures.count_nodes_below(level.name)])
    return np.array([sum(nodes) if nodes else middle or sizes.max() for nodes in counts], np.float64)


def _list_cables(locations: NodeLocations, switch: tuple[str, ...]) -> int:
    return locations.uplinks[switch].cables if switch in locations.uplinks else 0


def _sum_cables(locations: NodeLocations, switches: Iterable[tuple[str, ...]], figures: FabricFigures) -> float:
    """Return bytes/s of all cables out of the switches; 0 if none is listed. Cables without a rate count as a NIC."""
    uplinks = [locations.uplinks[switch] for switch in switches if switch in locations.uplinks]
    return sum(
        (uplink.cables * figures.port if uplink.gbit_s is None else uplink.gbit_s / 8 * 1e9 for uplink in uplinks), 0.0
    )


def _compute_relative_speeds(level: NamedLevel, locations: NodeLocations) -> Floats:
    """Return [groups]: LinkSpeed of each group's switches relative to the fastest group; 1 if unknown."""
    group_speeds = [
        [locations.uplinks[switch].link_speed for switch in switches if switch in locations.uplinks]
        for switches in level.switches
    ]
    speeds = np.array([statistics.fmean(switch) if switch else math.nan for switch in group_speeds])
    return np.nan_to_num(speeds / np.nanmax(speeds), nan=1.0) if any(group_speeds) else np.ones(len(group_speeds))
