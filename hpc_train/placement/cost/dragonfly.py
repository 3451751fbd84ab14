"""Bound the communication of a step on a dragonfly, where it depends on how traffic between groups is routed.

Every group has cables to every other one. By minimal routing two groups talk over the cables between them only; by
Valiant's (Valiant 1982, A Scheme for Fast Parallel Communication) each message goes by a random third group, which
spreads it over all cables and uses two in place of one. Adaptive routing (UGAL, Slingshot, InfiniBand's) mixes both by
load, so it is no faster than if all cables of a group carried all that leaves it, which is what the cost model counts.
No source says how a fabric routes, so the result is an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.config.cluster import ClusterConfig
from hpc_train.placement.cost.cost_model import CostModel
from hpc_train.placement.cost.message_patterns import CountedPairs, MessagePattern
from hpc_train.placement.fabric import FabricLevel
from hpc_train.units import format_seconds

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RoutingBounds:
    """Seconds of a step's communication by each way of routing between groups."""

    groups: int
    """Groups of the whole machine."""
    ideal: float
    """All cables of a group carry what leaves it: no routing is faster."""
    valiant: float
    minimal: float

    def describe(self) -> str:
        """Describe the interval in one line."""
        low, high = format_seconds(self.ideal), format_seconds(max(self.valiant, self.minimal))
        return (
            f"dragonfly of {self.groups} groups: how it routes between them is not known, so a step's communication, "
            f"placed, takes {low} to {high}: {low} if all cables of a group carry what leaves it, as the costs assume, "
            f"{format_seconds(self.valiant)} by random detours (Valiant), {format_seconds(self.minimal)} by direct "
            "cables only (minimal)"
        )


def bound_routing(cluster: ClusterConfig, model: CostModel, order: Sequence[int]) -> RoutingBounds | None:
    """Bound the communication of one order of the nodes.

    None if the cluster is no dragonfly, does not say how many groups it has, or the job is in one group.
    """
    fabric, level = cluster.fabric, next((level for level in model.fabric.levels if level.name == "group"), None)
    if not fabric.topology.startswith("dragonfly") or level is None:
        return None
    groups = max(math.ceil(cluster.total_nodes / (fabric.nodes_per_group or math.inf)), len(level.uplink))
    if not cluster.total_nodes or groups < 3:
        return None
    orders = np.asarray(order, np.int64)[None]
    ideal = valiant = minimal = 0.0
    for term in model.terms:
        pattern = model.patterns[term.pattern]
        measured = model.measure_pattern(pattern, orders)
        fixed, seconds = float(term.compute_seconds(measured)[0]), float(measured.seconds[0])
        by_detour, direct = _count_seconds(_count_pair_loads(pattern, level, orders[0]), level, groups)
        ideal += fixed
        valiant += fixed + term.moved * (max(seconds, by_detour) - seconds)
        minimal += fixed + term.moved * (max(seconds, direct) - seconds)
    return RoutingBounds(groups, ideal, valiant, minimal)


def _count_seconds(load: Floats, level: FabricLevel, groups: int) -> tuple[float, float]:
    """Return (by detours, by direct cables) the seconds of one byte of each message. load: [from, to] messages."""
    # Each group has an equal part of its cables to each other one. A detour takes one of all cables of the sender's
    # group, and then one of all cables into the receiver's.
    direct = (load * (groups - 1) / np.minimum(level.uplink[:, None], level.uplink)).max()
    out, into = load.sum(axis=1), load.sum(axis=0)
    return float((out.max() + into.max()) / level.uplink.min()), float(direct)


def _count_pair_loads(pattern: MessagePattern, level: FabricLevel, order: NDArray[np.int64]) -> Floats:
    """Return [groups, groups]: messages from one group to another; 0 within a group."""
    count, group = len(level.uplink), level.group[order]
    if isinstance(pattern, CountedPairs):
        # Members of each row in each group: the product of two columns counts the pairs between two groups.
        members = np.zeros((len(pattern.copies), count))
        np.add.at(members, (pattern.row, group[pattern.position]), pattern.members)
        load = (members * pattern.copies[:, None]).T @ members
    else:
        load = np.zeros((count, count))
        np.add.at(load, (group[pattern.source], group[pattern.target]), pattern.weight)
    np.fill_diagonal(load, 0.0)
    return load
