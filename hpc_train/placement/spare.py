"""A failed node: the nearest spare takes its place, and no other rank moves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from hpc_train.errors import UserError
from hpc_train.placement.fabric import Fabric


def replace_failed(fabric: Fabric, order: Sequence[int], failed: Collection[int]) -> tuple[int, ...]:
    """The order with a spare at every failed node's position.

    fabric: of all nodes, spares too. order: node at each position; the nodes that it does not name are spares, unless
    they have failed. A spare of the same innermost group is taken first, then one of the next level, then any; as many
    failed nodes as possible get one that near, because the groups of a level lie within those of the next.
    Raises UserError where there are fewer spares than failed nodes.
    """
    holes = [position for position, node in enumerate(order) if node in set(failed)]
    spares = sorted(set(range(len(fabric.nodes))) - set(order) - set(failed))
    if len(spares) < len(holes):
        raise UserError(
            f"{len(holes)} nodes of the job have failed and {len(spares)} spares are left; "
            f"ask for more nodes, or resume with smaller degrees"
        )
    result = list(order)
    everywhere = np.zeros(len(fabric.nodes), np.int64)
    for group in (*(level.group for level in fabric.levels[1:]), everywhere):
        holes, spares = _fill(result, holes, spares, group.tolist())
    return tuple(result)


def _fill(result: list[int], holes: list[int], spares: list[int], group: list[int]) -> tuple[list[int], list[int]]:
    """Put spares into holes of the same group; what is left of both."""
    free: dict[int, list[int]] = {}
    for spare in spares:
        free.setdefault(group[spare], []).append(spare)
    open_holes = []
    for hole in holes:
        near = free.get(group[result[hole]])
        if near:
            result[hole] = near.pop(0)
        else:
            open_holes.append(hole)
    return open_holes, sorted(spare for near in free.values() for spare in near)
