"""Define sizes, counts, algorithm bandwidth and bus bandwidth as nccl-tests do.

Source: NVIDIA nccl-tests, doc/PERFORMANCE.md ("Bandwidth"). The bus bandwidth is the algorithm bandwidth times a
factor that makes it the speed of the links whatever the number of ranks, so that it compares with what the
hardware can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_train.traffic.axes import Collective

DTYPE_BYTES = 4
"""Size of an element; all buffers are float32."""


@dataclass(frozen=True)
class CollectiveOperation:
    """A collective operation."""

    name: Collective
    sums: bool
    """Whether values of several ranks are added up."""
    sends_parts: bool = False
    """Whether what a rank sends is cut into a part for each rank."""
    receives_parts: bool = False
    """Whether what a rank receives is a part from each rank."""


OPERATIONS = (
    CollectiveOperation("all_reduce", sums=True),
    CollectiveOperation("all_gather", sums=False, receives_parts=True),
    CollectiveOperation("reduce_scatter", sums=True, sends_parts=True),
    CollectiveOperation("broadcast", sums=False),
    CollectiveOperation("reduce", sums=True),
    CollectiveOperation("all_to_all", sums=False, sends_parts=True, receives_parts=True),
    CollectiveOperation("send_recv", sums=False),
)
"""broadcast and reduce: from and to the first rank of the group; send_recv: to the next rank, from the one before."""

ALGORITHMS = ("library", "ring", "tree")
"""library: what the backend chooses. ring and tree: ours, over its point to point messages; for all_reduce only."""


def find_operation(name: str) -> CollectiveOperation:
    """Return the operation of this name, which must be in OPERATIONS."""
    return next(operation for operation in OPERATIONS if operation.name == name)


@dataclass(frozen=True)
class CollectiveShape:
    """An operation on buffers of one size in groups of `ranks`."""

    operation: CollectiveOperation
    ranks: int
    count: int
    """Elements of a part; of the whole buffer if it is not cut into parts."""

    @property
    def elements(self) -> int:
        """Number of elements of the larger of the two buffers."""
        parts = self.operation.sends_parts or self.operation.receives_parts
        return self.count * self.ranks if parts else self.count

    @property
    def size(self) -> int:
        """Bytes of the larger of the two buffers: the `size` of nccl-tests, and of traffic.Flow."""
        return self.elements * DTYPE_BYTES

    @property
    def sent(self) -> int:
        """Number of elements that a rank sends."""
        return self.elements if self.operation.sends_parts else self.count

    @property
    def received(self) -> int:
        """Number of elements that a rank receives."""
        return self.elements if self.operation.receives_parts else self.count


def make_shape(operation: CollectiveOperation, ranks: int, size: int) -> CollectiveShape:
    """Return the largest shape of at most `size` bytes with parts of whole elements, at least one each."""
    parts = ranks if operation.sends_parts or operation.receives_parts else 1
    return CollectiveShape(operation, ranks, max(1, size // (DTYPE_BYTES * parts)))


def compute_algorithm_bandwidth(size: int, seconds: float) -> float:
    """Return size over time, in bytes/s."""
    return size / seconds
