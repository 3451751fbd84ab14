"""Group the switches of a topology into a tree of units: switches that serve the same nodes are one unit.

A host of a rail-optimised fabric is attached to one leaf of each rail, and a leaf to every spine of its pod. Placement
only needs to know which hosts share leaves, so leaves that serve mostly the same hosts form one unit, and so on
upwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hpc_train.cluster.compute_nodes import find_compute_nodes
from hpc_train.cluster.hostlist import name_switch_group
from hpc_train.cluster.similar_sets import group_similar_sets
from hpc_train.cluster.spec import Cluster, Switch, sum_rates


@dataclass
class SwitchUnit:
    """Switches of one level that count as one, and the nodes and units below them."""

    switches: tuple[str, ...]
    """Names, in the source's order."""
    level: int
    nodes: list[str] = field(default_factory=list)
    """Nodes that hang on it and on no unit below."""
    units: list[SwitchUnit] = field(default_factory=list)


@dataclass
class _Forest:
    """The units joined so far: the outermost unit of every node and switch."""

    unit_of_node: dict[str, SwitchUnit] = field(default_factory=dict)
    unit_of_switch: dict[str, SwitchUnit] = field(default_factory=dict)


@dataclass(frozen=True)
class UnitUplink:
    """Capacity out of a unit, as far as its source gives it."""

    nodes: int
    """Number of compute nodes under the unit."""
    cables: int = 0
    """Number of cables to outside switches that are not below it; 0 if the source lists no cables."""
    gbit_s: float | None = None
    """Total rate of these cables, one direction."""
    link_speed: float = 1.0
    """Mean of Slurm's LinkSpeed= over the unit's switches; a switch without one has Slurm's default, 1."""


def build_units(cluster: Cluster, compute: Collection[str] | None = None) -> list[SwitchUnit]:
    """Return the outermost units in the source's order. A switch with nothing below it is left out.

    compute: names of the nodes whose cables tell which switches belong together (default: find_compute_nodes).
    """
    counted = find_compute_nodes(cluster) if compute is None else compute
    forest = _Forest()
    by_level: dict[int, list[Switch]] = {}
    for switch in cluster.switches:
        by_level.setdefault(switch.level, []).append(switch)
    for level in sorted(by_level):
        _join_level(forest, by_level[level], level, counted)
    outermost = {id(unit): unit for unit in forest.unit_of_switch.values()}
    return [unit for unit in outermost.values() if _has_nodes(unit)]


def find_paths(cluster: Cluster, compute: Collection[str] | None = None) -> dict[str, tuple[str, ...]]:
    """Map each node to the units above it, top to leaf, in the cluster's order; () for a node on no switch.

    A unit of several switches has one name for all, such as leaf[1-8]. compute: see build_units.
    """
    paths: dict[str, tuple[str, ...]] = {node.name: () for node in cluster.nodes}
    for unit, path in _walk_units(build_units(cluster, compute)):
        paths.update(dict.fromkeys(unit.nodes, path))
    return paths


def find_uplinks(cluster: Cluster, compute: Collection[str] | None = None) -> dict[tuple[str, ...], UnitUplink]:
    """Return every unit's uplink capacity, by the unit's path from the top."""
    counted = find_compute_nodes(cluster) if compute is None else compute
    switches = {switch.name: switch for switch in cluster.switches}
    return {
        path: _compute_uplink(
            [switches[name] for name in unit.switches], sum(node in counted for node in list_nodes_under(unit))
        )
        for unit, path in _walk_units(build_units(cluster, compute))
    }


def _walk_units(units: Iterable[SwitchUnit]) -> Iterator[tuple[SwitchUnit, tuple[str, ...]]]:
    """Yield every unit with its path from the top."""
    stack: list[tuple[SwitchUnit, tuple[str, ...]]] = [(unit, (name_unit(unit),)) for unit in units]
    while stack:
        unit, path = stack.pop()
        yield unit, path
        stack += [(below, (*path, name_unit(below))) for below in unit.units]


def _compute_uplink(members: Sequence[Switch], nodes: int) -> UnitUplink:
    names = {switch.name for switch in members}
    trunks = [trunk for switch in members for trunk in switch.uplinks if trunk.switch not in names]
    return UnitUplink(
        nodes=nodes,
        cables=sum(trunk.cables for trunk in trunks),
        gbit_s=sum_rates(trunk.gbit_s for trunk in trunks),
        link_speed=sum(switch.link_speed or 1 for switch in members) / len(members),
    )


