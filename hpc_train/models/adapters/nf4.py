"""A frozen linear layer whose weight is kept in 4 bits (NF4), under an adapter or alone.

NF4 (Dettmers et al. 2023, arXiv:2305.14314) stores each block of 64 numbers as its largest magnitude in float32 and one
of 16 levels (4 bits) per number: 4.5 bits per number. bitsandbytes rounds and expands. Here each row consists of whole
blocks. So a rank can round its own rows or columns, and gets the same numbers as a single device.

Two frozen parameters take the place of the weight. They are of bytes, so that nothing casts them: fully_shard casts
floating-point parameters to the format that it computes in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.errors import UserError
from hpc_train.models.adapters.nf4_sizes import NF4_BLOCK
from hpc_train.quiet_imports import without_warnings

if TYPE_CHECKING:
    from types import ModuleType

_BLOCKS_AT_ONCE = 1 << 12
"""Rounding on a CPU compares each number with all 16 levels, in memory."""
NF4_CODES, NF4_SCALES = "nf4_codes", "nf4_scales"
"""Parameters of the layer: two numbers per byte (outputs, inputs / 2); float32 as bytes (outputs, inputs / 64 * 4)."""


class Nf4Weight:
    """A linear layer whose weight is in NF4; see `replace_weight`."""

    nf4_codes: nn.Parameter
    nf4_scales: nn.Parameter
    nf4_dtype: torch.dtype
    """Type of the weight before; what `weight` returns."""

    @property
    def weight(self) -> Tensor:
        """The weight (outputs, inputs), expanded at each call; it is not trained."""
        return expand(self.nf4_codes, self.nf4_scales, self.nf4_dtype)


class Nf4Linear(Nf4Weight, nn.Linear):  # type: ignore[override]  # weight is computed
    """nn.Linear, frozen, with its weight in NF4."""

    def forward(self, input: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs)."""
        out = multiply_nf4(self, input)
        return out if self.bias is None else out + self.bias


def multiply_nf4(layer: Nf4Weight, x: Tensor) -> Tensor:
    """Return W x without the bias, (..., outputs), in the format that autocast or x has."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    out: Tensor = _Product.apply(x, layer.nf4_codes, layer.nf4_scales)  # type: ignore[no-untyped-call]
    return out


class _Product(torch.autograd.Function):
    """W x, which expands W for backward again: F.linear would keep it expanded until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, expand(codes, scales, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        codes, scales = ctx.saved_tensors
        return gradient @ expand(codes, scales, gradient.dtype), None, None


def expand(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight (outputs, inputs). float64 gets the numbers of float32."""
    rows, half = codes.shape
    narrow = torch.float32 if dtype == torch.float64 else dtype
    flat = torch.ops.bitsandbytes.dequantize_4bit(
        codes.reshape(-1, 1),
        scales.reshape(-1).view(torch.float32),
        NF4_BLOCK,
        "nf4",
        (rows * half * 2 // NF4_BLOCK, NF4_BLOCK),
        narrow,
    )
    return cast(Tensor, flat).view(rows, 2 * half).to(dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight (outputs, inputs) to NF4; returns its codes and scales as the layer has them.

    Rows are blocks: bitsandbytes 0.50 expands rows that are no whole blocks wrongly on a CPU.
    """
    rows, columns = weight.shape
    codes, scales = [weight.new_empty(0, dtype=torch.uint8)], [weight.new_empty(0, dtype=torch.float32)]
    for blocks in weight.detach().reshape(-1, NF4_BLOCK).split(_BLOCKS_AT_ONCE):  # type: ignore[no-untyped-call]
        blocks_fp32 = blocks.to(torch.float32).contiguous()
        codes_of_blocks, scales_of_blocks = torch.ops.bitsandbytes.quantize_4bit(
            blocks_fp32, NF4_BLOCK, "nf4", torch.uint8
        )
        codes.append(codes_of_blocks.flatten())
        scales.append(scales_of_blocks.flatten())
    return torch.cat(codes).view(rows, columns // 2), torch.cat(scales).view(torch.uint8).view(
        rows, columns // NF4_BLOCK * 4
    )


def replace_weight(layer: nn.Linear, kind: type[nn.Linear]) -> None:
    """Turn a layer into one of `kind`, a class with Nf4Weight, with empty parameters; `quantize` fills them."""
    outputs, inputs = layer.weight.shape
    dtype, device = layer.weight.dtype, layer.weight.device
    del layer._parameters["weight"]
    layer.__class__ = kind
    cast("Nf4Linear", layer).nf4_dtype = dtype
    for name, columns in ((NF4_CODES, inputs // 2), (NF4_SCALES, inputs // NF4_BLOCK * 4)):
        empty = torch.empty(outputs, columns, dtype=torch.uint8, device=device)
        layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))


def import_bitsandbytes() -> ModuleType:
    """Import the library that rounds to 4 bits. Raises UserError without it."""
    try:
        with without_warnings():  # of compiled parts for devices that are not here
            import bitsandbytes
    except ImportError:
        raise UserError("adapter.base=nf4 needs the package bitsandbytes: pip install 'hpc_train[qlora]'") from None
    return bitsandbytes
