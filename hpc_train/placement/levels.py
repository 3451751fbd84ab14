"""From what is known of every node to the nested groups that the nodes of a job fall into."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

_SWITCH_LEVELS = ("leaf", "group")
"""Names of the lowest switch levels; those above are level3, level4, ..."""


@dataclass(frozen=True)
class NamedLevel:
    """The groups of one level, with their names: placement.fabric.Level before it has figures."""

    name: str
    group: NDArray[np.int64]
    """[nodes]: index of each node's group, dense from 0 in order of first appearance."""
    labels: tuple[str, ...]
    """[groups]: what the source calls each group."""
    switches: tuple[frozenset[tuple[str, ...]], ...] = ()
    """[groups]: paths, from the top, of the switches that make up each group; for switch levels only."""


def levels_of(
    nodes: Sequence[str],
    paths: Mapping[str, Sequence[str]] | None = None,
    domains: Mapping[str, str] | None = None,
) -> tuple[NamedLevel, ...]:
    """Node, domain (if one spans nodes), leaf, group, level3, ...: each level's groups lie within those of the next.

    paths: switches of a node, top to leaf. Where some are deeper than others, the last switch of the shorter ones
    stands for what they lack. A node without a path hangs on a switch of its own, for nothing is known of it.
    domains: the NVLink domain of a node; a node without one is a domain of its own. Leaves that share a domain count as
    one, and so do groups: what leaves the domain leaves it by all of them.
    """
    assert len(set(nodes)) == len(nodes), "a node twice in one job"
    levels = [_level("node", nodes, nodes)]
    switches = _switch_levels(nodes, paths or {})
    domain = _domain_level(nodes, domains or {})
    if domain is not None:
        switches = [_joined(level, domain.group) for level in switches]
        levels.append(domain)
    return (*levels, *switches)


def _level(name: str, keys: Sequence[Hashable], labels: Sequence[str]) -> NamedLevel:
    """Nodes with the same key are one group; its label is that of its first node."""
    index: dict[Hashable, int] = {}
    group = [index.setdefault(key, len(index)) for key in keys]
    first = dict(zip(reversed(group), reversed(labels), strict=True))
    return NamedLevel(name, np.array(group, np.int64), tuple(first[number] for number in range(len(index))))


def _switch_levels(nodes: Sequence[str], paths: Mapping[str, Sequence[str]]) -> list[NamedLevel]:
    """Innermost first. A group is all of a path down to it, so that equal names on two branches stay two groups."""
    depth = max((len(paths.get(node, ())) for node in nodes), default=0)
    full = [_filled(node, paths.get(node, ()), depth) for node in nodes]
    levels = []
    for number, end in enumerate(range(depth, 0, -1)):
        level = _level(_switch_name(number), [path[:end] for path in full], [path[end - 1] for path in full])
        levels.append(replace(level, switches=_members(level, [_switch(path[:end]) for path in full])))
    return levels


def _switch(path: tuple[str, ...]) -> tuple[str, ...]:
    """Return the switch at the end of a path, which may be padded with its last name."""
    end = len(path)
    while end > 1 and path[end - 1] == path[end - 2]:
        end -= 1
    return path[:end]


def _members(level: NamedLevel, of_node: Sequence[tuple[str, ...]]) -> tuple[frozenset[tuple[str, ...]], ...]:
    found: list[set[tuple[str, ...]]] = [set() for _ in level.labels]
    for group, switch in zip(level.group.tolist(), of_node, strict=True):
        found[group].add(switch)
    return tuple(map(frozenset, found))


def _filled(node: str, path: Sequence[str], depth: int) -> tuple[str, ...]:
    known = tuple(path) or (f"{node} alone",)
    return known + known[-1:] * (depth - len(known))


def _switch_name(number: int) -> str:
    return _SWITCH_LEVELS[number] if number < len(_SWITCH_LEVELS) else f"level{number + 1}"


def _domain_level(nodes: Sequence[str], domains: Mapping[str, str]) -> NamedLevel | None:
    """None where every domain is one node, which is a node's own NVLink."""
    names = [domains.get(node) for node in nodes]
    keys = [(name, None) if name is not None else (None, node) for name, node in zip(names, nodes, strict=True)]
    labels = [node if name is None else name for name, node in zip(names, nodes, strict=True)]
    level = _level("domain", keys, labels)
    return level if len(level.labels) < len(nodes) else None


def _joined(level: NamedLevel, inner: NDArray[np.int64]) -> NamedLevel:
    """The level with those groups made one that share a group of `inner`."""
    parent = list(range(len(level.labels)))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    first: dict[int, int] = {}
    for number, within in zip(level.group.tolist(), inner.tolist(), strict=True):
        a, b = root(number), root(first.setdefault(within, number))
        parent[max(a, b)] = min(a, b)
    members: dict[int, list[str]] = {}
    switches: dict[int, frozenset[tuple[str, ...]]] = {}
    for number, label in enumerate(level.labels):
        members.setdefault(root(number), []).append(label)
        switches[root(number)] = switches.get(root(number), frozenset()) | level.switches[number]
    roots = [root(number) for number in level.group.tolist()]
    joined = _level(level.name, roots, ["+".join(members[number]) for number in roots])
    return replace(joined, switches=tuple(switches[number] for number in dict.fromkeys(roots)))
