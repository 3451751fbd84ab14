"""Recognise networks whose switches are cabled to others of their own level: dragonfly, dragonfly+ and torus.

Each is recognised by its defining property, checked on every cable, never by a name. A network that fits none of them
is treated as a network of leaves, and a note says so.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

Neighbours = Mapping[str, Collection[str]]
"""Switch -> the switches that it is cabled to."""

MIN_GROUPS = 3
"""Minimum number of groups of a dragonfly; fewer could be two cliques that happen to be joined."""
MAX_DIMENSIONS = 5
_THRESHOLDS = 64
_STARTS = 8
"""Switches from which the distances of a torus are checked."""


@dataclass(frozen=True)
class DirectNetwork:
    """A network whose switches are joined directly."""

    kind: str
    """dragonfly, dragonfly+ or torus."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Switches of each group of a dragonfly."""
    extent: tuple[int, ...] = ()
    """Switches of a torus along each of its dimensions, the longest first."""

    def describe(self) -> str:
        """Describe in a few words."""
        if self.kind == "torus":
            return f"a torus of {' x '.join(map(str, self.extent))} switches"
        sizes = sorted({len(group) for group in self.groups})
        each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        return f"a {self.kind} of {len(self.groups)} groups of {each} switches"


def recognise_direct_network(levels: Mapping[str, int], neighbours: Neighbours) -> DirectNetwork | None:
    """Recognise the network of the switches of a subnet; None if it is a tree or an unknown network.

    levels: of each switch, 0 where hosts hang. neighbours: of each switch, among those of `levels`.
    """
    top = max(levels.values(), default=0)
    if any(levels[a] == levels[b] < top for a, others in neighbours.items() for b in others):
        return None
    if top:
        return _recognise_dragonfly_plus(levels, neighbours, top)
    return _recognise_dragonfly(neighbours) or _recognise_torus(neighbours)


def _recognise_dragonfly(neighbours: Neighbours) -> DirectNetwork | None:
    """Recognise groups of at least three fully connected switches, every two of which are also connected."""
    neighbour_sets = {switch: set(others) for switch, others in neighbours.items()}
    # Two switches of a group share the rest of it as neighbours; the two ends of a global cable share fewer. How many
    # fewer hangs on the cables, so every threshold is tried, and what it gives is checked.
    shared = {(a, b): len(neighbour_sets[a] & neighbour_sets[b]) for a in neighbour_sets for b in neighbour_sets[a]}
    for threshold in sorted(set(shared.values()) - {0}, reverse=True)[:_THRESHOLDS]:
        inside = {a: [b for b in neighbour_sets[a] if shared[a, b] >= threshold] for a in neighbour_sets}
        groups = list(_find_components(inside))
        are_cliques = all(
            len(group) >= 3 and all(neighbour_sets[a] >= set(group) - {a} for a in group) for group in groups
        )
        if are_cliques and _are_all_joined(groups, neighbour_sets):
            return DirectNetwork("dragonfly", tuple(map(tuple, groups)))
    return None


def _recognise_dragonfly_plus(levels: Mapping[str, int], neighbours: Neighbours, top: int) -> DirectNetwork | None:
    """Recognise trees whose highest switches are joined to those of every other tree."""
    inside = {
        a: [b for b in others if not levels[a] == levels[b] == top] for a, others in neighbours.items() if a in levels
    }
    groups = list(_find_components(inside))
    neighbour_sets = {switch: set(others) for switch, others in neighbours.items()}
    if any(levels[switch] == top for switch in neighbour_sets) and _are_all_joined(groups, neighbour_sets):
        return DirectNetwork("dragonfly+", tuple(map(tuple, groups)))
    return None


def _are_all_joined(groups: Sequence[Sequence[str]], neighbour_sets: Mapping[str, set[str]]) -> bool:
    if len(groups) < MIN_GROUPS:
        return False
    group_of = {switch: number for number, group in enumerate(groups) for switch in group}
    joined = {
        tuple(sorted((group_of[a], group_of[b])))
        for a in neighbour_sets
        for b in neighbour_sets[a]
        if group_of[a] != group_of[b]
    }
    return len(joined) == math.comb(len(groups), 2)


def _find_components(neighbours: Neighbours) -> Iterator[list[str]]:
    """Yield the sets of switches that are joined, each in the source's order."""
    order = {switch: index for index, switch in enumerate(neighbours)}
    seen: set[str] = set()
    for start in neighbours:
        if start in seen:
            continue
        members, queue = {start}, deque([start])
        while queue:
            new = [other for other in neighbours[queue.popleft()] if other not in members]
            members.update(new)
            queue.extend(dict.fromkeys(new))
        seen |= members
        yield sorted(members, key=order.__getitem__)


def _recognise_torus(neighbours: Neighbours) -> DirectNetwork | None:
    """Recognise a product of rings by its switches' degrees, and by how many switches are how far from a switch."""
    degrees = {len(set(others)) for others in neighbours.values()}
    if len(degrees) != 1 or len(neighbours) < 8 or degrees == {len(neighbours) - 1}:
        return None
    (degree,) = degrees
    starts = list(neighbours)[:: max(1, len(neighbours) // _STARTS)][:_STARTS]
    profiles = [_count_by_distance(neighbours, start) for start in starts]
    if any(profile != profiles[0] for profile in profiles):
        return None
    for extent in _list_extents(len(neighbours), MAX_DIMENSIONS):
        if sum(1 if length == 2 else 2 for length in extent) == degree and _predict_profile(extent) == profiles[0]:
            return DirectNetwork("torus", extent=extent)
    return None


def _count_by_distance(neighbours: Neighbours, start: str) -> Counter[int]:
    distance, queue = {start: 0}, deque([start])
    while queue:
        at = queue.popleft()
        for other in neighbours[at]:
            if other not in distance:
                distance[other] = distance[at] + 1
                queue.append(other)
    return Counter(distance.values())


def _list_extents(switches: int, dimensions: int, longest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a product of at most `dimensions` factors above 1, largest factor first."""
    if switches == 1:
        yield ()
    for length in range(min(switches, longest or switches), 1, -1) if dimensions else ():
        if switches % length == 0:
            for rest in _list_extents(switches // length, dimensions - 1, length):
                yield (length, *rest)


def _predict_profile(extent: Sequence[int]) -> Counter[int]:
    """Count the switches of a torus by their distance from one of them."""
    profile = Counter({0: 1})
    for length in extent:
        ring = Counter(min(index, length - index) for index in range(length))
        profile_of_both: Counter[int] = Counter()
        for (a, count_a), (b, count_b) in itertools.product(profile.items(), ring.items()):
            profile_of_both[a + b] += count_a * count_b
        profile = profile_of_both
    return profile
