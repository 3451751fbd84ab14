"""Route the attention of transformers through our own modules, so that context parallelism can replace them."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hpc_train.errors import UserError
from hpc_train.models.hf.library import register_attention, set_attention
from hpc_train.models.layers import ScaledDotProduct

ATTENTION = "hpc_train"
"""Name under which transformers calls `attend`."""
_HARMLESS = {"sliding_window", "position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal"}
"""Arguments that may come along: a window is checked against the sequence's length by the rules."""


def expose_attention(model: nn.Module) -> None:
    """Let every causal attention of a model of transformers compute with a child `core`, a ScaledDotProduct."""
    register_attention(ATTENTION, attend)
    set_attention(model, ATTENTION)
    for module in model.modules():
        if getattr(module, "is_causal", False) is True and hasattr(module, "scaling"):
            module.core = ScaledDotProduct(causal=True, dropout=0.0)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend with the module's own core; the function that transformers calls.

    query: (B, heads, T, head_dim); key and value: (B, kv_heads, T, head_dim), where values may be narrower.
    Returns (B, T, heads, width of the values).
    Raises UserError for a mask or an option that would be left out.
    """
    left_out = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    if attention_mask is not None or dropout or left_out:
        reason = ", ".join(left_out) or ("dropout" if dropout else "a mask")
        raise UserError(f"parallel.cp: the attention of {type(module).__name__} wants {reason}, which no ring computes")
    default_scaling = 1 / math.sqrt(query.shape[-1])
    if scaling is not None and scaling != default_scaling:
        query = query * (scaling / default_scaling)
    core: Any = module.core
    width = value.shape[-1]
    if width < key.shape[-1]:  # a ring sends keys and values in one tensor
        value = F.pad(value, (0, key.shape[-1] - width))
    out: Tensor = core(query, key, value)
    return out[..., :width].transpose(1, 2).contiguous(), None
