"""Check a model's shape and count its parameters and FLOPs, without torch."""

from __future__ import annotations

from typing import Any

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.errors import UserError


def compute_head_dim(config: TransformerConfig) -> int:
    """Width of one attention head."""
    return config.head_dim or config.hidden // config.heads


def count_kv_heads(config: TransformerConfig) -> int:
    """Key and value heads."""
    return config.kv_heads or config.heads


def count_vit_tokens(config: VisionTransformerConfig) -> int:
    """Patches of an image, and the class token."""
    return (config.image_size // config.patch_size) ** 2 + 1


def check_shape(config: ModelConfig) -> None:
    """Raise UserError, naming the key, for numbers that do not fit together; a custom model is not looked at."""
    if isinstance(config, TransformerConfig):
        check_transformer(config)
    elif isinstance(config, VisionTransformerConfig):
        check_vit(config)


def check_transformer(config: TransformerConfig) -> None:
    """check_shape of a transformer."""
    if config.head_dim is None:
        _check_divides("heads", config.heads, "hidden", config.hidden, "set model.head_dim to choose a head's width")
    if config.kv_heads is not None:
        why = "each key and value head serves equally many heads"
        _check_divides("kv_heads", config.kv_heads, "heads", config.heads, why)
    if config.positions == "rotary" and compute_head_dim(config) % 2:
        raise UserError(
            f"model.head_dim={compute_head_dim(config)}: must be even, as "
            f"model.positions=rotary turns pairs of channels"
        )


def check_vit(config: VisionTransformerConfig) -> None:
    """check_shape of a vision transformer."""
    _check_divides("heads", config.heads, "hidden", config.hidden, "a head takes an equal part of it")
    why = "an image is cut into whole patches"
    _check_divides("patch_size", config.patch_size, "image_size", config.image_size, why)


def _check_divides(part: str, divisor: int, key: str, value: int, why: str) -> None:
    if value % divisor:
        raise UserError(f"model.{part}={divisor}: does not divide model.{key}={value}; {why}")


def count_parameters(config: ModelConfig) -> int | None:
    """Parameters of the model, a tied embedding counted once; None for a custom model, whose shape only it knows."""
    if isinstance(config, TransformerConfig):
        return _transformer_parameters(config)
    if isinstance(config, VisionTransformerConfig):
        return _vit_parameters(config)
    return None


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _attention(hidden: int, heads: int, groups: int, width: int, bias: bool) -> int:
    kv = _linear(hidden, groups * width, bias)
    return _linear(hidden, heads * width, bias) + 2 * kv + _linear(heads * width, hidden, bias)


def _block(config: TransformerConfig, bias: bool) -> int:
    """Parameters of the linear layers of one block."""
    attention = _attention(config.hidden, config.heads, count_kv_heads(config), compute_head_dim(config), bias)
    branches = 2 if config.activation == "swiglu" else 1
    widen = branches * _linear(config.hidden, config.feed_forward, bias)
    return attention + widen + _linear(config.feed_forward, config.hidden, bias)


def _transformer_parameters(config: TransformerConfig) -> int:
    norm = config.hidden * (2 if config.norm == "layernorm" and config.bias else 1)
    table = config.vocab_size * config.hidden
    embeddings = table * (1 if config.tied_embeddings else 2)
    positions = config.max_positions * config.hidden if config.positions == "learned" else 0
    return embeddings + positions + config.layers * (_block(config, config.bias) + 2 * norm) + norm


def _vit_block(config: VisionTransformerConfig, bias: bool) -> int:
    attention = _attention(config.hidden, config.heads, config.heads, config.hidden // config.heads, bias)
    widen = _linear(config.hidden, config.feed_forward, bias)
    return attention + widen + _linear(config.feed_forward, config.hidden, bias)


def _vit_parameters(config: VisionTransformerConfig) -> int:
    norm = 2 * config.hidden
    patches = _linear(config.channels * config.patch_size**2, config.hidden, True)
    tokens = config.hidden * (count_vit_tokens(config) + 1)
    head = _linear(config.hidden, config.classes, True)
    return patches + tokens + config.layers * (_vit_block(config, True) + 2 * norm) + norm + head


def compute_flops_per_token(config: ModelConfig, sequence_length: int) -> float | None:
    """Model FLOPs of forward and backward for one target: what MFU is computed from, recomputation not counted.

    Transformer, a token of a sequence of T = sequence_length (Chowdhery et al. 2022, arXiv:2204.02311, appendix B,
    with the causal half):

        6 N + 6 layers heads head_dim T

    N is the number of weights in matrix products: the linear layers of all blocks and the head, but no embedding, norm
    or bias. Forward is 2 N, backward twice that. Attention takes 2 T' heads head_dim for q k^T and as much for the
    product with v, where a token attends to T' = T / 2 others on average under the causal mask; times 3 with backward.

    Vision transformer: the target is an image, T = patches + 1 tokens from the shape (sequence_length is not used),
    attention in full (12 layers hidden T a token), the patch projection once a patch and the head once.
    None for a custom model.
    """
    if isinstance(config, TransformerConfig):
        weights = config.layers * _block(config, bias=False) + config.vocab_size * config.hidden
        attention_width = config.heads * compute_head_dim(config)
        return float(transformer_flops_per_token(weights, config.layers * attention_width, sequence_length))
    if isinstance(config, VisionTransformerConfig):
        return _vit_flops(config)
    return None


def transformer_flops_per_token(weights: Any, attention_width: Any, sequence_length: Any) -> Any:
    """Return 6 N + 6 layers heads head_dim T, of numbers or of the planner's columns of jobs.

    weights: N. attention_width: layers heads head_dim.
    """
    return 6 * weights + 6 * attention_width * sequence_length


def _vit_flops(config: VisionTransformerConfig) -> float:
    tokens = count_vit_tokens(config)
    blocks = tokens * config.layers * (6.0 * _vit_block(config, bias=False) + 12.0 * config.hidden * tokens)
    patches = (tokens - 1) * config.channels * config.patch_size**2 * config.hidden
    return blocks + 6.0 * (patches + config.hidden * config.classes)
