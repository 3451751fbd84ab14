"""Count the parameters and FLOPs of a model from its config, without torch.

Planner, MFU and reports take them from here; tests compare them with the modules that are built.
"""

from __future__ import annotations

from typing import Any

from hpc_train.config.model import ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.models.shape import (
    CountedTransformer,
    compute_expert_width,
    compute_head_dim,
    compute_mean_head_dim,
    count_block_norms,
    count_branches,
    count_expert_layers,
    count_kv_heads,
    count_vit_tokens,
    count_window_layers,
    find_window,
    has_latent_attention,
)


def count_parameters(config: ModelConfig) -> int | None:
    """Count the parameters of the model, a tied embedding once; None for a custom model, whose shape only it knows."""
    if isinstance(config, CountedTransformer):
        return config.parameters
    if isinstance(config, TransformerConfig):
        return _count_transformer(config)
    if isinstance(config, VisionTransformerConfig):
        return _count_vit(config)
    return None


def _count_linear(inputs: int, outputs: int, bias: bool) -> int:
    return inputs * outputs + (outputs if bias else 0)


def _count_attention(hidden: int, heads: int, groups: int, width: int, bias: bool) -> int:
    kv = _count_linear(hidden, groups * width, bias)
    return _count_linear(hidden, heads * width, bias) + 2 * kv + _count_linear(heads * width, hidden, bias)


def _count_attention_weights(config: TransformerConfig, bias: bool) -> int:
    """Count the parameters of the linear layers of one attention."""
    if has_latent_attention(config):
        return _count_latent_attention_weights(config)
    return _count_attention(config.hidden, config.heads, count_kv_heads(config), compute_head_dim(config), bias)


def _count_latent_attention_weights(config: TransformerConfig) -> int:
    latent, hidden, queries = config.latent, config.hidden, config.heads * compute_head_dim(config)
    query = hidden * queries if latent.q_rank is None else latent.q_rank * (hidden + queries)
    # One product makes the latent of keys and values, and the part of the keys that all heads share.
    narrow = hidden * (latent.kv_rank + latent.rope_head_dim)
    expanded = latent.kv_rank * config.heads * (latent.nope_head_dim + latent.value_head_dim)
    return query + narrow + expanded + config.heads * latent.value_head_dim * hidden


def _count_dense_feed_forward(config: TransformerConfig, bias: bool) -> int:
    branches = count_branches(config)
    widen = branches * _count_linear(config.hidden, config.feed_forward, bias)
    return widen + _count_linear(config.feed_forward, config.hidden, bias)


def _count_expert_feed_forward(config: TransformerConfig, routed: int) -> int:
    """Count the parameters of a router, of `routed` experts and of the shared ones."""
    experts = config.experts
    return config.hidden * (experts.count + 3 * compute_expert_width(config) * (routed + experts.shared))


def _count_blocks(config: TransformerConfig, bias: bool, routed: int) -> int:
    """Count the parameters of the linear layers of all blocks, with `routed` experts in each layer that has any."""
    sparse = count_expert_layers(config)
    dense = (config.layers - sparse) * _count_dense_feed_forward(config, bias)
    mixed = sparse * _count_expert_feed_forward(config, routed) if sparse else 0
    return config.layers * _count_attention_weights(config, bias) + dense + mixed


def _count_query_key_norms(config: TransformerConfig) -> int:
    """Count the parameters of the norms inside of one attention."""
    if has_latent_attention(config):
        return config.latent.kv_rank + (config.latent.q_rank or 0)
    width = compute_head_dim(config)
    # One norm over a head is shared by all heads; a full one has a weight for every channel.
    heads = {"none": 0, "head": 2, "full": config.heads + count_kv_heads(config)}[config.query_key_norm]
    return heads * width


def _count_transformer(config: TransformerConfig) -> int:
    norm = config.hidden * (2 if config.norm == "layernorm" and config.bias else 1)
    table = config.vocab_size * config.hidden
    embeddings = table * (1 if config.tied_embeddings else 2)
    positions = config.max_positions * config.hidden if config.positions == "learned" else 0
    blocks = _count_blocks(config, config.bias, config.experts.count)
    return (
        embeddings
        + positions
        + blocks
        + config.layers * (count_block_norms(config) * norm + _count_query_key_norms(config))
        + norm
    )


