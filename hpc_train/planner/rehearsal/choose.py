"""Which ranks are built: those that differ from one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.config.degrees import Degrees
from hpc_train.errors import UserError
from hpc_train.planner.rehearsal.world import rank_at

FEW = 16
"""Worlds up to this size are built whole."""
_DATA_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Chosen:
    """Ranks, in order."""

    built: tuple[int, ...]
    stepped: tuple[int, ...]
    """Of these, the ones that also train a step."""


def choose(which: str, degrees: Degrees) -> Chosen:
    """which: all, sample, or ranks separated by commas, which are then all stepped.

    A sample has one rank of each pipeline rank, and, where placement on the other axes is seen, the last rank of each
    of them: the parts that do not divide are there. Steps are trained by the first, the second and the last pipeline
    rank: of those in the middle the second holds most. Raises UserError for anything else.
    """
    if which not in ("all", "sample"):
        ranks = _given(which, degrees)
        return Chosen(ranks, ranks)
    everybody = which == "all" or degrees.world <= FEW
    built = tuple(range(degrees.world)) if everybody else _sample(degrees)
    stages = dict.fromkeys((0, min(1, degrees.pp - 1), degrees.pp - 1))
    return Chosen(built, tuple(rank_at({"pp": stage}, degrees) for stage in stages))


def _sample(degrees: Degrees) -> tuple[int, ...]:
    last = {axis: getattr(degrees, axis) - 1 for axis in _DATA_AXES}
    found = {rank_at({"pp": stage}, degrees) for stage in range(degrees.pp)}
    found |= {rank_at({"pp": degrees.pp // 2, axis: last[axis]}, degrees) for axis in _DATA_AXES}
    found |= {rank_at({"pp": stage, **last}, degrees) for stage in (0, degrees.pp - 1)}
    return tuple(sorted(found))


def _given(text: str, degrees: Degrees) -> tuple[int, ...]:
    words: Sequence[str] = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UserError(f"--ranks {text}: give all, sample, or ranks separated by commas, such as 0,8,127")
    ranks = sorted({int(word) for word in words})
    if ranks[-1] >= degrees.world:
        raise UserError(f"--ranks {ranks[-1]}: the world has {degrees.world} ranks, counted from 0 ({degrees})")
    return tuple(ranks)
