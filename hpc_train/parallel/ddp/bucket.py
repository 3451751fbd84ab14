"""What a gradient hook gets to reduce, and what it must do with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Gradients of several parameters that travel together."""

    index: int
    """In the order of reduction: 0 holds the parameters whose gradients are ready first."""
    buffer: Tensor
    """All of them, (n,)."""
    gradients: list[Tensor]
    """The same memory, one tensor a parameter in its shape."""
    last: bool
    """No other bucket follows in this step."""

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> Bucket:
        """A copy of what torch's object says, which a thread may keep."""
        return cls(bucket.index(), bucket.buffer(), bucket.gradients(), bucket.is_last())


class Method(Protocol):
    """A way to reduce gradients. Called for one bucket after the other, in the same order on every rank."""

    def reduce(self, bucket: Bucket) -> None:
        """Replace this rank's gradients by the mean over all ranks, in place; returns when that is done."""
