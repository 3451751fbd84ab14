"""The loss of a micro-batch as a sum over its targets, and its sum over ranks.

This works for any model: it uses the model's own `loss_sum`, or the mean `loss` that it returns times the number of
targets that count, or the cross entropy of the logits that it returns. Sums over ranks are over the targets of the
global batch, whatever their number on each rank; a model's mean is exact if it is one over those targets. Logits that
tensor parallelism has split by vocabulary have a cross entropy of their own, so that no rank ever holds all logits of a
token. The number of targets of the global batch is reduced while the first forward runs; the engine divides by it once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from hpc_train._torch.dtensor import shard_offset
from hpc_train._torch.tensors import check_on_device
from hpc_train.components import LOSSES
from hpc_train.config.train import TrainConfig
from hpc_train.interfaces import IGNORED_TARGET, StepBatch, World
from hpc_train.models.layers import cross_entropy_sum
from hpc_train.models.transformer import Transformer
from hpc_train.models.vision_transformer import VisionTransformer
from hpc_train.parallel.mesh_axes import get_axis_index
from hpc_train.parallel.user_model import check_loss, check_output


def compute_loss_sum(model: nn.Module, out: Any, target: Tensor) -> Tensor:
    """Sum the loss over the targets that count. `out` is what the model returned; see interfaces.Model.

    A DTensor is taken as logits that are split over their last dimension.
    """
    user_loss = getattr(model, "loss_sum", None)
    if user_loss is not None and not isinstance(out, DTensor):
        loss: Tensor = user_loss(out, target)
        return loss
    if isinstance(out, Mapping):
        if (mean := out.get("loss")) is not None:
            return weigh_mean_loss(mean, target)
        out = out["logits"]
    return sum_split_cross_entropy(out, target) if isinstance(out, DTensor) else cross_entropy_sum(out, target)


def use_registered_loss(part: nn.Module, config: TrainConfig) -> str | None:
    """Give a model, or a stage, the registered loss that train.loss names, in place of its own; returns a log line."""
    if config.loss is None:
        return None
    user_loss = LOSSES.find(config.loss, config.module)
    part.loss_sum = user_loss  # type: ignore[assignment]
    return f"loss: {config.loss}"


def weigh_mean_loss(mean: Tensor, target: Tensor) -> Tensor:
    """Multiply a mean loss by the number of targets that count; 0 if none does, where a mean is NaN."""
    count = (target != IGNORED_TARGET).sum()
    mean_fp32 = mean.to(torch.promote_types(mean.dtype, torch.float32))
    return torch.where(count > 0, mean_fp32 * count, torch.zeros_like(mean_fp32))


def compute_first_loss_sum(model: nn.Module, out: Any, target: Tensor) -> Tensor:
    """Compute the loss sum of the first call and check what the model returns. Raises UserError, in one line."""
    is_builtin_model = isinstance(model, (Transformer, VisionTransformer)) and "loss_sum" not in vars(model)
    if isinstance(out, DTensor) or is_builtin_model:
        return compute_loss_sum(model, out, target)
    has_loss_sum = callable(getattr(model, "loss_sum", None))
    if not has_loss_sum:
        check_output(model, out, target)
    loss = compute_loss_sum(model, out, target)
    if has_loss_sum:
        check_loss(model, loss)
    return loss


def sum_split_cross_entropy(logits: DTensor, target: Tensor) -> Tensor:
    """Sum the cross entropy (nats) of split logits over the targets that count; a scalar, the same on each rank.

    logits: (..., vocab), split over its last dimension on a mesh of one axis. target: (...), int64, whole. Each rank
    adds up what its part of the vocabulary contributes to the normaliser and to the logit of the target (Shoeybi et al.
    2019, arXiv:1909.08053, section 3): two all-reduces of one and two numbers per token.
    """
    local, first = logits.to_local().flatten(0, -2), shard_offset(logits)[-1]
    check_targets(target, logits.shape[-1])
    group = logits.device_mesh.get_group()
    loss: Tensor = _SplitCrossEntropy.apply(local, target.flatten(), first, group)  # type: ignore[no-untyped-call]
    return loss


def check_targets(target: Tensor, classes: int) -> None:
    """Fail if a target that counts is not a valid class, without waiting for a GPU."""
    class_index = torch.where(target == IGNORED_TARGET, 0, target)
    check_on_device(((class_index >= 0) & (class_index < classes)).all(), "a target is not in the vocabulary")


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of the losses. logits: (tokens, own classes, from `first` on); target: (tokens,)."""
        loss, gradient = differentiate_cross_entropy(logits, target, first, group)
        ctx.save_for_backward(gradient, target != IGNORED_TARGET)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        of_logits, counts = ctx.saved_tensors
        return (of_logits * (gradient * counts).unsqueeze(-1)).to(ctx.dtype), None, None, None


