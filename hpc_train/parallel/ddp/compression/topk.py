"""topk: each rank sends its largest gradients only, and adds what it did not send to those of the next step.

Stich, Cordonnier, Jaggi 2018, Sparsified SGD with Memory, arXiv:1809.07599, algorithm 1 (without learning rate, which
is the optimizer's); without the momentum correction and the clipping of Lin et al. 2017, arXiv:1712.01887.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel.ddp.bucket import Bucket


class TopK:
    """A share of the entries of each bucket, by absolute value; at least one."""

    def __init__(self, ratio: float, feedback: bool, group: dist.ProcessGroup) -> None:
        self._ratio, self._feedback, self._group = ratio, feedback, group
        self._unsent: dict[int, Tensor] = {}

    def reduce(self, bucket: Bucket) -> None:
        """See bucket.Method."""
        own = bucket.buffer / self._group.size()
        if bucket.index in self._unsent:
            own += self._unsent[bucket.index]
        indices = own.abs().topk(self._count(own), sorted=False).indices
        self._add_up(bucket.buffer, own[indices], indices)
        # A step whose gradient is not finite is not taken; the memory must outlive it.
        if self._feedback and bool(bucket.buffer.isfinite().all()):
            self._unsent[bucket.index] = own.index_fill_(0, indices, 0.0)

    def _count(self, buffer: Tensor) -> int:
        return max(1, round(self._ratio * buffer.numel()))

    def _add_up(self, buffer: Tensor, values: Tensor, indices: Tensor) -> None:
        """Into `buffer` what all ranks sent, in the order of ranks, so that the sums are the same on each."""
        short = indices.to(torch.int32) if buffer.numel() < 1 << 31 else indices
        gathered = [self._gather(tensor) for tensor in (values, short)]
        buffer.zero_()
        for theirs, where in zip(*gathered, strict=True):
            buffer[where.long()] += theirs

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self._group.size())]
        dist.all_gather(everyone, tensor, group=self._group)
        return everyone
