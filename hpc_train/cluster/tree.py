"""From a cluster's switches to one path a node, which is what placement orders nodes by."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_train.cluster.slurm.hostlist import group
from hpc_train.cluster.spec import Cluster, Switch


def paths(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """By node, in the cluster's order: names of what is above it, from the top to the leaf; () where nothing is.

    Several switches of one level above a node (rails, dragonfly, two parents) are one group, such as leaf[1-8]; a
    level with no switch above the node is left out, so that paths of an uneven tree differ in length.
    """
    switches = {switch.name: switch for switch in cluster.switches}
    parents = _parents(cluster)
    direct: dict[str, list[str]] = {node.name: [] for node in cluster.nodes}
    for switch in cluster.switches:
        for node in switch.nodes:
            direct.setdefault(node, []).append(switch.name)
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    found = {}
    for node, leaves in direct.items():
        key = tuple(leaves)
        if key not in known:
            known[key] = _path(_above(key, parents), switches)
        found[node] = known[key]
    return found


def _parents(cluster: Cluster) -> dict[str, list[str]]:
    parents: dict[str, list[str]] = {}
    for switch in cluster.switches:
        for child in switch.switches:
            parents.setdefault(child, []).append(switch.name)
    return parents


def _above(leaves: tuple[str, ...], parents: Mapping[str, list[str]]) -> set[str]:
    """The leaves and every switch above one of them."""
    reached, waiting = set(leaves), list(leaves)
    while waiting:
        for parent in parents.get(waiting.pop(), ()):
            if parent not in reached:
                reached.add(parent)
                waiting.append(parent)
    return reached


def _path(reached: set[str], switches: Mapping[str, Switch]) -> tuple[str, ...]:
    levels: dict[int, list[str]] = {}
    for name in reached:
        levels.setdefault(switches[name].level, []).append(name)
    return tuple(group(levels[level]) for level in sorted(levels, reverse=True))
