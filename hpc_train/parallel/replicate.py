"""ddp: every rank holds the whole model; gradients are averaged in buckets while backward goes on."""

# No `from __future__ import annotations`: torch checks the annotations of a communication hook by identity.

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.api import World
from hpc_train.config.parallel import ParallelConfig


@dataclass
class LocalNorm:
    """Squared norm of this rank's own gradient, taken from the buckets before they are reduced."""

    active: bool = False
    parts: list[Tensor] = field(default_factory=list)

    def take(self) -> Tensor:
        """The squared norm of the backward that just ended; ready for the next one."""
        total = torch.stack(self.parts).sum()
        self.parts = []
        return total


def replicate(model: nn.Module, config: ParallelConfig, world: World) -> tuple[nn.Module, LocalNorm]:
    """The model wrapped for data parallelism, and the tap on each rank's own gradient."""
    tap = LocalNorm()
    if world.size == 1:
        return model, tap
    wrapped = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=config.bucket_mib,
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(tap, _average)
    return wrapped, tap


def _average(tap: LocalNorm, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    if tap.active:
        tap.parts.append(torch.linalg.vector_norm(buffer, dtype=torch.float64).square())
    buffer.div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
    return reduced


def accumulating(wrapped: nn.Module, last: bool) -> AbstractContextManager[object]:
    """The context of one micro-batch: only the last one of a step communicates."""
    if last or not isinstance(wrapped, DistributedDataParallel):
        return nullcontext()
    return wrapped.no_sync()
