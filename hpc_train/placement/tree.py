"""Facts of a fabric's tree that the search needs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.fabric import Fabric

_EQUAL = 1e-6
"""Relative: sums of the same bandwidths in another order."""


def parents(fabric: Fabric, number: int) -> NDArray[np.int64]:
    """[groups of level `number`]: the group of the next level that each lies in."""
    group, above = fabric.levels[number].group, fabric.levels[number + 1].group
    result = np.zeros(group.max() + 1, np.int64)
    result[group] = above
    return result


def tapered(fabric: Fabric) -> tuple[int, ...]:
    """Return the numbers of the levels above the node that are tapered.

    Such a level has a group that less can leave than its own parts can send, at least next to busy neighbours.
    """
    return tuple(number for number in range(1, len(fabric.levels)) if _tapers(fabric, number))


def _tapers(fabric: Fabric, number: int) -> bool:
    inner, level = fabric.levels[number - 1], fabric.levels[number]
    parent = parents(fabric, number - 1)
    alone = level.uplink < np.bincount(parent, inner.uplink) * (1 - _EQUAL)
    beside = level.busy_uplink < np.bincount(parent, inner.busy_uplink) * (1 - _EQUAL)
    return bool((alone | beside).any())


def uniform(fabric: Fabric) -> bool:
    """Whether no order of nodes differs from another: one level, and all nodes alike."""
    node = fabric.levels[0]
    return len(fabric.levels) == 1 and bool((node.uplink == node.uplink[0]).all())
