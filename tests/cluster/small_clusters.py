"""Small clusters to print and draw."""

from __future__ import annotations

from itertools import combinations

from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node, Switch

NEAREST_NIC = "PIX"


def gpu_node(name: str, gpus: int, kind: str, clique: str | None = None) -> tuple[Node, list[Link]]:
    """Return a node with GPUs joined by one kind of link, two NUMA nodes, and a NIC next to each GPU."""
    half = gpus // 2
    devices = tuple(
        Gpu(f"GPU{n}", n // half, f"{n // half * 8}-{n // half * 8 + 7}", "X100", clique=clique) for n in range(gpus)
    )
    nics = tuple(Nic(f"NIC{n}", f"mlx5_{n}", gbit_s=400.0) for n in range(gpus))
    links = [Link(name, f"GPU{a}", f"GPU{b}", kind) for a, b in combinations(range(gpus), 2)]
    links += [
        Link(name, f"GPU{a}", f"NIC{b}", NEAREST_NIC if a == b else "SYS") for a in range(gpus) for b in range(gpus)
    ]
    return Node(name, devices, nics), links


def two_leaves(nodes: int = 8) -> Cluster:
    """Return a cluster of nodes n1, n2, ... with 4 GPUs under two leaves below a spine."""
    built = [gpu_node(f"n{number}", 4, "NV18") for number in range(1, nodes + 1)]
    names = tuple(node.name for node, _ in built)
    half = nodes // 2
    switches = (
        Switch("leaf1", 0, names[:half]),
        Switch("leaf2", 0, names[half:]),
        Switch("spine", 1, (), ("leaf1", "leaf2")),
    )
    return Cluster(
        "test", tuple(node for node, _ in built), tuple(link for _, links in built for link in links), switches
    )


def rails(units: int, hosts: int, leaves: int) -> Cluster:
    """Return units of hosts, each host connected to all leaves of its unit and every leaf to both spines, listed in a
    shuffled order.
    """
    switches, names = [], []
    for unit in range(units):
        held = tuple(f"u{unit}h{host}" for host in range(hosts))
        names += held
        switches += [Switch(f"u{unit}l{leaf}", 0, held) for leaf in range(leaves)]
    below = tuple(switch.name for switch in switches)
    switches = [Switch("spine1", 1, (), below), *reversed(switches), Switch("spine2", 1, (), below)]
    return Cluster("test", tuple(Node(name) for name in reversed(names)), switches=tuple(switches))
