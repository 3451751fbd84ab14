"""Group sets that have most of their members in common, such as the hosts of switches that belong together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

_MAX_HOLDERS = 64
"""Each thing is compared in this many different sets; beyond that only with the next one, to stay linear."""


class DisjointSets:
    """Numbers 0 to n - 1 in sets that can be joined (union-find); each set is known by its lowest member."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, number: int) -> int:
        """Return the lowest member of the number's set."""
        while self._parent[number] != number:
            # Halve the path on the way up, so that later walks are short.
            self._parent[number] = self._parent[self._parent[number]]
            number = self._parent[number]
        return number

    def join(self, a: int, b: int) -> None:
        """Make one set of the sets that hold `a` and `b`."""
        low, high = sorted((self.find(a), self.find(b)))
        self._parent[high] = low


def group_similar_sets(sets_to_group: Sequence[frozenset[object]]) -> list[list[int]]:
    """Group the sets that share at least half of each other; return their numbers, in the order of the first."""
    # Equal sets are handled once: in a real fabric most leaves of a unit hold exactly the same hosts.
    members_of_set: dict[frozenset[object], list[int]] = {}
    for number, things in enumerate(sets_to_group):
        # An empty set gets a content of its own: two switches with nothing on them have nothing in common.
        members_of_set.setdefault(things if things else frozenset({("nothing", number)}), []).append(number)
    kinds = list(members_of_set)
    sets = DisjointSets(len(kinds))
    for (a, b), shared in _count_shared(kinds).items():
        if 2 * shared >= max(len(kinds[a]), len(kinds[b])):
            sets.join(a, b)
    groups: dict[int, list[int]] = {}
    for number, kind in enumerate(kinds):
        groups.setdefault(sets.find(number), []).extend(members_of_set[kind])
    return sorted(map(sorted, groups.values()))


def _count_shared(kinds: Sequence[frozenset[object]]) -> Mapping[tuple[int, int], int]:
    """Map (one set, another) to the number of things they have in common, for pairs that have any."""
    holders: dict[object, list[int]] = {}
    for number, things in enumerate(kinds):
        for thing in things:
            holders.setdefault(thing, []).append(number)
    shared: Counter[tuple[int, int]] = Counter()
    for numbers in holders.values():
        shared.update(combinations(numbers, 2) if len(numbers) <= _MAX_HOLDERS else pairwise(numbers))
    return shared
