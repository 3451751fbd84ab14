"""Orders of the nodes of an allocation: as good, as bad and as random as they come."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Order:
    """One side of the benchmark."""

    name: str
    nodes: tuple[str, ...]
    """As the launcher gives them."""
    placement: str
    """launch.placement of its training."""
    what: str


def orders(nodes: Sequence[str], paths: Mapping[str, Sequence[str]], seed: int) -> tuple[Order, ...]:
    """paths: switches of each node, top to leaf. seed: of the random order."""
    by_leaf = tuple(sorted(nodes, key=lambda node: (tuple(paths[node]), nodes.index(node))))
    bad = dealt(nodes, paths)
    mixed = list(nodes)
    random.Random(seed).shuffle(mixed)
    return (
        Order("by_leaf", by_leaf, "launcher", "nodes of a leaf next to one another"),
        Order("identity", bad, "launcher", "dealt out over the leaves, as a launcher may"),
        Order("random", tuple(mixed), "launcher", f"shuffled with seed {seed}"),
        Order("placed", bad, "strict", "the dealt order, placed by hpc_train"),
    )


def dealt(nodes: Sequence[str], paths: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """One node of each leaf in turn."""
    leaves: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        leaves.setdefault(tuple(paths[node]), []).append(node)
    return tuple(node for row in zip_longest(*leaves.values()) for node in row if node is not None)
