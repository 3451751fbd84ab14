"""Choose the pairs of ranks that probe each level of the fabric.

A probe's messages leave one group of its level, and no group of a higher one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.fabric import NamedLevel

INSIDE_LEVEL = "inside"
GroupOfRank = NDArray[np.int64]


@dataclass(frozen=True)
class RankLevel:
    """Groups of ranks at one level of the fabric."""

    name: str
    group: GroupOfRank
    """[ranks]: the group of each."""


@dataclass(frozen=True)
class LevelProbe:
    """Pairs of ranks that exchange messages at the same time."""

    level: str
    partner: tuple[int, ...]
    """[ranks]: the rank that each exchanges messages with; itself if none."""
    pairs: int
    """Messages that leave a group at once."""


def make_rank_levels(hosts: Sequence[str], nodes: Sequence[str], levels: Sequence[NamedLevel]) -> list[RankLevel]:
    """List the levels, innermost first: every rank by itself (inside), then the given levels from the node up.

    hosts: [ranks], the node of each. nodes: in the order of the levels' groups; they must include all nodes of the job.
    """
    index = {name: at for at, name in enumerate(nodes)}
    where = np.array([index[host] for host in hosts], dtype=np.int64)
    alone = RankLevel(INSIDE_LEVEL, np.arange(len(hosts), dtype=np.int64))
    return [alone, *(RankLevel(level.name, level.group[where]) for level in levels)]


def make_probes(levels: Sequence[RankLevel]) -> list[LevelProbe]:
    """Make a probe for each level with two groups inside one of the next level; two probes if their number is odd."""
    everything = np.zeros_like(levels[0].group)
    above = [*(level.group for level in levels[1:]), everything]
    return [probe for level, parent in zip(levels, above, strict=True) for probe in _pair_groups(level, parent)]


def describe_unprobed(levels: Sequence[RankLevel], probes: Sequence[LevelProbe]) -> list[str]:
    """Return a line for each level that this job cannot probe; none for a job on one node."""
    probed = {probe.level for probe in probes}
    if len(np.unique(levels[1].group)) == 1:
        return []
    why = "not measured: it takes two of its groups within one of the next level"
    return [f"level {level.name}: {why}" for level in levels if level.name not in probed]


def _pair_groups(level: RankLevel, parent: GroupOfRank) -> list[LevelProbe]:
    """Pair neighbouring groups; an odd last group is paired with its parent's first in a second probe."""
    first, second = [], []
    for above in dict.fromkeys(parent.tolist()):
        members = _group_members(level.group, parent == above)
        first += list(zip(members[0::2], members[1::2], strict=False))
        if len(members) % 2 and len(members) > 1:
            second.append((members[-1], members[0]))
    pairs = max((min(len(a), len(b)) for a, b in first), default=0)
    # A smaller group would measure what its few ranks can send, not what the group's link can carry.
    matchings = [[(a, b) for a, b in matching if min(len(a), len(b)) == pairs] for matching in (first, second)]
    return [LevelProbe(level.name, _find_partner(matching, len(parent)), pairs) for matching in matchings if matching]


def _group_members(group: GroupOfRank, chosen: NDArray[np.bool_]) -> list[list[int]]:
    """List the chosen ranks of each group, largest group first."""
    members = {int(index): np.flatnonzero(chosen & (group == index)).tolist() for index in np.unique(group[chosen])}
    return sorted(members.values(), key=lambda ranks: (-len(ranks), ranks))


def _find_partner(matching: list[tuple[list[int], list[int]]], ranks: int) -> tuple[int, ...]:
    partner = list(range(ranks))
    for some, others in matching:
        for a, b in zip(some, others, strict=False):
            partner[a], partner[b] = b, a
    return tuple(partner)
