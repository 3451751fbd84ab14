"""Bandwidths and latencies of a cluster: measured where they were, else from conf/cluster, else stated defaults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.calibration import Calibration, read_calibration
from hpc_train.config.cluster import ClusterConfig

DEFAULT_UPLINK = 1e9
"""Bytes/s of a node whose NICs are unknown: 8 Gbit/s. An order of nodes depends on ratios only."""
DEFAULT_INSIDE = 1e10
"""Bytes/s between the ranks of a node whose links are unknown."""

# Seconds of a hop as NCCL's own tuning has them (src/graph/tuning.cc, ring, protocol Simple), and of a TCP message.
_INSIDE_LATENCY = {"nvlink": 3.4e-6, "nvswitch": 3.4e-6, "xgmi": 3.4e-6, "pcie": 5.7e-6, "none": 2e-5}
_NETWORK_LATENCY = 1.4e-5
_SOCKET_LATENCY = 5e-5
_SWITCH_LATENCY = 1e-6
"""Of one level more: two more switches and their cables."""


@dataclass(frozen=True)
class Figures:
    """What one cluster can move, in bytes/s in one direction, and how long a message takes, in seconds."""

    inside_bandwidth: float
    inside_latency: float
    nic_uplink: float
    """Of a node, all its NICs together."""
    nvlink_uplink: float
    """Of a node to the others of its NVLink domain; nic_uplink where that is unknown."""
    port: float
    """Rate of one NIC, and of a cable whose rate is unknown."""
    network_latency: float
    oversubscription: float | None
    """Taper of a leaf; None: unknown."""
    group_oversubscription: float | None
    nodes_per_leaf: int
    """Nodes on a leaf; 0: unknown."""
    nodes_per_group: int
    measured: Calibration | None

    def measured_uplink(self, level: str) -> float | None:
        """Return the measured bytes/s out of one group of the level, if any."""
        constants = self.measured.of(level) if self.measured is not None else None
        return constants.bandwidth if constants is not None else None

    def taper(self, level: str) -> float | None:
        """Return the taper: what the nodes below a switch of the level can send over what leaves it; None: unknown."""
        return self.oversubscription if level == "leaf" else self.group_oversubscription

    def nodes_below(self, level: str) -> int:
        """Return the number of cluster nodes below a switch of the level; 0: unknown."""
        return {"leaf": self.nodes_per_leaf, "group": self.nodes_per_group}.get(level, 0)

    def latency(self, level: str, above: int, domains: bool) -> float:
        """Seconds of a message that leaves a group of the level; above: levels of switches that it has passed."""
        if self.measured is not None and (constants := self.measured.of(level)) is not None:
            return constants.latency
        return self.inside_latency if level == "node" and domains else self.network_latency + above * _SWITCH_LATENCY


def figures_of(cluster: ClusterConfig, nics: int = 0, node_gbit_s: float = 0.0) -> Figures:
    """Collect the figures of a cluster.

    nics, node_gbit_s: NICs of a node and their total rate according to a topology, used if the cluster does not say.
    Raises UserError, one line, for a calibration file that cannot be read.
    """
    node, fabric = cluster.node, cluster.fabric
    nic_uplink = (node.nics * node.nic_gbit_s or node_gbit_s) / 8 * 1e9 or DEFAULT_UPLINK
    inside = node.gpu_link_gb_s * 1e9 or node.pcie_gb_s * 1e9 or max(DEFAULT_INSIDE, nic_uplink)
    measured = read_calibration(Path(cluster.calibration)) if cluster.calibration else None
    within = measured.of("inside") if measured else None
    return Figures(
        inside_bandwidth=within.bandwidth if within else inside,
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
    )


def assumptions(cluster: ClusterConfig, node_gbit_s: float = 0.0) -> tuple[str, ...]:
    """Return one line for each figure a cost rests on that was neither given nor measured.

    node_gbit_s: total rate of a node's NICs according to a topology; 0: unknown.
    """
    node = cluster.node
    measured = read_calibration(Path(cluster.calibration)) if cluster.calibration else None
    known = {it.level for it in measured.levels} if measured else set()
    notes = []
    if not node.nics * node.nic_gbit_s and not node_gbit_s and "node" not in known:
        notes.append(
            f"cluster.node.nics and nic_gbit_s are not known: {DEFAULT_UPLINK / 1e9:g} GB/s a node is assumed; "
            f"ratios hold, seconds do not"
        )
    if not node.gpu_link_gb_s and not node.pcie_gb_s and "inside" not in known:
        notes.append(
            f"cluster.node.gpu_link_gb_s is not known: {DEFAULT_INSIDE / 1e9:g} GB/s between the ranks of a node is "
            f"assumed"
        )
    return tuple(notes)
