"""Find the compute nodes among the hosts of a topology, which also lists storage and management servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from hpc_train.cluster.spec import Cluster, Node


@dataclass(frozen=True)
class Hardware:
    """Hardware of a host, used to tell one kind of host from another."""

    gpus: int
    nics: int
    """Number of adapters that are up, or whose state the source does not give."""
    gbit_s: float | None
    """Total rate of these adapters; None if any rate is unknown."""

    def __str__(self) -> str:
        rate = f", {self.gbit_s:g} Gbit/s in all" if self.gbit_s else ""
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)}, " if self.gpus else ""
        return f"{gpus}{self.nics} NIC{'s' * (self.nics != 1)}{rate}"


def hardware_of(node: Node) -> Hardware:
    """Return the node's hardware as its source describes it."""
    up = [nic for nic in node.nics if nic.active is not False]
    rates = [nic.gbit_s for nic in up]
    known = [rate for rate in rates if rate is not None]
    return Hardware(len(node.gpus), len(up), sum(known) if known and len(known) == len(rates) else None)


def compute_nodes(cluster: Cluster, nics: int = 0, nic_gbit_s: float = 0.0) -> frozenset[str]:
    """Return the names of the nodes on switches that have the hardware of compute nodes.

    nics, nic_gbit_s: of a compute node, from the cluster's description (0: unknown). If some hosts match these exactly,
    they are the compute nodes; otherwise the hosts with the most common hardware are (of two equally frequent kinds,
    the one with more GPUs, then more NICs). If a source lists no hardware, all its nodes are compute nodes.
    """
    hanging = dict.fromkeys(node for switch in cluster.switches for node in switch.nodes)
    kinds = {node.name: hardware_of(node) for node in cluster.nodes if node.name in hanging}
    bare = Hardware(0, 0, None)
    described = [kind for kind in set(kinds.values()) if _is_described(kind, nics, nic_gbit_s)]
    chosen = set(described) or _most_frequent(kinds.get(name, bare) for name in hanging)
    return frozenset(name for name in hanging if kinds.get(name, bare) in chosen)


def kinds_of(cluster: Cluster, names: Collection[str]) -> dict[Hardware, list[str]]:
    """Group the named nodes by hardware."""
    found: dict[Hardware, list[str]] = {}
    for node in cluster.nodes:
        if node.name in names:
            found.setdefault(hardware_of(node), []).append(node.name)
    return found


def _is_described(kind: Hardware, nics: int, nic_gbit_s: float) -> bool:
    if not nics or kind.nics != nics:
        return False
    return not nic_gbit_s or kind.gbit_s is None or abs(kind.gbit_s - nics * nic_gbit_s) < 0.01 * nics * nic_gbit_s


def _most_frequent(kinds: Iterable[Hardware]) -> set[Hardware]:
    counts = Counter(kinds)
    return {max(counts, key=lambda it: (counts[it], it.gpus, it.nics, it.gbit_s or 0.0))} if counts else set()