def find_scalable_units(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Group nodes that share leaf switches, directly or through other nodes, in the cluster's order."""
    order = {node: n for n, node in enumerate(find_paths(cluster))}
    stack, scalable_units = list(build_units(cluster)), list[tuple[str, ...]]()
    while stack:
        unit = stack.pop()
        stack += unit.units
        if unit.level == 0 and unit.nodes:
            scalable_units.append(tuple(sorted(unit.nodes, key=order.__getitem__)))
    attached = {node for of_unit in scalable_units for node in of_unit}
    scalable_units += [(node,) for node in order if node not in attached]
    return tuple(sorted(scalable_units, key=lambda of_unit: order[of_unit[0]]))


def find_rails(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Map each leaf switch to the device names of the NICs on it. A leaf with one name serves one rail.

    NICs without a name (and switches without NICs that the source tells of) do not count.
    """
    names: dict[str, dict[str, None]] = {}
    for node in cluster.nodes:
        for nic in node.nics:
            for switch in nic.switches or ():
                if nic.device is not None:
                    names.setdefault(switch, {})[nic.device] = None
    return {switch.name: tuple(names[switch.name]) for switch in cluster.switches if switch.name in names}


def name_unit(unit: SwitchUnit) -> str:
    """Name a unit: its switch, or a host list of its switches."""
    return unit.switches[0] if len(unit.switches) == 1 else name_switch_group(unit.switches)


def list_nodes_under(unit: SwitchUnit) -> Iterator[str]:
    """Yield all nodes of a unit and of the units below it."""
    stack = [unit]
    while stack:
        current = stack.pop()
        yield from current.nodes
        stack += reversed(current.units)


def _join_level(forest: _Forest, switches: Sequence[Switch], level: int, compute: Collection[str]) -> None:
    # Only compute nodes and units count: a storage server may be on any leaf and would join strangers.
    contents = [dict.fromkeys(_list_contents(switch, forest)) for switch in switches]
    counted = [
        frozenset(thing for thing in things if not isinstance(thing, str) or thing in compute) for things in contents
    ]
    groups = group_similar_sets(counted)
    home = _find_homes(contents, groups)
    units = [SwitchUnit(tuple(switches[number].name for number in members), level) for members in groups]
    for of_group, (unit, members) in enumerate(zip(units, groups, strict=True)):
        for number in members:
            _add_members(
                unit, switches[number], forest, {thing for thing in contents[number] if home[thing] == of_group}
            )
    for unit in units:
        _claim_members(unit, forest)


def _find_homes(contents: Sequence[Iterable[object]], groups: Sequence[Sequence[int]]) -> dict[object, int]:
    """Map each thing to the group most of whose switches hold it; ties go to the larger group, then to the first."""
    cables: dict[object, Counter[int]] = {}
    size: Counter[int] = Counter()
    for of_group, members in enumerate(groups):
        for number in members:
            for thing in contents[number]:
                cables.setdefault(thing, Counter())[of_group] += 1
                size[of_group] += 1
    return {
        thing: max(counts, key=lambda group: (counts[group], size[group], -group)) for thing, counts in cables.items()
    }


def _list_contents(switch: Switch, forest: _Forest) -> Iterator[object]:
    """Yield what a switch holds: ids of the units below it, and names of nodes that are on no unit."""
    for node in switch.nodes:
        yield id(forest.unit_of_node[node]) if node in forest.unit_of_node else node
    for below in switch.switches:
        if below in forest.unit_of_switch:
            yield id(forest.unit_of_switch[below])


def _add_members(unit: SwitchUnit, switch: Switch, forest: _Forest, allowed: Collection[object]) -> None:
    """Add to the unit those nodes and units below the switch that belong to it."""
    below = [forest.unit_of_switch[name] for name in switch.switches if name in forest.unit_of_switch]
    below += [forest.unit_of_node[node] for node in switch.nodes if node in forest.unit_of_node]
    present = {id(child) for child in unit.units}
    unit.units += [
        child
        for child in {id(child): child for child in below}.values()
        if id(child) in allowed and id(child) not in present
    ]
    new = set(unit.nodes)
    unit.nodes += [node for node in dict.fromkeys(switch.nodes) if node in allowed and node not in new]


def _claim_members(unit: SwitchUnit, forest: _Forest) -> None:
    """Make the unit the outermost one of everything below it."""
    stack = [unit]
    nodes: list[str] = []
    switches: list[str] = []
    while stack:
        current = stack.pop()
        nodes += current.nodes
        switches += current.switches
        stack += current.units
    forest.unit_of_node.update(dict.fromkeys(nodes, unit))
    forest.unit_of_switch.update(dict.fromkeys(switches, unit))


def _has_nodes(unit: SwitchUnit) -> bool:
    return next(list_nodes_under(unit), None) is not None
