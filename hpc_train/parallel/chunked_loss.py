"""Compute the cross entropy for one chunk of tokens at a time, so that no rank ever has the logits of all its tokens.

The output layer passes hidden states on, and the loss multiplies a chunk of them by the layer's weight. It computes the
gradients of a chunk together with its loss, as Liger Kernel does (Hsu et al. 2024, arXiv:2410.10989): no logits are
saved for backward, which only multiplies by one number, and there are no more matrix products than without chunks. The
gradients of the hidden states and of the weight are saved instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models.adapters.adapted_linear import AdaptedLinear
from hpc_train.models.transformer import Transformer
from hpc_train.parallel.loss import check_targets, differentiate_cross_entropy
from hpc_train.parallel.mesh_axes import get_axis_degree
from hpc_train.parallel.precision.number_formats import make_mixed_precision_policy
from hpc_train.traffic.stages import splits_backward


def compute_loss_in_chunks(part: nn.Module, config: RunConfig, world: World) -> str | None:
    """Give the model, or its last stage, a loss that takes hidden states; returns a log line, None for other stages.

    Tensor parallelism, if it is on, comes before this and makes no logits either.
    """
    assert isinstance(part, Transformer), "the rules refuse other models"
    if not part.is_last:
        return None
    if isinstance(part.head, AdaptedLinear):
        raise UserError(
            f"train.loss_chunk={config.train.loss_chunk}: needs an output layer without an adapter; take head out of "
            "adapter.targets, or use train.loss_chunk=0"
        )
    axis = None
    if get_axis_degree(world, "tp") > 1 and config.parallel.tensor.vocabulary:
        axis = _find_local_classes(part, world)
    head = part.embed if part.config.tied_embeddings else part.head
    policy = make_mixed_precision_policy(config.precision)
    keeps = get_axis_degree(world, "pp") > 1 and splits_backward(config.parallel.pipeline)
    softcap = part.config.logit_softcap
    chunks = LossChunks(config.train.loss_chunk, part.config.vocab_size, policy.param_dtype, axis, keeps, softcap)
    part.logit_softcap = None
    part.head.forward = _pass_on  # type: ignore[method-assign, assignment]
    part.loss_sum = ChunkedLoss(head, chunks)  # type: ignore[method-assign]
    return f"loss: {config.train.loss_chunk} tokens at a time"


def _pass_on(x: Tensor, *weight: Tensor) -> Tensor:
    """Return the hidden states: the forward of an output layer whose products the loss computes."""
    return x


@dataclass(frozen=True)
class _LocalClasses:
    """The part of the vocabulary whose logits this rank computes."""

    first: int
    group: dist.ProcessGroup


def _find_local_classes(part: Transformer, world: World) -> _LocalClasses:
    from hpc_train.parallel.tensor.layers import TensorAxis, find_first_row

    axis = TensorAxis(world.mesh["tp"], sequence=False)
    return _LocalClasses(find_first_row(part.config.vocab_size, axis), axis.group)


@dataclass(frozen=True)
class LossChunks:
    """How a loss is computed in chunks."""

    tokens: int
    """Tokens in a chunk; the last chunk may have fewer."""
    classes: int
    """Size of the whole vocabulary."""
    dtype: torch.dtype | None = None
    """Type that the products are computed in; None: that of the hidden states."""
    local_classes: _LocalClasses | None = None
    """This rank's part of the vocabulary; None: all of it."""
    keeps_gradients: bool = False
    """Whether backward may run twice: a split backward first computes gradients of activations, then of weights."""
    softcap: float | None = None
    """Bound on logits, which become softcap tanh(logit / softcap); None: no bound."""


class ChunkedLoss:
    """The loss_sum of a model whose output layer passes hidden states on."""

    def __init__(self, head: nn.Module, chunks: LossChunks) -> None:
        """head: the module whose `weight` is the output layer's."""
        self._head, self._chunks = head, chunks

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        """Sum the cross entropy. out: (..., hidden); target: (...), int64."""
        check_targets(target, self._chunks.classes)
        weight: Any = self._head.weight
        dtype = self._chunks.dtype or out.dtype
        wants = torch.is_grad_enabled()
        x = out.flatten(0, -2).to(dtype)
        loss: Tensor = _ChunkedCrossEntropy.apply(x, weight.to(dtype), target.flatten(), self._chunks, wants)  # type: ignore[no-untyped-call]
        return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Maps x (tokens, hidden) and weight (own classes, hidden) to the sum of the cross entropy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, chunks: LossChunks, wants: bool) -> Tensor:
        of_x = torch.empty_like(x) if wants and ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if wants and ctx.needs_input_grad[1] else None
        losses = [
            _add_chunk(
                x[begin : begin + chunks.tokens],
                weight,
                target[begin : begin + chunks.tokens],
                chunks,
                None if of_x is None else of_x[begin : begin + chunks.tokens],
                of_weight,
            )
            for begin in range(0, len(x), chunks.tokens)
        ]
        # Not save_for_backward: backward multiplies them in place, and lets them go while it goes on.
        ctx.gradients, ctx.keeps = (of_x, of_weight), chunks.keeps_gradients
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        gradients = ctx.gradients
        if ctx.keeps:
            of_x, of_weight = (None if factor is None else factor * gradient for factor in gradients)
        else:  # in place: the weight's gradient is as large as the weight
            ctx.gradients = None
            of_x, of_weight = (None if factor is None else factor.mul_(gradient) for factor in gradients)
        return of_x, of_weight, None, None, None


def _add_chunk(
    x: Tensor, weight: Tensor, target: Tensor, chunks: LossChunks, of_x: Tensor | None, of_weight: Tensor | None
) -> Tensor:
    """Return the loss of one chunk; write its gradient into of_x, and add its part to of_weight."""
    counts = (target != IGNORED_TARGET).unsqueeze(-1)
    x = x * counts  # what does not count is 0 here and in of_x, so that the larger gradient of logits needs no mask
    local_classes = chunks.local_classes
    logits, tangent = x @ weight.mT, None
    if chunks.softcap is not None:
        tangent = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(chunks.softcap).tanh_()
        logits = tangent * chunks.softcap
    loss, logit_gradients = differentiate_cross_entropy(
        logits, target, *(() if local_classes is None else (local_classes.first, local_classes.group))
    )
    if of_x is None and of_weight is None:
        return loss
    if tangent is not None:
        logit_gradients.mul_(tangent.square_().neg_().add_(1))
    of_logits = logit_gradients.to(weight.dtype)
    del logit_gradients
    if of_x is not None:
        torch.mm(of_logits, weight, out=of_x)
        of_x.mul_(counts)
    if of_weight is not None:
        of_weight.addmm_(of_logits.mT, x)
    return loss
