"""Panel: the content of one side of a picture, without positions on paper.

Also decided here: which levels are worth a row of boxes, and whether each node is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.hostlist import natural_key
from hpc_train.placement.diagram.canvas import Canvas
from hpc_train.placement.fabric import NamedLevel


@dataclass(frozen=True)
class Panel:
    """One order of ranks on one fabric."""

    key: str
    """Prefix of the panel's SVG ids: before, after or here."""
    title: str
    levels: tuple[NamedLevel, ...]
    """Levels of the fabric, innermost first; the first is `node`."""
    gpus: int
    """GPUs of a node, each drawn as a cell."""
    colour: NDArray[np.int64] | None = None
    """[nodes, gpus]: number of the axis' group that the GPU's rank is in."""
    place: NDArray[np.int64] | None = None
    """[nodes, gpus]: number of the GPU's rank in its group."""
    first_rank: NDArray[np.int64] | None = None
    """[nodes]: lowest rank on the node."""
    load: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """[groups] by level: seconds per step for which the link out of a group is busy."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.levels[0].labels

    @cached_property
    def order(self) -> list[int]:
        """Nodes in drawing order.

        Nodes of one group are together at every level, and groups are sorted by name, so that no lines cross.
        """
        names = [
            # The number tells two groups of one name apart.
            [(natural_key(label), number) for number, label in enumerate(level.labels)]
            for level in reversed(self.levels)
        ]
        groups = [level.group.tolist() for level in reversed(self.levels)]
        keys = [
            tuple(name[group[node]] for name, group in zip(names, groups, strict=True)) for node in range(self.nodes)
        ]
        return sorted(range(self.nodes), key=keys.__getitem__)

    @property
    def nodes(self) -> int:
        return len(self.names)

    @property
    def heaviest(self) -> float:
        """Seconds per step of the busiest link."""
        return max((float(load.max()) for load in self.load.values() if load.size), default=0.0)

    def get_load(self, level: NamedLevel, group: int) -> float | None:
        """Return the seconds that a group's link is busy; None if unknown, as in a picture without a run."""
        load = self.load.get(level.name)
        return None if load is None else float(load[group])

    def list_members(self, level: NamedLevel) -> list[list[int]]:
        """Return [groups]: the nodes of each group, in drawing order."""
        members: list[list[int]] = [[] for _ in level.labels]
        for node in self.order:
            members[int(level.group[node])].append(node)
        return members


@dataclass(frozen=True)
class Layout:
    """A way to put a panel on paper: COLUMN_LAYOUT or ROW_LAYOUT."""

    measure: Callable[[Panel], tuple[float, float]]
    """Returns the panel's width and height, points."""
    draw: Callable[[Canvas, Panel, float, float, float], None]
    """Draws the panel; takes its left and top edge, and the seconds of the busiest link of the whole picture."""
    has_rank_numbers: Callable[[Panel], bool]
    """Whether GPUs are labelled with the place of their rank in its group."""


MAX_DRAWN_NODES = 64
"""Nodes that are drawn one by one."""
MAX_COLUMNS = 8
_AND = " / "


@dataclass(frozen=True)
class DrawnLevel:
    """One row of boxes."""

    level: NamedLevel
    load: NDArray[np.float64] | None
    """[groups]"""

    def get_load(self, group: int) -> float | None:
        return None if self.load is None else float(self.load[group])


def select_drawn_levels(panel: Panel) -> list[DrawnLevel]:
    """List the levels above the nodes, innermost first.

    Levels with the same groups are drawn as one, with the heavier load.
    """
    drawn: list[DrawnLevel] = []
    for level in panel.levels[1:]:
        load = panel.load.get(level.name)
        if drawn and np.array_equal(drawn[-1].level.group, level.group):
            drawn[-1] = DrawnLevel(_join_names(drawn[-1].level, level), _choose_heavier(drawn[-1].load, load))
        elif not drawn or len(drawn[-1].level.labels) > 1:
            drawn.append(DrawnLevel(level, load))
    return drawn


def draws_each_node(panel: Panel, drawn: list[DrawnLevel]) -> bool:
    """Whether every node gets its own cells."""
    columns = len(drawn[0].level.labels) if drawn else 1
    return len(panel.names) <= MAX_DRAWN_NODES and columns <= MAX_COLUMNS


def _join_names(inner: NamedLevel, outer: NamedLevel) -> NamedLevel:
    """Name the groups of two levels that are the same: by both names, unless one contains the other."""
    if inner.labels == outer.labels:
        return outer
    pairs = zip(inner.labels, outer.labels, strict=True)
    labels = tuple(a if b in a.split(_AND) else f"{a}{_AND}{b}" for a, b in pairs)
    return NamedLevel(inner.name, inner.group, labels)


def _choose_heavier(one: NDArray[np.float64] | None, other: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    if one is None or other is None:
        return one if other is None else other
    return np.maximum(one, other)
