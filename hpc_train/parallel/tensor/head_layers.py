"""Modules of an attention other than its projections, on ranks that have some of its heads each."""

from __future__ import annotations

from torch import nn

from hpc_train.errors import UserError
from hpc_train.parallel.tensor.layers import TensorAxis
from hpc_train.parallel.tensor.local_parameters import ParameterLayout, ParameterLayouts

_COUNTS = ("num_heads", "n_heads")
"""Attributes in which the code of an attention has its number of heads."""


def enter_heads(module: nn.Module, axis: TensorAxis) -> None:
    """Let an activation that all heads share pass to the heads of each rank, whose gradients for it are summed."""
    module.forward = axis.enter


def split_head_norm(module: nn.Module, layouts: ParameterLayouts) -> None:
    """Make a norm work on this rank's heads; every rank has its weights, for which all heads have gradients."""
    layouts.update({(module, key): ParameterLayout(partial=True) for key, _ in module.named_parameters(recurse=False)})


def count_local_heads(name: str, attention: nn.Module, axis: TensorAxis) -> None:
    """Let an attention whose code shapes tensors by its number of heads count this rank's.

    Raises UserError where that number does not divide, or is not found.
    """
    keys = [key for key in _COUNTS if isinstance(getattr(attention, key, None), int)]
    if not keys:
        raise UserError(f"{name}: has no number of heads ({' or '.join(_COUNTS)}), so it cannot be attention")
    for key in keys:
        heads = int(getattr(attention, key))
        if heads % axis.size:
            raise UserError(
                f"parallel.tp={axis.size}: {name} has {heads} heads, which do not divide; use a divisor of {heads}"
            )
        setattr(attention, key, heads // axis.size)


def split_head_bias(bias: nn.Module, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Let an embedding with a column for each head (T5's bias of positions) return this rank's columns.

    Every rank has its weights, for which all heads have gradients.
    """
    layouts[bias, "weight"] = ParameterLayout(partial=True)
    bias.register_forward_hook(lambda _, args, out: out.chunk(axis.size, -1)[axis.rank])
