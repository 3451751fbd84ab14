"""Overlap matrix products with the exchange of positions by torch's fused operators over symmetric memory.

On GPUs of one NVLink domain each rank reads its neighbours' memory directly, in place of the messages of ring_matmul.py
(torch.distributed._symmetric_memory). Forward and backward are the same products as there. On a CPU torch's own
fallback runs (a collective, then the products), and the tests check these functions with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_train._torch.process_groups import fused_gather_matmul, fused_matmul_scatter
from hpc_train.errors import UserError

_OPTION = "parallel.tensor.symmetric=true"


def check_symmetric_memory(device: torch.device) -> None:
    """Raise UserError where a rank's device has no symmetric memory."""
    if device.type != "cuda" or torch.version.hip is not None:
        name = "an AMD GPU" if device.type == "cuda" else "a CPU"
        raise UserError(f"{_OPTION}: this rank computes on {name}, which has no symmetric memory; leave it out")


def gather_matmul_symmetric(x: Tensor, weights: Sequence[Tensor], group: str) -> tuple[Tensor, ...]:
    """As ring_matmul.gather_matmul: x (B, T / size, K) and weights (N_i, K) -> (B, T, N_i). group: a group's name."""
    outputs: tuple[Tensor, ...] = _GatherMatmul.apply(x, group, *weights)  # type: ignore[no-untyped-call]
    return outputs


def matmul_scatter_symmetric(x: Tensor, weight: Tensor, group: str) -> Tensor:
    """As ring_matmul.matmul_scatter: x (B, T, K) and weight (N, K) -> (B, T / size, N). group: a group's name."""
    output: Tensor = _MatmulScatter.apply(x, weight, group)  # type: ignore[no-untyped-call]
    return output


class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, *weights: Tensor) -> tuple[Tensor, ...]:
        gathered, outputs = fused_gather_matmul(x, [weight.t() for weight in weights], group)
        ctx.group = group
        ctx.save_for_backward(gathered, *weights)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gathered, *weights = ctx.saved_tensors
        x_needs_grad, _, *needs_grad = ctx.needs_input_grad
        total = None
        if x_needs_grad:  # one product for all weights, so that their sums are exchanged once
            total = fused_matmul_scatter(torch.cat(gradients, dim=-1), torch.cat(weights), ctx.group)
        return total, None, *_compute_weight_gradients(gradients, gathered, needs_grad)


class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: str) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return fused_matmul_scatter(x, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gathered, (x_gradient,) = fused_gather_matmul(gradients[0], [weight], ctx.group)
        # Here the scattered gradient is the gathered one, and x was whole in forward.
        (weight_gradient,) = _compute_weight_gradients([gathered], x, ctx.needs_input_grad[1:2])
        return x_gradient if ctx.needs_input_grad[0] else None, weight_gradient, None


def _compute_weight_gradients(
    gradients: Sequence[Tensor], inputs: Tensor, needs_grad: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradient (N_i, K) of each weight from those of its outputs (B, T, N_i) and the inputs (B, T, K)."""
    return [
        gradient.flatten(0, 1).t() @ inputs.flatten(0, 1) if is_needed else None
        for gradient, is_needed in zip(gradients, needs_grad, strict=True)
    ]
