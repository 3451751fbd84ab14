"""Offer the sample order of data/sample_order.py to a user's own training loop: as arrays, and as a torch Sampler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from hpc_train.data.sample_order import order_samples
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from hpc_train.interfaces import World

_POSITIONS_AT_ONCE = 4096


@dataclass(frozen=True)
class SampleOrder:
    """An endless order of samples, different in each epoch, as a pure function of the seed.

    Only the number of samples consumed so far has to be saved, and the number of ranks has no influence: a loop that
    continues on another number of ranks sees exactly the remaining samples.
    """

    samples: int
    """Size of the data set."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"SampleOrder: samples={self.samples}; there must be at least 1")

    def indices(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the indices into the data set at positions [start, start + count), (count,)."""
        if start < 0 or count < 0:
            raise UserError(f"SampleOrder: positions from {start}, {count} of them; neither may be negative")
        return order_samples(self.seed, self.samples, start, count)

    def batch(self, consumed: int, global_batch: int, rank: int = 0, ranks: int = 1) -> npt.NDArray[np.int64]:
        """Return a rank's share of the global batch after `consumed` samples, (global_batch / ranks,).

        Raises UserError if the batch does not divide by the ranks.
        """
        share = _compute_share(global_batch, rank, ranks)
        return self.indices(consumed + rank * share, share)

    def sampler(
        self,
        global_batch: int,
        *,
        consumed: int = 0,
        until: int | None = None,
        world: World | None = None,
    ) -> OrderedSampler:
        """Make a sampler for torch's DataLoader, whose batch_size divides a rank's share of the global batch.

        consumed: samples of the steps made so far. until: samples of the whole run; None: it never ends. world: whose
        data-parallel share it yields; None: all samples, for a library that deals batches to ranks itself.
        """
        rank, ranks = (0, 1) if world is None else (world.dp_index, world.dp_size)
        return OrderedSampler(self, global_batch, consumed, until, rank, ranks)


class OrderedSampler(Sampler[int]):
    """Yields one rank's indices, global batch by global batch. An iteration begins at `consumed`, which may be set."""

    def __init__(
        self, order: SampleOrder, global_batch: int, consumed: int, until: int | None, rank: int, ranks: int
    ) -> None:
        self._share = _compute_share(global_batch, rank, ranks)
        if until is not None and until % global_batch:
            raise UserError(
                f"SampleOrder: until={until} is not a multiple of the global batch of {global_batch} samples"
            )
        self._order, self._global_batch, self._until, self._rank = order, global_batch, until, rank
        self.consumed = consumed

    def __iter__(self) -> Iterator[int]:
        begin, steps = self.consumed, max(1, _POSITIONS_AT_ONCE // self._global_batch)
        while self._until is None or begin + self._global_batch <= self._until:
            count = steps if self._until is None else min(steps, (self._until - begin) // self._global_batch)
            positions = self._order.indices(begin, count * self._global_batch)
            table = positions.reshape(-1, self._global_batch)
            own_columns = table[:, self._rank * self._share : (self._rank + 1) * self._share]
            yield from own_columns.ravel().tolist()
            begin += positions.size

    def __len__(self) -> int:
        """Return how many indices are left for this rank. Raises TypeError, as any endless sampler, without `until`."""
        if self._until is None:
            raise TypeError("this order never ends; give `until`, the samples of the whole run")
        return max(0, self._until - self.consumed) // self._global_batch * self._share


def _compute_share(global_batch: int, rank: int, ranks: int) -> int:
    if not 0 <= rank < ranks:
        raise UserError(f"SampleOrder: rank {rank} of {ranks}")
    if global_batch < 1 or global_batch % ranks:
        raise UserError(f"SampleOrder: a global batch of {global_batch} does not divide over {ranks} ranks")
    return global_batch // ranks
