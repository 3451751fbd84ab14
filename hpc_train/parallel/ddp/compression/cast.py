"""fp16, bf16: gradients travel in half the bytes of float32."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.parallel.ddp.bucket import Bucket

_LARGEST = 2.0**15
"""A sum of float16 numbers may become this large: half of what the format can hold."""


class Cast:
    """Every gradient rounded to `dtype`, added up in it.

    float16 holds 2^-14 to 2^16 in full precision, and gradients are smaller: the ranks first agree on the largest one
    of the bucket, 8 bytes more, and scale by a power of two, which loses nothing.
    """

    def __init__(self, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._dtype, self._group = dtype, group

    def reduce(self, bucket: Bucket) -> None:
        """See bucket.Method. A gradient that is not finite makes its mean not finite."""
        scale = self._scale(bucket.buffer) if self._dtype == torch.float16 else None
        mean = bucket.buffer / self._group.size()
        sent = (mean if scale is None else mean.mul_(scale)).to(self._dtype)
        dist.all_reduce(sent, group=self._group)
        bucket.buffer.copy_(sent)
        if scale is not None:
            bucket.buffer.div_(scale)

    def _scale(self, buffer: Tensor) -> Tensor:
        """A power of two, the same on every rank, on the device: nobody waits for it."""
        largest = torch.linalg.vector_norm(buffer, math.inf, dtype=torch.float32).double()
        largest = torch.where(largest.isfinite(), largest, math.inf)  # not every backend orders NaN
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        usable = largest.isfinite() & (largest > 0)
        exponent = torch.where(usable, (_LARGEST / largest).log2().floor(), 0.0)
        return torch.exp2(exponent.clamp(-126, 126)).to(buffer.dtype)
