"""Fabric: an allocation as placement sees it: nodes in the launcher's order, and the groups that they fall into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Level:
    """One level of a tree: which nodes are in which of its groups, and what leaves a group."""

    name: str
    """What a group is: node, domain (NVLink), leaf (or scalable unit, chassis), group (pod, dragonfly group), ..."""
    group: NDArray[np.int64]
    """[nodes]: index of each node's group, dense from 0 in order of first appearance."""
    uplink: NDArray[np.float64]
    """[groups]: bytes/s that can leave a group, and as many can enter; for a switch, all its uplinks together."""
    latency: float
    """Seconds of a message that leaves a group of this level and of no higher one."""
    share: NDArray[np.float64] | None = None
    """[groups]: part of `uplink` left for this job when its neighbours use theirs.

    The group's other nodes, of other jobs, use their fair share; None: the job has all of the uplink.
    """

    @property
    def busy_uplink(self) -> NDArray[np.float64]:
        """Return [groups]: bytes/s that can leave a group next to busy neighbours."""
        return self.uplink if self.share is None else self.share


@dataclass(frozen=True)
class Fabric:
    """Nodes of one job and the levels above them."""

    nodes: tuple[str, ...]
    """In the launcher's order; a node's ranks are consecutive there."""
    ranks_per_node: int
    inside_bandwidth: float
    """Bytes/s between a rank and the others of its node, one direction."""
    inside_latency: float
    levels: tuple[Level, ...]
    """Innermost first; the first is always `node`, whose groups are the nodes. A group of a level lies within one group
    of the next."""