def _count_vit_block(config: VisionTransformerConfig, bias: bool) -> int:
    attention = _count_attention(config.hidden, config.heads, config.heads, config.hidden // config.heads, bias)
    widen = _count_linear(config.hidden, config.feed_forward, bias)
    return attention + widen + _count_linear(config.feed_forward, config.hidden, bias)


def _count_vit(config: VisionTransformerConfig) -> int:
    norm = 2 * config.hidden
    patches = _count_linear(config.channels * config.patch_size**2, config.hidden, True)
    tokens = config.hidden * (count_vit_tokens(config) + 1)
    head = _count_linear(config.hidden, config.classes, True)
    return patches + tokens + config.layers * (_count_vit_block(config, True) + 2 * norm) + norm + head


def compute_flops_per_token(config: ModelConfig, sequence_length: int, frozen: bool = False) -> float | None:
    """Compute the model FLOPs of forward and backward for one target, without recomputation; MFU is computed from them.

    Transformer, a token of a sequence of T = sequence_length (Chowdhery et al. 2022, arXiv:2204.02311, appendix B,
    with the causal half):

        6 N + 6 layers heads head_dim T

    N is the number of weights in matrix products of a token: the linear layers of all blocks, of routed experts only
    top_k, and the head, but no embedding, norm or bias. Forward is 2 N, backward twice that. Attention takes 2 T' heads
    head_dim for q k^T and as much for the product with v, where a token attends to T' = T / 2 others on average under
    the causal mask; times 3 with backward. In a layer with a window T' is smaller: see compute_mean_keys. Where values
    are narrower than keys (latent attention), head_dim is the mean of both widths. frozen: only adapters are trained;
    backward computes no gradients of weights then, which makes 4 N of 6 N. The adapters' own products are not counted.

    Vision transformer: the target is an image, T = patches + 1 tokens from the shape (sequence_length is not used),
    attention in full (12 layers hidden T a token), the patch projection once a patch and the head once.
    None for a custom model.
    """
    if isinstance(config, TransformerConfig):
        used = _count_blocks(config, bias=False, routed=config.experts.top_k if config.experts.count else 0)
        weights = used + config.vocab_size * config.hidden
        width = config.heads * compute_mean_head_dim(config)
        windows = (find_window(config, layer) for layer in range(config.layers))
        score_products = sum(2 * compute_mean_keys(window, sequence_length) for window in windows)
        return float(count_transformer_flops(weights, width, score_products, FROZEN_WEIGHT_FLOPS if frozen else 6))
    if isinstance(config, VisionTransformerConfig):
        return _count_vit_flops(config)
    return None


def compute_mean_keys(window: int | None, sequence_length: int) -> float:
    """Mean number of keys that a token sees in a layer: T / 2, or with a window of w < T positions w - w^2 / (2 T).

    The first w tokens of a sequence see w / 2 keys on average, all others w.
    """
    if window is None or window >= sequence_length:
        return sequence_length / 2
    return window - window**2 / (2 * sequence_length)


def compute_seen_share(config: TransformerConfig, sequence_length: int) -> float:
    """Return the keys that a token sees, over those that it would see without windows, averaged over the layers."""
    share = count_window_layers(config) / config.layers
    return 1 - share + share * 2 * compute_mean_keys(config.sliding_window, sequence_length) / sequence_length


FROZEN_WEIGHT_FLOPS = 4
"""FLOPs of a token for each frozen weight: forward, and the gradient of the layer's input."""


def count_transformer_flops(weights: Any, attention_width: Any, sequence_length: Any, weight_flops: Any = 6) -> Any:
    """Return 6 N + 6 layers heads head_dim T, of numbers or of the planner's columns of jobs.

    weights: N. attention_width: layers heads head_dim; the factor `layers` may be in sequence_length instead.
    weight_flops: the 6 before N, or FROZEN_WEIGHT_FLOPS.
    """
    return weight_flops * weights + 6 * attention_width * sequence_length


def _count_vit_flops(config: VisionTransformerConfig) -> float:
    tokens = count_vit_tokens(config)
    blocks = tokens * config.layers * (6.0 * _count_vit_block(config, bias=False) + 12.0 * config.hidden * tokens)
    patches = (tokens - 1) * config.channels * config.patch_size**2 * config.hidden
    return blocks + 6.0 * (patches + config.hidden * config.classes)
