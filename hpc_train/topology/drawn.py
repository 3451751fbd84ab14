"""Which levels of a panel are worth a row of boxes, and which of the two layouts a panel gets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.levels import NamedLevel
from hpc_train.topology.panel import Panel

MOST_NODES = 64
"""Nodes that are drawn one by one."""
MOST_COLUMNS = 8
_AND = " / "


@dataclass(frozen=True)
class Drawn:
    """One row of boxes."""

    level: NamedLevel
    load: NDArray[np.float64] | None
    """[groups]"""

    def load_of(self, group: int) -> float | None:
        return None if self.load is None else float(self.load[group])


def drawn_levels(panel: Panel) -> list[Drawn]:
    """Those above the nodes, innermost first; of levels that have the same groups one, with the heavier load."""
    drawn: list[Drawn] = []
    for level in panel.levels[1:]:
        load = panel.load.get(level.name)
        if drawn and np.array_equal(drawn[-1].level.group, level.group):
            drawn[-1] = Drawn(_named(drawn[-1].level, level), _heavier(drawn[-1].load, load))
        elif not drawn or len(drawn[-1].level.labels) > 1:
            drawn.append(Drawn(level, load))
    return drawn


def one_by_one(panel: Panel, drawn: list[Drawn]) -> bool:
    """Whether every node gets its own cells."""
    columns = len(drawn[0].level.labels) if drawn else 1
    return len(panel.names) <= MOST_NODES and columns <= MOST_COLUMNS


def _named(inner: NamedLevel, outer: NamedLevel) -> NamedLevel:
    """Both names of every group, unless they are one name; of a group that has no leaves of its own, the group."""
    if inner.labels == outer.labels:
        return outer
    pairs = zip(inner.labels, outer.labels, strict=True)
    labels = tuple(a if b in a.split(_AND) else f"{a}{_AND}{b}" for a, b in pairs)
    return NamedLevel(inner.name, inner.group, labels)


def _heavier(one: NDArray[np.float64] | None, other: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
    return np.maximum(one, other) if one is not None and other is not None else one if other is None else other
