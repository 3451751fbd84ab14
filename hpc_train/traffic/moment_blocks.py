"""Which parameters have AdamW's moments in 8 bits (optim.state=8bit): one rule for optimizer, rules and planner.

A block is a part of one row of the whole parameter, and its elements share a scale. So a block never crosses a row, and
only a split of rows, which tensor parallelism makes, can cut one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.models.shape import compute_expert_width, compute_head_dim, has_latent_attention

LEAST_ELEMENTS = 4096
"""Smaller parameters keep full moments, as in torchao."""
_LEAST_BLOCK = 16
"""Least block that is proposed: its scale already adds a quarter of a byte to an element."""


def is_quantized(shape: Sequence[int], block_size: int) -> bool:
    """Return whether a parameter of this whole shape has moments in 8 bits."""
    return len(shape) > 1 and math.prod(shape) >= LEAST_ELEMENTS and shape[-1] % block_size == 0


def explain_cut_blocks(what: str, width: int, block_size: int) -> str:
    """Return the line of an error about a rank that has `width` elements of each row, no multiple of a block."""
    fitting = math.gcd(width, block_size)
    instead = f"optim.block_size={fitting}, " if fitting >= _LEAST_BLOCK else ""
    return (
        f"optim.state=8bit: parallel.tp leaves a rank {width} elements of each row of {what}, no multiple of "
        f"optim.block_size={block_size}; use {instead}a smaller parallel.tp, or optim.state=bf16"
    )


def list_split_rows(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices whose rows tensor parallelism splits, and their shapes in the whole model.

    Empty for a model whose shape the configuration does not tell. Other splits of ours are by rows, never across them.
    """
    if not isinstance(model, (TransformerConfig, VisionTransformerConfig)):
        return {}
    widths = {"attention's output": model.hidden, "the feed-forward layer's output": model.feed_forward}
    if isinstance(model, TransformerConfig):
        value = model.latent.value_head_dim if has_latent_attention(model) else compute_head_dim(model)
        widths["attention's output"] = model.heads * value
        if model.experts.count:
            if not model.experts.first_dense:
                del widths["the feed-forward layer's output"]
            width = compute_expert_width(model)
            widths |= {"the experts' inputs": width, "the shared experts' output": model.experts.shared * width}
    return {name: (model.hidden, width) for name, width in widths.items() if width}
