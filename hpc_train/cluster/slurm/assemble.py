"""From the switches (blocks, rings) that a text lists to a Cluster: what may not be is refused, levels are counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from hpc_train.cluster.spec import Cluster, Node, Switch
from hpc_train.errors import UserError

LARGEST = 1 << 20
"""Names in all lists of one text; no real cluster comes near."""


_INSIDE_UNUSED = (
    "which nodes of a ring or torus are neighbours is not used: each counts as one switch that all its nodes hang on"
)


@dataclass(frozen=True)
class Unit:
    """One switch, block or ring as a text lists it."""

    name: str
    line: int
    nodes: tuple[str, ...] = ()
    """What hangs on it directly (as scontrol lists it: everything below it)."""
    switches: tuple[str, ...] = ()
    level: int = 0
    """What the text says; counts only where a switch below is not in the text."""
    link_speed: int | None = None
    """LinkSpeed=; None if not given, or if it is Slurm's default of 1."""


def gather(units: Iterable[Unit], file: str) -> dict[str, Unit]:
    """By name, in order. UserError for a name that is there twice, or for more names than any machine has."""
    found: dict[str, Unit] = {}
    size = 0
    for unit in units:
        if unit.name in found:
            raise UserError(f"{file}:{unit.line}: {unit.name} is defined in line {found[unit.name].line} already")
        found[unit.name] = unit
        size += len(unit.nodes) + len(unit.switches)
        if size > LARGEST:
            raise UserError(f"{file}:{unit.line}: more than {LARGEST} names; not a real machine")
    return found


def cluster(kind: str, units: Mapping[str, Unit], file: str, nodes: Iterable[str] = ()) -> Cluster:
    """The cluster of these units, in their order; `nodes` come before those that the units name.

    A switch below may lack a unit of its own: it is named by the one above and nothing else is known of it.
    Raises UserError, with the line, where switches hang on each other in a circle.
    """
    levels = _levels(units, file)
    everything = dict.fromkeys([*nodes, *(node for unit in units.values() for node in unit.nodes)])
    switches = tuple(
        Switch(unit.name, levels[unit.name], unit.nodes, unit.switches, link_speed=unit.link_speed)
        for unit in units.values()
    )
    notes = (_INSIDE_UNUSED,) if kind in ("slurm_ring", "slurm_torus3d") else ()
    return Cluster(kind, tuple(Node(name) for name in everything), switches=switches, notes=notes)


def demand_defined(units: Mapping[str, Unit], file: str) -> None:
    """UserError for a switch below another that no line defines."""
    for unit in units.values():
        missing = next((child for child in unit.switches if child not in units), None)
        if missing is not None:
            raise UserError(f"{file}:{unit.line}: {unit.name} has switch {missing}, which no line defines")


def demand_disjoint(units: Mapping[str, Unit], file: str) -> None:
    """UserError for a node that hangs on two units."""
    holder: dict[str, Unit] = {}
    for unit in units.values():
        for node in unit.nodes:
            before = holder.setdefault(node, unit)
            if before is not unit:
                where = f"{before.name} (line {before.line})"
                raise UserError(
                    f"{file}:{unit.line}: node {node} is in {unit.name} and in {where}; expected one of them"
                )


def bottom_up(units: Mapping[str, Unit], file: str) -> list[str]:
    """All names, those without a unit too, each after everything below it. UserError for a circle."""
    try:
        return list(TopologicalSorter({unit.name: unit.switches for unit in units.values()}).static_order())
    except CycleError as error:
        circle = error.args[1]
        line = min(units[name].line for name in circle)
        raise UserError(f"{file}:{line}: {' below '.join(circle[:5])}: switches in a circle; expected a tree") from None


def link_speed(number: int) -> int | None:
    """Convert LinkSpeed= to the form of Unit.link_speed."""
    return number if number > 1 else None


def _levels(units: Mapping[str, Unit], file: str) -> dict[str, int]:
    levels: dict[str, int] = {}
    for name in bottom_up(units, file):
        unit = units.get(name)
        if unit is None:
            continue
        below = [levels.get(child) for child in unit.switches]
        counted = max((1 + (level or 0) for level in below), default=0)
        levels[name] = max(counted, unit.level) if None in below else counted
    return levels
