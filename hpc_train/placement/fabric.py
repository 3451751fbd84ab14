"""Fabric: the nodes of a job in the launcher's order, and the nested groups they fall into.

NamedLevel has the groups alone, from where the nodes are (node, NVLink domain, leaf, group, level3, ...). Fabric adds
the bandwidth out of each group, and answers the questions that the search asks about the tree.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.similar_sets import DisjointSets

_SWITCH_LEVELS = ("leaf", "group")
"""Names of the two lowest switch levels; those above are level3, level4, ..."""


@dataclass(frozen=True)
class NamedLevel:
    """The groups of one level with their names; a FabricLevel before it has bandwidths."""

    name: str
    group: NDArray[np.int64]
    """[nodes]: index of each node's group, dense from 0 in order of first appearance."""
    labels: tuple[str, ...]
    """[groups]: what the source calls each group."""
    switches: tuple[frozenset[tuple[str, ...]], ...] = ()
    """[groups]: paths, from the top, of the switches that make up each group; for switch levels only."""


def build_levels(
    nodes: Sequence[str],
    paths: Mapping[str, Sequence[str]] | None = None,
    domains: Mapping[str, str] | None = None,
) -> tuple[NamedLevel, ...]:
    """Build the levels from the node outwards: node, domain (if one spans nodes), leaf, group, level3, ...

    Each level's groups lie within those of the next. paths: switches of a node, top to leaf. If some paths are shorter,
    their last switch stands for the missing ones. A node without a path is alone on a switch, because nothing is known
    of it. domains: NVLink domain of a node; a node without one is a domain of its own. Leaves that share a domain count
    as one, and so do groups: traffic leaves the domain by all of them.
    """
    assert len(set(nodes)) == len(nodes), "a node twice in one job"
    levels = [_make_named_level("node", nodes, nodes)]
    switches = _build_switch_levels(nodes, paths or {})
    domain = _build_domain_level(nodes, domains or {})
    if domain is not None:
        # A level must hold whole groups of the one below: a domain that spans two leaves makes one of them.
        switches = [_join_groups(level, domain.group) for level in switches]
        levels.append(domain)
    return (*levels, *switches)


def _make_named_level(name: str, keys: Sequence[Hashable], labels: Sequence[str]) -> NamedLevel:
    """Group the nodes with the same key; a group has the label of its first node."""
    index: dict[Hashable, int] = {}
    group = [index.setdefault(key, len(index)) for key in keys]
    first = dict(zip(reversed(group), reversed(labels), strict=True))
    return NamedLevel(name, np.array(group, np.int64), tuple(first[number] for number in range(len(index))))


def _build_switch_levels(nodes: Sequence[str], paths: Mapping[str, Sequence[str]]) -> list[NamedLevel]:
    """Build the switch levels, innermost first.

    A group's key is its whole path, so that equal names on two branches stay two groups.
    """
    depth = max((len(paths.get(node, ())) for node in nodes), default=0)
    full = [_fill_path(node, paths.get(node, ()), depth) for node in nodes]
    levels = []
    for number, end in enumerate(range(depth, 0, -1)):
        level = _make_named_level(
            _name_switch_level(number), [path[:end] for path in full], [path[end - 1] for path in full]
        )
        levels.append(
            replace(level, switches=_collect_switches(level, [_get_last_switch(path[:end]) for path in full]))
        )
    return levels


