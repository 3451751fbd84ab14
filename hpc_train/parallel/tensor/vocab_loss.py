"""Cross entropy of logits that are split by vocabulary: no rank ever has all logits of a token."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from hpc_train.api import IGNORED_TARGET
from hpc_train.compat import check_later, shard_offset


def split_cross_entropy_sum(logits: DTensor, target: Tensor) -> Tensor:
    """Cross entropy in nats, summed over the targets that count: a scalar in at least float32, the same on each rank.

    logits: (..., vocab), split over its last dimension on a mesh of one axis. target: (...), int64, whole.
    Each rank adds up what its part of the vocabulary contributes to the normaliser and to the logit of the target
    (Shoeybi et al. 2019, arXiv:1909.08053, section 3): two all-reduces of one and two numbers a token.
    """
    local, first = logits.to_local().flatten(0, -2), shard_offset(logits)[-1]
    place = torch.where(target == IGNORED_TARGET, 0, target)
    check_later(((place >= 0) & (place < logits.shape[-1])).all(), "a target is not in the vocabulary")
    group = logits.device_mesh.get_group()
    loss: Tensor = _CrossEntropy.apply(local, target.flatten(), first, group)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        """logits: (tokens, own part of the vocabulary, which begins at `first`); target: (tokens,)."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        peak = wide.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = wide - peak.unsqueeze(-1)
        mine = (target >= first) & (target < first + wide.shape[-1])
        classes = (target - first).clamp(0, wide.shape[-1] - 1).unsqueeze(-1)
        chosen = shifted.gather(-1, classes).squeeze(-1) * mine
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), chosen))
        dist.all_reduce(sums, group=group)
        normaliser, chosen = sums
        counts = target != IGNORED_TARGET
        ctx.save_for_backward(exponentials.div_(normaliser.unsqueeze(-1)), classes, mine, counts)
        ctx.dtype = logits.dtype
        return torch.where(counts, normaliser.log() - chosen, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, classes, mine, counts = ctx.saved_tensors
        found = probabilities * (gradient * counts).unsqueeze(-1)
        found.scatter_add_(-1, classes, -(gradient * mine).unsqueeze(-1))
        return found.to(ctx.dtype), None, None, None
