"""Compute linear layers in MXFP8: 8 bits, and a scale for each 32 neighbours along the summed dimension of a product.

The format is that of the OCP Microscaling Formats specification 1.0: values are e4m3, scales are powers of two, rounded
up so that no value overflows. Blackwell's tensor cores multiply it directly; torchao rounds, multiplies and knows the
gradients (its prototype mxfp8_linear). A scale belongs to 32 values of one row, so that rows do not depend on one
another, unlike with one scale for a tensor. The gradient of a weight is summed over tokens: there a scale belongs to 32
neighbouring tokens.

A CPU has no such products. There operands are rounded by torchao and multiplied in the dtype of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_train.models.experts import ExpertProduct
from hpc_train.parallel.materialise import is_rehearsal
from hpc_train.quiet_imports import without_warnings
from hpc_train.traffic.weights import MXFP8_BLOCK

with without_warnings():  # of compiled parts for GPUs that are not here
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

_UP = ScaleCalculationMode.RCEIL

Product = Callable[[Tensor, Tensor], Tensor]
"""(x (..., K), weight (N, K)) -> x weight^T (..., N)."""


def make_mxfp8_product(wide_weight_gradients: bool, device: torch.device) -> Product:
    """Make the product of linear layers on a device; K and N are multiples of MXFP8_BLOCK.

    wide_weight_gradients: gradients of weights are computed in the format of the layer.
    """
    return partial(_multiply_rows, _choose_product(wide_weight_gradients, device))


def make_mxfp8_expert_product(wide_weight_gradients: bool, device: torch.device) -> ExpertProduct:
    """Make the product of stacked experts on a device; K and N of every expert are multiples of MXFP8_BLOCK.

    The scales of the weights' gradient belong to 32 neighbouring rows of one expert.
    """
    if device.type == "cuda" and not is_rehearsal():
        return partial(_multiply_grouped, wide_weight_gradients)
    return partial(_multiply_each, make_mxfp8_product(wide_weight_gradients, device))


def _multiply_grouped(wide_weight_gradients: bool, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply by torchao's grouped product, which fills up the rows of each expert to whole blocks."""
    by_columns = weights.transpose(1, 2).contiguous().transpose(1, 2)  # as it takes the weights
    out: Tensor = _to_mxfp8_then_scaled_grouped_mm(
        rows.contiguous(),
        by_columns,
        counts.cumsum(0).to(torch.int32),
        out_dtype=rows.dtype,
        wgrad_with_hp=wide_weight_gradients,
        scale_calculation_mode=_UP,
        pad_token_groups_for_grouped_mm=True,
    )
    return out


def _multiply_each(product: Product, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply with one expert after another, each by `product`."""
    parts = zip(torch.split(rows, counts.tolist()), weights.unbind(), strict=True)
    outputs = [product(part, weight.t()) for part, weight in parts if len(part)]
    # Without rows the first expert computes nothing, so that the weights have a gradient.
    return torch.cat(outputs) if outputs else rows @ weights[0]


def _multiply_rows(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (..., K) by weight (N, K), in the dtype of autocast: (..., N)."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    missing = -len(rows) % MXFP8_BLOCK  # a block of tokens is whole: zeros change neither scales nor sums
    padded = F.pad(rows, (0, 0, 0, missing)) if missing else rows
    out = product(padded.contiguous(), weight.to(dtype).contiguous())
    return out[: len(rows)].reshape(*x.shape[:-1], len(weight))


def _choose_product(wide_weight_gradients: bool, device: torch.device) -> Product:
    if is_rehearsal():
        return partial(_apply, _RehearsedProduct, wide_weight_gradients)
    if device.type != "cuda":
        return partial(_apply, _EmulatedProduct, wide_weight_gradients)
    return partial(
        _to_mxfp8_then_scaled_mm,
        kernel_preference=KernelPreference.AUTO,
        scale_calculation_mode=_UP,
        wgrad_with_hp=wide_weight_gradients,
    )


def _apply(function: type[torch.autograd.Function], wide: bool, x: Tensor, weight: Tensor) -> Tensor:
    output: Tensor = function.apply(x, weight, wide)  # type: ignore[no-untyped-call]
    return output


class _EmulatedProduct(torch.autograd.Function):
    """The three products of a linear layer, each operand rounded along the dimension that the product sums over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wide = wide
        return round_blocks(x) @ round_blocks(weight).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        by_x = round_blocks(gradient) @ round_blocks(weight.t()).t() if needs_x else None
        if not needs_weight:
            return by_x, None, None
        if ctx.wide:
            return by_x, gradient.t() @ x, None
        return by_x, round_blocks(gradient.t()) @ round_blocks(x.t()).t(), None


class _RehearsedProduct(torch.autograd.Function):
    """The memory of a GPU's products: what they save, and copies of the operands in 8 bits while they run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.wide = wide
        return _multiply_beside_copies(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        by_x = _multiply_beside_copies(gradient, weight)
        return by_x, gradient.t() @ x if ctx.wide else _multiply_beside_copies(gradient.t(), x), None


def _multiply_beside_copies(a: Tensor, b: Tensor) -> Tensor:
    copies = [operand.to(torch.float8_e4m3fn) for operand in (a, b)]
    product = a @ b
    del copies
    return product


def round_blocks(values: Tensor) -> Tensor:
    """Round each 32 neighbours of the last dimension to e4m3 with a common scale; the dtype stays."""
    scale, narrow = to_mx(values.float().contiguous(), torch.float8_e4m3fn, MXFP8_BLOCK, _UP)
    rounded: Tensor = to_dtype(narrow, scale, torch.float8_e4m3fn, MXFP8_BLOCK, torch.float32)
    return rounded.to(values.dtype)
