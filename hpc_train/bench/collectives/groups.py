"""Which ranks talk to each other: the groups of every mesh axis, and the whole world."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_train.config.degrees import AXES, Degrees

WORLD = "world"


@dataclass(frozen=True)
class Group:
    """This rank's group of one axis; the axis's other groups run at the same time, as they do in training."""

    axis: str
    """A mesh axis, or world."""
    ranks: tuple[int, ...]
    """In the order of the group."""
    index: int
    """Of this rank among them."""
    groups: int
    """How many of them the axis has."""


def groups_of(degrees: Degrees, rank: int) -> list[Group]:
    """Those of every axis with a degree above 1, outermost first, then the world where no axis is the whole of it."""
    found = [_axis_group(degrees, axis, rank) for axis in AXES if getattr(degrees, axis) > 1]
    if not any(group.groups == 1 for group in found):
        found.append(Group(WORLD, tuple(range(degrees.world)), rank, 1))
    return found


def _axis_group(degrees: Degrees, axis: str, rank: int) -> Group:
    at = AXES.index(axis)
    size, stride = degrees.sizes[at], math.prod(degrees.sizes[at + 1 :])
    index = rank // stride % size
    first = rank - index * stride
    return Group(axis, tuple(first + i * stride for i in range(size)), index, degrees.world // size)
