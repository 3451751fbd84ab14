"""Root-mean-square norms over all heads together (OLMo 2, arXiv:2501.00656), on ranks that have some of the heads each.

The mean of squares of a token is over all heads, so ranks add up their sums of squares, forward, and the gradients of
the whole sum, backward: a number per token and norm. The norms of queries and keys in a NormGroup share one all-reduce.
Weights are split as the heads are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from hpc_train.errors import UserError
from hpc_train.models.layers import NormGroup, RMSNorm1p
from hpc_train.parallel.tensor.layers import TensorAxis, lay_out_heads
from hpc_train.parallel.tensor.local_parameters import ParameterLayouts
from hpc_train.traffic.model_axes import assign_kv_heads


@dataclass(frozen=True)
class _SplitNorm:
    """A norm over all heads, on a rank that has some of them."""

    norm: nn.Module
    width: int
    """Channels of all heads."""
    head_dim: int
    counted: tuple[int, ...] | None = None
    """Indices of this rank's heads whose squares it adds to the sum; None: of all.

    Key heads that several ranks compute are added by one of them.
    """

    def sum_squares(self, x: Tensor) -> Tensor:
        """Return the sum of squares of x (..., channels of this rank), (...), that this rank adds to the whole."""
        wide = _get_wide_dtype(x)
        if self.counted is None:
            squares: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide).square()
            return squares
        heads = torch.linalg.vector_norm(torch.unflatten(x, -1, (-1, self.head_dim)), dim=-1, dtype=wide).square()
        sums = heads.unbind(-1)
        # Not torch.zeros: the backward of a rank that counts no head must join the all-reduce as well.
        total: Tensor = sum((sums[index] for index in self.counted), heads[..., :0].sum(-1))
        return total

    def scale(self, x: Tensor, squares: Tensor) -> Tensor:
        """Normalise x (..., channels of this rank) by the sum of squares (...) of all ranks."""
        weight: Any = self.norm.weight
        if isinstance(self.norm, RMSNorm1p):
            weight = weight + 1
        factor = torch.rsqrt(squares / self.width + _get_epsilon(self.norm, x)).unsqueeze(-1)
        out: Tensor = _ScaleRows.apply(x, factor, weight)  # type: ignore[no-untyped-call]
        return out


class _ScaleRows(torch.autograd.Function):
    """x (..., N) times factor (..., 1) times weight (N,), in the wide dtype of factor; only x is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, factor, weight)
        return (x * factor * weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, factor, weight = ctx.saved_tensors
        weighted = gradient.to(factor.dtype) * weight
        by_x = (weighted * factor).to(x.dtype)
        by_factor = (weighted * x).sum(-1, keepdim=True)
        if not ctx.needs_input_grad[2]:
            return by_x, by_factor, None
        by_weight = (gradient * x * factor).flatten(0, -2).sum(0)
        return by_x, by_factor, by_weight.to(weight.dtype)


def split_full_norms(
    parent: nn.Module, norms: dict[str, nn.Module], axis: TensorAxis, layouts: ParameterLayouts
) -> None:
    """Make the norms of `parent` that a plan calls all_heads work on this rank's heads, by their names.

    Heads are those of split_columns: where there are fewer key heads than ranks, the weights of their norm stay whole
    on each rank. Raises UserError for other norms, and where heads do not divide.
    """
    unit = int(getattr(parent, "head_dim", 1))
    for name, norm in norms.items():
        check_norm(name, norm)
    heads = max(_count_channels(norm) for norm in norms.values()) // unit
    split = []
    for name, norm in norms.items():
        width = _count_channels(norm)
        layout = layouts[norm, "weight"] = lay_out_heads(name, width // unit, heads, unit, axis)
        counted = None if layout.units is None else list_counted_heads(heads, width // unit, axis.rank, axis.size)
        split.append(_SplitNorm(norm, width, unit, counted))
    for one in split:
        one.norm.forward = _make_forward(one, axis)
    for group in parent.children():
        if isinstance(group, NormGroup):
            group.forward = _make_group_forward(split, axis)  # type: ignore[method-assign]


def _count_channels(norm: nn.Module) -> int:
    return norm.get_parameter("weight").numel()


def list_counted_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[int, ...]:
    """List the indices, among the key heads that a tp rank computes, of those that no rank before it has."""
    before = {head for earlier in range(rank) for head in assign_kv_heads(heads, kv_heads, earlier, ranks)}
    own = assign_kv_heads(heads, kv_heads, rank, ranks)
    return tuple(index for index, head in enumerate(own) if head not in before and head not in own[:index])


def _make_forward(norm: _SplitNorm, axis: TensorAxis) -> Callable[[Tensor], Tensor]:
    return lambda x: norm.scale(x, axis.add(norm.sum_squares(x)))


def _make_group_forward(split: list[_SplitNorm], axis: TensorAxis) -> Callable[..., tuple[Tensor, ...]]:
    """Make a NormGroup's forward with one all-reduce, if it is called with all the norms of the plan in their order."""

    def forward(inputs: tuple[Tensor, ...], norms: tuple[nn.Module, ...]) -> tuple[Tensor, ...]:
        if len(norms) != len(split) or any(norm is not one.norm for norm, one in zip(norms, split, strict=True)):
            return tuple(norm(x) for x, norm in zip(inputs, norms, strict=True))
        squares = torch.stack([one.sum_squares(x) for x, one in zip(inputs, split, strict=True)])
        sums = axis.add(squares).unbind()
        return tuple(one.scale(x, total) for x, one, total in zip(inputs, split, sums, strict=True))

    return forward


def _get_wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _get_epsilon(norm: nn.Module, x: Tensor) -> float:
    epsilon: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))  # transformers' name, torch's name
    return torch.finfo(_get_wide_dtype(x)).eps if epsilon is None else float(epsilon)


def check_norm(name: str, norm: nn.Module) -> None:
    """Check that a module is a root-mean-square norm with a weight, which is all that is computed here in its place."""
    names = [key for key, _ in norm.named_parameters()]
    if names == ["weight"] and norm.get_parameter("weight").ndim == 1:
        width = _count_channels(norm)
        x = torch.linspace(-2.0, 2.0, 3 * width).sin().view(3, width)
        weight = torch.linspace(0.5, 1.5, width)
        out = torch.func.functional_call(norm, {"weight": weight}, x)
        offset = 1.0 if isinstance(norm, RMSNorm1p) else 0.0
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _get_epsilon(norm, x)) * (weight + offset)
        if out.shape == x.shape and torch.allclose(out, expected, rtol=1e-4):
            return
    raise UserError(
        f"{name}: is {type(norm).__name__}, and only a root-mean-square norm with a weight for every channel, such as "
        "RMSNorm, can be all_heads"
    )
