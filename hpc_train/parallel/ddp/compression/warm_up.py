"""The first steps in full, while gradients still change fast."""

from __future__ import annotations

import torch.distributed as dist

from hpc_train.parallel.ddp.bucket import Bucket, Method


class WarmUp:
    """Another method after some steps without one."""

    def __init__(self, method: Method, steps: int, group: dist.ProcessGroup) -> None:
        self._method, self._left, self._group = method, steps, group

    def reduce(self, bucket: Bucket) -> None:
        """See bucket.Method."""
        if self._left == 0:
            self._method.reduce(bucket)
            return
        bucket.buffer.div_(self._group.size())
        dist.all_reduce(bucket.buffer, group=self._group)
        self._left -= bucket.last
