"""Local search from a good order: exchange two nodes, or two cells of nodes, while that makes a step cheaper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_train.placement.cost import Model
from hpc_train.placement.order import Order

MOST_NODES = 256
"""Of a job that is searched so: beyond it, trees are so regular that whole cells are near the best."""

_TRIED = 48
"""Exchanges measured at a time, of which the best is made."""
_NODES_MEASURED = 1 << 17
"""Orders times nodes measured in all: what bounds the time, whatever the machine."""
_IN_VAIN = 6
"""Rounds without a better order after which to stop."""
_BETTER = 1 - 1e-9
_NEIGHBOURS = 1e-4
"""Weight of busy neighbours: it only decides between orders that cost the same without them."""


def improve(model: Model, order: Order, cells: Sequence[int], floor: float) -> Order:
    """A cheaper order, or the same one; cells: sizes of blocks of positions to exchange besides single nodes.

    floor: seconds below which no order can come, neighbours or not. Draws from a fixed seed.
    """
    random, best = np.random.default_rng(0), order
    seconds = float(_score(model, best[None])[0])
    in_vain = 0
    for _ in range(_NODES_MEASURED // (_TRIED * len(order))):
        if in_vain == _IN_VAIN or seconds * _BETTER <= floor * (1 + _NEIGHBOURS):
            break
        tried = np.stack([_exchanged(best, random, cells) for _ in range(_TRIED)])
        found = _score(model, tried)
        at = int(found.argmin())
        if found[at] < seconds * _BETTER:
            best, seconds, in_vain = tried[at], float(found[at]), 0
        else:
            in_vain += 1
    return best


def _score(model: Model, orders: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return [orders]: seconds alone; ties are broken by the seconds next to busy neighbours."""
    sums = model.sums(orders)
    return sums.seconds + _NEIGHBOURS * sums.beside


def _exchanged(order: Order, random: np.random.Generator, cells: Sequence[int]) -> Order:
    """Two blocks of one size, drawn at random, change places."""
    size = int(random.choice([1, *cells]))
    first, second = random.choice(len(order) // size, 2, replace=False) * size
    result = order.copy()
    result[first : first + size], result[second : second + size] = (
        order[second : second + size],
        order[first : first + size],
    )
    return result
