"""A world of any size as one of its ranks sees it, without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hpc_train.api import World
from hpc_train.compat import pretend_group
from hpc_train.config.degrees import AXES, Degrees
from hpc_train.runtime.start import shut_down, world_of


@contextmanager
def pretended_world(rank: int, degrees: Degrees) -> Iterator[World]:
    """The world of `rank`, whose collectives return at once and move nothing; left again afterwards.

    Its device is the CPU: what is made there inside of compat_rehearsal.Pretending takes no memory.
    """
    pretend_group(rank, degrees.world)
    try:
        yield world_of(rank, degrees.world, 0, torch.device("cpu"), degrees)
    finally:
        shut_down()


def coordinates(rank: int, degrees: Degrees) -> dict[str, int]:
    """Index of a rank on every axis; the last axis varies fastest."""
    found = {}
    for axis, size in reversed(list(zip(AXES, degrees.sizes, strict=True))):
        rank, found[axis] = divmod(rank, size)
    return found


def rank_at(at: dict[str, int], degrees: Degrees) -> int:
    """The rank with these coordinates; an axis that is left out is at 0."""
    rank = 0
    for axis, size in zip(AXES, degrees.sizes, strict=True):
        rank = rank * size + at.get(axis, 0)
    return rank
