"""Tell compute nodes from storage and management servers, which topologies list too, by their hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hpc_train.cluster.spec import Cluster, Node, sum_rates


@dataclass(frozen=True)
class HostHardware:
    """Hardware of a host, to tell one kind of host from another."""

    gpus: int
    nics: int
    """Number of adapters that are up, or whose state the source does not give."""
    gbit_s: float | None
    """Total rate of these adapters; None if any rate is unknown."""

    def __str__(self) -> str:
        rate = f", {self.gbit_s:g} Gbit/s in all" if self.gbit_s else ""
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)}, " if self.gpus else ""
        return f"{gpus}{self.nics} NIC{'s' * (self.nics != 1)}{rate}"


def describe_hardware(node: Node) -> HostHardware:
    """Return the node's hardware as its source describes it."""
    up = [nic for nic in node.nics if nic.active is not False]
    return HostHardware(len(node.gpus), len(up), sum_rates(nic.gbit_s for nic in up))


def find_compute_nodes(cluster: Cluster, nics: int = 0, nic_gbit_s: float = 0.0) -> frozenset[str]:
    """Return the names of the nodes on switches that have the hardware of compute nodes.

    nics, nic_gbit_s: of a compute node, from the cluster's description (0: unknown). If some hosts match these exactly,
    they are the compute nodes; otherwise the hosts with the most common hardware are (of two equally frequent kinds,
    the one with more GPUs, then more NICs). If a source lists no hardware, all its nodes are compute nodes.
    """
    attached = dict.fromkeys(node for switch in cluster.switches for node in switch.nodes)
    kinds = {node.name: describe_hardware(node) for node in cluster.nodes if node.name in attached}
    bare = HostHardware(0, 0, None)
    described = [kind for kind in set(kinds.values()) if _is_described(kind, nics, nic_gbit_s)]
    chosen = set(described) or _find_most_frequent(kinds.get(name, bare) for name in attached)
    return frozenset(name for name in attached if kinds.get(name, bare) in chosen)


def group_by_hardware(cluster: Cluster, names: Collection[str]) -> dict[HostHardware, list[str]]:
    """Group the named nodes by hardware."""
    groups: dict[HostHardware, list[str]] = {}
    for node in cluster.nodes:
        if node.name in names:
            groups.setdefault(describe_hardware(node), []).append(node.name)
    return groups


def _is_described(kind: HostHardware, nics: int, nic_gbit_s: float) -> bool:
    if not nics or kind.nics != nics:
        return False
    return not nic_gbit_s or kind.gbit_s is None or abs(kind.gbit_s - nics * nic_gbit_s) < 0.01 * nics * nic_gbit_s


def _find_most_frequent(kinds: Iterable[HostHardware]) -> set[HostHardware]:
    counts = Counter(kinds)
    return {max(counts, key=lambda kind: (counts[kind], kind.gpus, kind.nics, kind.gbit_s or 0.0))} if counts else set()
