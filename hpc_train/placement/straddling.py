"""Groups of ranks that lie in several groups of a level of the fabric though one could hold them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.fabric import Fabric
from hpc_train.placement.mesh import Rows


@dataclass(frozen=True)
class Crossable:
    """The groups of one axis that one group of a level could hold."""

    axis: str
    """Label of the axes."""
    level: int
    """Index in fabric.levels."""
    rows: NDArray[np.int64]
    """[rows, ranks]: positions of nodes."""
    spread: NDArray[np.int64]
    """[rows]: nodes that each sits on."""
    copies: NDArray[np.int64]

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return int(self.copies.sum())

    def straddle(self, fabric: Fabric, orders: NDArray[np.int64]) -> NDArray[np.int64]:
        """[orders]: groups that lie in several groups of the level; orders: [orders, positions]."""
        group = fabric.levels[self.level].group[orders]
        # Not the first against the last: an order may leave a group and come back to it.
        counts = [(part[self.rows] != part[self.rows[:, :1]]).any(axis=1) @ self.copies for part in group]
        return np.array(counts, np.int64)


def several(level: str) -> str:
    """The groups of a level, in the plural."""
    return "leaves" if level == "leaf" else f"{level}s"


def crossable(fabric: Fabric, groups: dict[str, Rows]) -> list[Crossable]:
    """One for every axis and level above the node where there is anything to count."""
    found = []
    for axis, rows in groups.items():
        spread = rows.spread
        for number in range(1, len(fabric.levels)):
            fits = (spread > 1) & (spread <= np.bincount(fabric.levels[number].group).max())
            if fits.any():
                found.append(Crossable(axis, number, rows.position[fits], spread[fits], rows.copies[fits]))
    return found


def straddling(
    fabric: Fabric, groups: dict[str, Rows], identity: NDArray[np.int64], placed: NDArray[np.int64]
) -> dict[str, dict[str, dict[str, int]]]:
    """As Placement.straddling has it."""
    table: dict[str, dict[str, dict[str, int]]] = {}
    for it in crossable(fabric, groups):
        before, after = it.straddle(fabric, np.stack([identity, placed])).tolist()
        counts = {"groups": it.groups, "identity": before, "placed": after}
        table.setdefault(it.axis, {})[fabric.levels[it.level].name] = counts
    return table
