"""Modules of an attention other than its projections, on ranks that have some of its heads each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from hpc_train.errors import UserError
from hpc_train.parallel.tensor.fused_layouts import KEY_HEAD_COUNTS
from hpc_train.parallel.tensor.layers import TensorAxis
from hpc_train.parallel.tensor.local_parameters import ParameterLayout, ParameterLayouts
from hpc_train.traffic.model_axes import assign_kv_heads

_COUNTS = ("num_heads", "n_heads", "num_attention_heads")
"""Attributes in which the code of an attention, or its config, has its number of heads."""
_WIDTHS = ("split_size", "embed_dim")
"""Attributes with the width of all heads."""
_BIASES = ("alibi", "attention_mask", "position_bias")
"""Arguments of an attention that may have entries for every head."""


def enter_heads(module: nn.Module, axis: TensorAxis) -> None:
    """Let an activation that all heads share pass to the heads of each rank, whose gradients for it are summed."""
    module.forward = axis.enter


def split_head_norm(name: str, module: nn.Module, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Make a norm work on this rank's heads.

    Every rank has the weights (head_dim,) that all heads share, for which all have gradients. Weights (heads, head_dim)
    of each head (Cohere) are split. Raises UserError where heads do not divide.
    """
    for key, parameter in module.named_parameters(recurse=False):
        is_split = parameter.ndim == 2
        if is_split and len(parameter) % axis.size:
            raise UserError(f"parallel.tp={axis.size}: {name} has {len(parameter)} heads, which do not divide")
        layouts[module, key] = ParameterLayout(Shard(0)) if is_split else ParameterLayout(partial=True)


def count_local_heads(name: str, attention: nn.Module, axis: TensorAxis) -> None:
    """Let an attention whose code shapes tensors by its number of heads count this rank's.

    Code that reads the number from its `config` (Phi-3) gets a copy of that. Raises UserError where the number does not
    divide, or is not found.
    """
    owner = _find_owner_of_counts(name, attention)
    keys = [key for key in _COUNTS if isinstance(getattr(owner, key, None), int)]
    heads = int(getattr(owner, keys[0]))
    if heads % axis.size:
        raise UserError(
            f"parallel.tp={axis.size}: {name} has {heads} heads, which do not divide; use a divisor of {heads}"
        )
    for key in keys:
        setattr(owner, key, heads // axis.size)
    for key in _WIDTHS:
        if isinstance(width := getattr(attention, key, None), int):
            setattr(attention, key, width // axis.size)
    _count_local_key_heads(attention, heads, axis)

    def select(_: nn.Module, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = {key: _select_heads(options[key], heads, axis) for key in _BIASES if key in options}
        return args, {**options, **own}

    attention.register_forward_pre_hook(select, with_kwargs=True)


def _find_owner_of_counts(name: str, attention: nn.Module) -> Any:
    """Return the attention itself, or a copy of its config that it is given, whichever has the number of heads."""
    if any(isinstance(getattr(attention, key, None), int) for key in _COUNTS):
        return attention
    config = getattr(attention, "config", None)
    if not any(isinstance(getattr(config, key, None), int) for key in _COUNTS):
        raise UserError(f"{name}: has no number of heads ({' or '.join(_COUNTS)}), so it cannot be attention")
    own: Any = copy.copy(config)
    attention.config = own
    return own


def _count_local_key_heads(attention: nn.Module, heads: int, axis: TensorAxis) -> None:
    """Let an attention of `heads` query heads count the heads of keys and values that this rank computes."""
    local_count = None
    for key in KEY_HEAD_COUNTS:
        if isinstance(count := getattr(attention, key, None), int):
            local_count = len(assign_kv_heads(heads, count, axis.rank, axis.size))
            setattr(attention, key, local_count)
    if local_count is not None and hasattr(attention, "num_key_value_groups"):
        attention.num_key_value_groups = heads // axis.size // local_count  # type: ignore[assignment]


def _select_heads(bias: Tensor | None, heads: int, axis: TensorAxis) -> Tensor | None:
    """Return this rank's heads of a bias, or a bias without heads as it is.

    bias: (B, heads, queries, keys) or (B heads, queries, keys).
    """
    if bias is None or bias.ndim not in (3, 4) or (bias.ndim == 4 and bias.shape[1] != heads):
        return bias
    by_head = bias if bias.ndim == 4 else bias.view(-1, heads, *bias.shape[1:])
    own = by_head.chunk(axis.size, 1)[axis.rank]
    return own if bias.ndim == 4 else own.flatten(0, 1)


def share_key(layer: nn.Module, attention: nn.Module, axis: TensorAxis) -> None:
    """Let the last outputs of a projection, the rotary key of all heads, pass to the heads of each rank.

    They are `qk_rope_head_dim` of the attention (DeepSeek-V2, arXiv:2405.04434). The others are a latent that
    column-parallel layers read, which sum its gradients themselves.
    """
    width = int(attention.qk_rope_head_dim)  # type: ignore[arg-type]

    def enter(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        latent, key = torch.split(out, [out.shape[-1] - width, width], dim=-1)
        return torch.cat([latent, axis.enter(key)], dim=-1)

    layer.register_forward_hook(enter)


def split_sinks(attention: nn.Module, layouts: ParameterLayouts) -> None:
    """Give each rank the entries of its heads of an attention's `sinks`, (heads,): scores of no key (gpt-oss)."""
    layouts[attention, "sinks"] = ParameterLayout(Shard(0))


def split_head_bias(bias: nn.Module, axis: TensorAxis, layouts: ParameterLayouts) -> None:
    """Let an embedding with a column for each head (T5's bias of positions) return this rank's columns.

    Every rank has its weights, for which all heads have gradients.
    """
    layouts[bias, "weight"] = ParameterLayout(partial=True)
    bias.register_forward_hook(lambda _, args, out: out.chunk(axis.size, -1)[axis.rank])
