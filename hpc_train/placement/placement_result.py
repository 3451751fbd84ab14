"""Placement: the result of a search, and its JSON.

The keys are what scripts read of `topology place --json`, and what a run keeps in rankmap.json: they stay.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CommunicationCost:
    """Modelled communication of one step, seconds; nothing overlaps."""

    total: float
    per_axis: dict[str, float]
    """Seconds by axis, or by several axes joined by +."""


NO_NEIGHBOURS, FAIR_SHARE = "none", "fair_share"


@dataclass(frozen=True)
class CostCase:
    """Modelled seconds of a step for both orders, under one assumption about unknown figures."""

    taper: float | None
    """Taper assumed for levels where it is unknown; None: all are known."""
    neighbours: str
    """NO_NEIGHBOURS: other jobs use none of the uplinks; FAIR_SHARE: they use their fair share.

    That is, the other nodes below a switch use as much of its uplink as this job's nodes do.
    """
    identity: float
    placed: float


@dataclass(frozen=True)
class Placement:
    """An order of whole nodes, and its cost compared with that of the launcher's order."""

    nodes: tuple[int, ...]
    """nodes[i]: index, in the launcher's order, of the node that holds ranks i * ranks_per_node and following."""
    ranks_per_node: int
    identity: CommunicationCost
    """Cost of the launcher's order."""
    placed: CommunicationCost
    straddling: dict[str, dict[str, dict[str, int]]]
    """Axis -> level -> {"groups", "identity", "placed"}: groups of the axis whose ranks fall into several groups of the
    level though one could hold them, of how many, before and after."""
    seconds: float
    """Time of the search."""
    reason: str
    """One line: what was gained, or why nothing is to be gained."""
    cases: tuple[CostCase, ...] = ()
    """Costs under each assumption; the first is that of `identity` and `placed`."""
    notes: tuple[str, ...] = ()
    """Notes for the user on how the nodes were found, one line each."""

    @property
    def rank_to_slot(self) -> list[int]:
        """Slot of every rank: launcher's node index * ranks_per_node + local rank."""
        size = self.ranks_per_node
        return [node * size + local for node in self.nodes for local in range(size)]


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """Convert to the JSON of `topology place`."""
    axes = placement.identity.per_axis
    return {
        "world": len(placement.nodes) * placement.ranks_per_node,
        "rank_to_slot": placement.rank_to_slot,
        "cost": {"identity": placement.identity.total, "placed": placement.placed.total},
        "per_axis": {axis: {"identity": axes[axis], "placed": placement.placed.per_axis[axis]} for axis in axes},
        "straddling": placement.straddling,
        "seconds": placement.seconds,
        "reason": placement.reason,
        "cases": [asdict(case) for case in placement.cases],
        "notes": list(placement.notes),
    }
