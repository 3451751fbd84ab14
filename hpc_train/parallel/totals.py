"""Sums over the ranks that see different tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_train.api import IGNORED_TARGET, StepBatch, World
from hpc_train.parallel.axes import index


@dataclass
class Totals:
    """Sums that do not depend on the model, reduced while the first forward runs."""

    values: Tensor
    work: dist.Work | None
    shared: int
    """Ranks that have the same samples."""

    @classmethod
    def start(cls, batch: StepBatch, world: World) -> Totals:
        """Begin to count the global batch's targets, and the ranks that were asked to stop."""
        count = sum(int((micro.targets != IGNORED_TARGET).sum()) for micro in batch.micro)
        values = torch.tensor([count, int(batch.stop)], dtype=torch.int64)
        return cls(values, reduce(values, world), world.size // world.dp_size)

    def wait(self) -> tuple[int, bool]:
        """(targets that count, whether any rank was asked to stop)."""
        if self.work is not None:
            self.work.wait()
        tokens, stops = self.values.tolist()
        return int(tokens) // self.shared, stops > 0


def reduce(values: Tensor, world: World) -> dist.Work | None:
    """Begin to add up `values`, in place, over all ranks."""
    return dist.all_reduce(values, async_op=True) if world.size > 1 else None


def reduce_loss(loss: Tensor, world: World) -> dist.Work | None:
    """Begin to add up each rank's loss of its own tokens, in place; the ranks of one tp group have the same ones."""
    if index(world, "tp") > 0:
        loss.zero_()
    return reduce(loss, world)