def _get_last_switch(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the switch at the end of a path, which may be padded with its last name."""
    end = len(path)
    while end > 1 and path[end - 1] == path[end - 2]:
        end -= 1
    return path[:end]


def _collect_switches(level: NamedLevel, of_node: Sequence[tuple[str, ...]]) -> tuple[frozenset[tuple[str, ...]], ...]:
    switches: list[set[tuple[str, ...]]] = [set() for _ in level.labels]
    for group, switch in zip(level.group.tolist(), of_node, strict=True):
        switches[group].add(switch)
    return tuple(map(frozenset, switches))


def _fill_path(node: str, path: Sequence[str], depth: int) -> tuple[str, ...]:
    switches = tuple(path) or (f"{node} alone",)
    # All paths get one length, so that level i is at the same distance from the node everywhere.
    return switches + switches[-1:] * (depth - len(switches))


def _name_switch_level(number: int) -> str:
    return _SWITCH_LEVELS[number] if number < len(_SWITCH_LEVELS) else f"level{number + 1}"


def _build_domain_level(nodes: Sequence[str], domains: Mapping[str, str]) -> NamedLevel | None:
    """Build the level of NVLink domains; None if every domain is one node, whose NVLink is inside the node."""
    names = [domains.get(node) for node in nodes]
    # A domain and a node may have the same name; the other half of the key tells them apart.
    keys = [(name, None) if name is not None else (None, node) for name, node in zip(names, nodes, strict=True)]
    labels = [node if name is None else name for name, node in zip(names, nodes, strict=True)]
    level = _make_named_level("domain", keys, labels)
    return level if len(level.labels) < len(nodes) else None


def _join_groups(level: NamedLevel, inner: NDArray[np.int64]) -> NamedLevel:
    """Join those groups of a level that share a group of `inner`."""
    sets = DisjointSets(len(level.labels))
    first: dict[int, int] = {}
    for number, within in zip(level.group.tolist(), inner.tolist(), strict=True):
        sets.join(number, first.setdefault(within, number))
    members: dict[int, list[str]] = {}
    switches: dict[int, frozenset[tuple[str, ...]]] = {}
    for number, label in enumerate(level.labels):
        members.setdefault(sets.find(number), []).append(label)
        switches[sets.find(number)] = switches.get(sets.find(number), frozenset()) | level.switches[number]
    roots = [sets.find(number) for number in level.group.tolist()]
    joined = _make_named_level(level.name, roots, ["+".join(members[number]) for number in roots])
    return replace(joined, switches=tuple(switches[number] for number in dict.fromkeys(roots)))


@dataclass(frozen=True)
class FabricLevel:
    """One level of the tree: the group of each node, and the bandwidth out of each group."""

    name: str
    """Name of the level: node, domain (NVLink), leaf (or scalable unit, chassis), group (pod, dragonfly group), ..."""
    group: NDArray[np.int64]
    """[nodes]: index of each node's group, dense from 0 in order of first appearance."""
    uplink: NDArray[np.float64]
    """[groups]: bytes/s that can leave a group, and as many can enter; for a switch, all its uplinks together."""
    latency: float
    """Latency in seconds of a message that leaves a group of this level, but no group of a higher one."""
    share: NDArray[np.float64] | None = None
    """[groups]: part of `uplink` left for this job when its neighbours use theirs.

    The group's other nodes, of other jobs, use their fair share; None: the job has all of the uplink.
    """
    rails: int = 1
    """Equal parts of each uplink, one a rail: a message between two ranks has only that of its rail."""

    @property
    def busy_uplink(self) -> NDArray[np.float64]:
        """Return [groups]: bytes/s that can leave a group next to busy neighbours."""
        return self.uplink if self.share is None else self.share


@dataclass(frozen=True)
class Fabric:
    """The nodes of one job and the levels above them."""

    nodes: tuple[str, ...]
    """Nodes in the launcher's order, in which a node's ranks are consecutive."""
    ranks_per_node: int
    inside_bandwidth: float
    """Bytes/s between a rank and the others of its node, one direction."""
    inside_latency: float
    levels: tuple[FabricLevel, ...]
    """Innermost first; the first is always `node`, whose groups are the nodes. A group of a level lies within one group
    of the next."""
    pair_bandwidth: float = math.inf
    """Bytes/s between two ranks of a node over the link that these two have, one direction; infinite if a rank can
    send all of inside_bandwidth to one other."""

    def get_inside_bandwidth(self, peers: int) -> float:
        """Return bytes/s between a rank and `peers` others of its node together, one direction."""
        return min(self.inside_bandwidth, max(peers, 1) * self.pair_bandwidth)


_EQUAL = 1e-6
"""Relative difference that still counts as equal, since sums in another order are rounded differently."""


def find_parents(fabric: Fabric, number: int) -> NDArray[np.int64]:
    """Return [groups of level `number`]: the group of the next level that holds each."""
    group, above = fabric.levels[number].group, fabric.levels[number + 1].group
    result = np.zeros(group.max() + 1, np.int64)
    result[group] = above
    return result


def find_tapered_levels(fabric: Fabric) -> tuple[int, ...]:
    """Return the numbers of the levels above the node that are tapered.

    Such a level has a group that less can leave than its own parts can send, at least next to busy neighbours.
    """
    return tuple(number for number in range(1, len(fabric.levels)) if _is_tapered(fabric, number))


def _is_tapered(fabric: Fabric, number: int) -> bool:
    inner, level = fabric.levels[number - 1], fabric.levels[number]
    parent = find_parents(fabric, number - 1)
    # bincount with weights adds up, for each group, what its parts can send.
    alone = level.uplink < np.bincount(parent, inner.uplink) * (1 - _EQUAL)
    busy = level.busy_uplink < np.bincount(parent, inner.busy_uplink) * (1 - _EQUAL)
    return bool((alone | busy).any())


def is_uniform(fabric: Fabric) -> bool:
    """Whether all orders of the nodes cost the same: one level, and all nodes alike."""
    node = fabric.levels[0]
    return len(fabric.levels) == 1 and bool((node.uplink == node.uplink[0]).all())


def pluralise_level(level: str) -> str:
    """Return the plural of a level's name, for headings and messages: leaf -> leaves."""
    plurals = {"domain": "NVLink domains", "all": "no switch is known", "leaf": "leaves"}
    return plurals.get(level, f"{level} switches" if level.startswith("level") else f"{level}s")
