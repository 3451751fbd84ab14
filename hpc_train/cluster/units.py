"""What the switches of a cluster amount to: rails, and scalable units.

A host of a rail-optimised fabric has one NIC on each of several leaves, so the fabric is no tree of leaves; it is one
of units: of hosts that share leaves, and of units that share the switches above.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from hpc_train.cluster.spec import Cluster, Switch

_T = TypeVar("_T", bound=Hashable)


def scalable_units(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Hosts that share leaf switches, directly or through other hosts, in the cluster's order; one without is alone."""
    order = {node.name: n for n, node in enumerate(cluster.nodes)}
    leaves = [switch.nodes for switch in cluster.switches if switch.level == 0]
    found = _components([*((node.name,) for node in cluster.nodes), *leaves])
    return tuple(sorted((tuple(sorted(unit, key=order.__getitem__)) for unit in found), key=lambda it: order[it[0]]))


def rails(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Leaf switch -> the names that the NICs on it have in their hosts. A leaf with one name is pure: of one rail.

    NICs without a name (and switches without NICs that the source tells of) do not count.
    """
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for node in cluster.nodes:
        for nic in node.nics:
            for switch in nic.switches or ():
                if nic.device is not None:
                    found[switch][nic.device] = None
    return {switch.name: tuple(found[switch.name]) for switch in cluster.switches if switch.name in found}


def units_as_switches(cluster: Cluster) -> Cluster:
    """The same nodes under a forest of units: hosts that share leaves, then units that share switches above, and so on.

    A unit of several switches is named after its first and how many more: leaf1+3. A unit that would hold one unit and
    nothing else is that unit.
    """
    outer: dict[_Held, _Held] = {}
    units: dict[str, Switch] = {}
    for level in sorted({switch.level for switch in cluster.switches}):
        switches = [it for it in cluster.switches if it.level == level and (it.nodes or it.switches)]
        held = {it.name: [_outermost(one, outer) for one in _below(it)] for it in switches}
        for members in _components([("switch", it.name), *held[it.name]] for it in switches):
            unit = _unit([name for kind, name in members if kind == "switch" and name in held], members, units)
            units[unit.name] = unit
            outer |= {it: ("unit", unit.name) for it in members if it != ("unit", unit.name)}
    return Cluster(cluster.kind, cluster.nodes, cluster.links, tuple(units.values()))


_Held = tuple[str, str]
"""What hangs on a switch: ("node" or "switch" or "unit", its name)."""


def _below(switch: Switch) -> list[_Held]:
    return [*(("switch", it) for it in switch.switches), *(("node", it) for it in switch.nodes)]


def _outermost(one: _Held, outer: Mapping[_Held, _Held]) -> _Held:
    while one in outer:
        one = outer[one]
    return one


def _unit(switches: Sequence[str], members: Sequence[_Held], units: Mapping[str, Switch]) -> Switch:
    nodes = tuple(name for kind, name in members if kind == "node")
    below = tuple(name for kind, name in members if kind == "unit")
    if len(below) == 1 and not nodes:
        return units[below[0]]
    name = switches[0] if len(switches) == 1 else f"{switches[0]}+{len(switches) - 1}"
    return Switch(name, max((units[it].level + 1 for it in below), default=0), nodes, below)


def _components(groups: Iterable[Sequence[_T]]) -> list[list[_T]]:
    """What is in one group, directly or through others: each once, in the order of appearance."""
    parent: dict[_T, _T] = {}

    def root(one: _T) -> _T:
        while (up := parent.setdefault(one, one)) != one:
            parent[one] = one = parent.setdefault(up, up)
        return one

    for group in groups:
        first = root(group[0]) if group else None
        for one in group[1:]:
            assert first is not None
            parent[root(one)] = first
    found: dict[_T, list[_T]] = defaultdict(list)
    for one in list(parent):
        found[root(one)].append(one)
    return list(found.values())
