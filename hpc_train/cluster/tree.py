"""From the switches of a topology to a forest of units: switches that serve the same things are one unit.

A host of a rail-optimised fabric hangs on one leaf of each rail, and a leaf on every spine of its pod. What counts for
placement is which hosts share leaves (a scalable unit) and which leaves share spines (a pod), so each level's units are
the connected components over what the switches of that level hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpc_train.cluster.slurm.hostlist import group
from hpc_train.cluster.spec import Cluster, Switch


@dataclass
class Unit:
    """One or several switches of a level and what hangs on them."""

    switches: tuple[str, ...]
    """Names, in the source's order."""
    level: int
    nodes: list[str] = field(default_factory=list)
    """Nodes that hang on it and on no unit below."""
    units: list[Unit] = field(default_factory=list)


@dataclass
class _Forest:
    """What has been joined so far: the outermost unit of every node and switch, and the nodes that have none."""

    of_node: dict[str, Unit] = field(default_factory=dict)
    of_switch: dict[str, Unit] = field(default_factory=dict)


def units_of(cluster: Cluster) -> list[Unit]:
    """The outermost units, in the source's order. A switch that holds nothing at all is left out."""
    forest = _Forest()
    for level in sorted({switch.level for switch in cluster.switches}):
        _join(forest, [switch for switch in cluster.switches if switch.level == level], level)
    outermost = {id(unit): unit for unit in forest.of_switch.values()}
    return [unit for unit in outermost.values() if _holds(unit)]


def paths_of(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """By node, in the cluster's order: the units above it, from the top to the leaf; () where nothing is.

    A unit of several switches has one name for all, such as leaf[1-8].
    """
    found: dict[str, tuple[str, ...]] = {node.name: () for node in cluster.nodes}
    stack: list[tuple[Unit, tuple[str, ...]]] = [(unit, (unit_name(unit),)) for unit in units_of(cluster)]
    while stack:
        unit, path = stack.pop()
        found.update(dict.fromkeys(unit.nodes, path))
        stack += [(below, (*path, unit_name(below))) for below in unit.units]
    return found


def scalable_units(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Nodes that share leaf switches, directly or through other nodes, in the cluster's order; one without is alone."""
    order = {node: n for n, node in enumerate(paths_of(cluster))}
    stack, found = list(units_of(cluster)), list[tuple[str, ...]]()
    while stack:
        unit = stack.pop()
        stack += unit.units
        found += [tuple(sorted(unit.nodes, key=order.__getitem__))] if unit.level == 0 and unit.nodes else []
    hanging = {node for of_unit in found for node in of_unit}
    found += [(node,) for node in order if node not in hanging]
    return tuple(sorted(found, key=lambda of_unit: order[of_unit[0]]))


def rails(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Leaf switch -> the names that the NICs on it have in their hosts. A leaf with one name is pure: of one rail.

    NICs without a name (and switches without NICs that the source tells of) do not count.
    """
    found: dict[str, dict[str, None]] = {}
    for node in cluster.nodes:
        for nic in node.nics:
            for switch in nic.switches or ():
                if nic.device is not None:
                    found.setdefault(switch, {})[nic.device] = None
    return {switch.name: tuple(found[switch.name]) for switch in cluster.switches if switch.name in found}


def unit_name(unit: Unit) -> str:
    """The switch; of several, what Slurm would write for all of them."""
    return unit.switches[0] if len(unit.switches) == 1 else group(unit.switches)


def nodes_under(unit: Unit) -> Iterator[str]:
    """All its nodes."""
    stack = [unit]
    while stack:
        current = stack.pop()
        yield from current.nodes
        stack += reversed(current.units)


def _join(forest: _Forest, switches: Sequence[Switch], level: int) -> None:
    for members in _components(switches, forest):
        unit = Unit(tuple(switch.name for switch in members), level)
        for switch in members:
            _hang(unit, switch, forest)
        _claim(unit, forest)


def _components(switches: Sequence[Switch], forest: _Forest) -> list[list[Switch]]:
    """Switches of one level, joined where they hold the same thing; in the order of their first one."""
    parent = list(range(len(switches)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    first: dict[object, int] = {}
    for number, switch in enumerate(switches):
        for held in _held(switch, forest):
            a, b = root(number), root(first.setdefault(held, number))
            parent[max(a, b)] = min(a, b)
    groups: dict[int, list[Switch]] = {}
    for number, switch in enumerate(switches):
        groups.setdefault(root(number), []).append(switch)
    return list(groups.values())


def _held(switch: Switch, forest: _Forest) -> Iterator[object]:
    """What two switches have in common if they hold it: a unit below, or a node on none."""
    for node in switch.nodes:
        yield id(forest.of_node[node]) if node in forest.of_node else node
    for below in switch.switches:
        if below in forest.of_switch:
            yield id(forest.of_switch[below])


def _hang(unit: Unit, switch: Switch, forest: _Forest) -> None:
    below = [forest.of_switch[name] for name in switch.switches if name in forest.of_switch]
    below += [forest.of_node[node] for node in switch.nodes if node in forest.of_node]
    known = {id(it) for it in unit.units}
    unit.units += [it for it in {id(it): it for it in below}.values() if id(it) not in known and it is not unit]
    new = set(unit.nodes)
    unit.nodes += [node for node in dict.fromkeys(switch.nodes) if node not in forest.of_node and node not in new]


def _claim(unit: Unit, forest: _Forest) -> None:
    """From now on it is the outermost unit of all that hangs on it."""
    stack = [unit]
    nodes: list[str] = []
    switches: list[str] = []
    while stack:
        current = stack.pop()
        nodes += current.nodes
        switches += current.switches
        stack += current.units
    forest.of_node.update(dict.fromkeys(nodes, unit))
    forest.of_switch.update(dict.fromkeys(switches, unit))


def _holds(unit: Unit) -> bool:
    return next(nodes_under(unit), None) is not None
