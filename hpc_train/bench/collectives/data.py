"""What every rank sends, and what it must then have received, to the last bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hpc_train.bench.collectives.definitions import Shape

_VALUES = 251
_WEIGHTS = 254
"""Sums of 30,000 ranks stay below 2^24, up to which float32 has every whole number."""
UNTOUCHED = -1.0
"""What a buffer holds before: no right answer has it."""


class Pattern:
    """Rank r of a group sends pattern + weight(r): the pattern tells places apart, the weight ranks.

    So a sum has a closed form, and checking it takes as long in a group of thousands as in one of two.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        """elements: of the largest buffer that is asked for."""
        values = np.random.default_rng(0).integers(0, _VALUES, size=elements).astype(np.float32)
        self._values = torch.from_numpy(values).to(device)

    def sent(self, shape: Shape, index: int) -> Tensor:
        """(shape.sent,) of the rank at `index` of its group."""
        begin = index * shape.count if shape.operation.receives_parts and not shape.operation.sends_parts else 0
        return self._values[begin : begin + shape.sent] + _weight(index)

    def expected(self, shape: Shape, index: int) -> Tensor | None:
        """(shape.received,) at that rank; None: it receives nothing (reduce, except at the first rank)."""
        name, count, ranks = shape.operation.name, shape.count, shape.ranks
        everyone = float(sum(map(_weight, range(ranks))))
        mine = slice(index * count, (index + 1) * count)
        match name:
            case "all_reduce":
                return self._values[:count] * ranks + everyone
            case "reduce":
                return None if index else self._values[:count] * ranks + everyone
            case "reduce_scatter":
                return self._values[mine] * ranks + everyone
            case "broadcast":
                return self._values[:count] + _weight(0)
            case "send_recv":
                return self._values[:count] + _weight((index - 1) % ranks)
        weights = torch.tensor([_weight(rank) for rank in range(ranks)], dtype=torch.float32).to(self._values.device)
        if name == "all_gather":
            return (self._values[: shape.received].view(ranks, count) + weights[:, None]).flatten()
        assert name == "all_to_all", name
        return (self._values[mine] + weights[:, None]).flatten()


def wrong_elements(received: Tensor, expected: Tensor | None) -> int:
    """How many differ."""
    return 0 if expected is None else int((received != expected).sum())


def _weight(index: int) -> float:
    return float(1 + index % _WEIGHTS)