def differentiate_cross_entropy(
    logits: Tensor, target: Tensor, first: int = 0, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sum of the cross entropy over targets that count, and each token's gradient, in at least float32.

    logits: (tokens, classes), of all classes, or with a group of this rank's, from `first` on. target: (tokens,).
    The gradient, shaped as logits, is the softmax minus 1 at the target; rows of IGNORED_TARGET have no meaning.
    """
    dtype, counts = torch.promote_types(logits.dtype, torch.float32), target != IGNORED_TARGET
    if group is None:
        classes = torch.where(counts, target, 0).unsqueeze(-1)
        log_probabilities = logits.log_softmax(-1, dtype=dtype)
        loss = -torch.where(counts, log_probabilities.gather(-1, classes).squeeze(-1), 0).sum()
        probabilities = log_probabilities.exp_()
        return loss, probabilities.scatter_add_(-1, classes, probabilities.new_full((), -1.0).expand_as(classes))
    logits = logits.to(dtype)
    # The largest logit over all classes is subtracted first, so that exp does not overflow.
    peak = logits.amax(-1)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    shifted = logits - peak.unsqueeze(-1)
    is_local = (target >= first) & (target < first + logits.shape[-1])
    # A target that another rank has is clamped to a valid index here, and its logit multiplied by 0 below.
    classes = (target - first).clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
    target_logits = shifted.gather(-1, classes).squeeze(-1) * is_local
    exponentials = shifted.exp_()
    # Both sums over ranks take one reduction.
    sums = torch.stack((exponentials.sum(-1), target_logits))
    dist.all_reduce(sums, group=group)
    normaliser, target_logits = sums
    exponentials.div_(normaliser.unsqueeze(-1)).scatter_add_(-1, classes, -is_local.to(dtype).unsqueeze(-1))
    return torch.where(counts, normaliser.log() - target_logits, 0).sum(), exponentials


class Totals(NamedTuple):
    """The totals of a step over all ranks, as StepTotals.wait returns them."""

    tokens: int
    """Targets that count."""
    stop: bool
    """Whether any rank was asked to stop."""
    agree: bool
    """Whether all ranks had the same gradient norm in the step before."""


_NORM_SCALE, _MAX_NORM, _NOT_FINITE = 1 << 16, 1 << 40, -(1 << 40)
"""Norms are compared as integers in units of 1 / _NORM_SCALE, so that they go with the counts in one sum of int64."""
_SAME_NORM = 1e-3
"""Relative difference that rounding on different devices stays far below, and a flipped bit of an exponent above."""


@dataclass
class StepTotals:
    """Sums that do not depend on the model, reduced while the first forward runs."""

    values: Tensor
    work: dist.Work | None
    shared: int
    """Ranks that have the same samples."""
    norm: int
    """Gradient norm of the step before on this rank, in units of 1 / _NORM_SCALE."""
    ranks: int

    @classmethod
    def start(cls, batch: StepBatch, world: World) -> StepTotals:
        """Begin to count the global batch's targets and the ranks that were asked to stop, and to compare norms."""
        count = sum(int((micro.targets != IGNORED_TARGET).sum()) for micro in batch.micro)
        norm = round(min(batch.norm * _NORM_SCALE, _MAX_NORM)) if math.isfinite(batch.norm) else _NOT_FINITE
        values = torch.tensor([count, int(batch.stop), norm], dtype=torch.int64)
        return cls(values, start_sum(values, world), world.size // world.dp_size, norm, world.size)

    def wait(self) -> Totals:
        """Wait for the sums and return them."""
        if self.work is not None:
            self.work.wait()
        tokens, stops, norms = self.values.tolist()
        expected = self.norm * self.ranks  # of norms that are all equal
        # A unit for each rank, as every norm was rounded.
        agree = abs(norms - expected) <= _SAME_NORM * abs(expected) + self.ranks
        return Totals(int(tokens) // self.shared, stops > 0, agree)


def start_sum(values: Tensor, world: World) -> dist.Work | None:
    """Begin to add up `values`, in place, over all ranks."""
    return dist.all_reduce(values, group=world.group, async_op=True) if world.size > 1 else None


def start_loss_sum(loss: Tensor, world: World) -> dist.Work | None:
    """Begin to add up each rank's loss of its own tokens, in place; the ranks of one tp group have the same ones."""
    if get_axis_index(world, "tp") > 0:
        loss.zero_()
    return start_sum(loss, world)
