"""Check a model's shape and count its parameters and FLOPs, without torch."""

from __future__ import annotations

from typing import Any

from hpc_train.config.model import (
    ExpertsConfig,
    LatentConfig,
    ModelConfig,
    RopeConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.config.schema import config_dataclass
from hpc_train.errors import UserError


@config_dataclass
class CountedTransformer(TransformerConfig):
    """A decoder of another library by our shape, whose parameters were counted; it can be planned and not built."""

    parameters: int = 0
    """Number of parameters, a tied table once."""
    parallel_block: bool = False
    """Attention and feed-forward layer run on the same input."""
    fused_attention_input: bool = False
    """Queries, keys and values are one linear layer."""


def compute_head_dim(config: TransformerConfig) -> int:
    """Return the width of one attention head: of its queries and keys."""
    if has_latent_attention(config):
        return config.latent.nope_head_dim + config.latent.rope_head_dim
    return config.head_dim or config.hidden // config.heads


def compute_mean_head_dim(config: TransformerConfig) -> float:
    """Return the mean of the width of a key and that of a value."""
    width = compute_head_dim(config)
    return (width + config.latent.value_head_dim) / 2 if has_latent_attention(config) else width


def compute_rotary_dim(config: TransformerConfig) -> int:
    """Return the width of the part of a head that rotary positions turn."""
    return config.latent.rope_head_dim if has_latent_attention(config) else compute_head_dim(config)


def has_latent_attention(config: TransformerConfig) -> bool:
    """Whether attention is multi-head latent attention."""
    return config.latent.kv_rank > 0


def count_kv_heads(config: TransformerConfig) -> int:
    """Return the number of key and value heads."""
    return config.kv_heads or config.heads


def find_window(config: TransformerConfig, layer: int) -> int | None:
    """Return how many keys a token sees in `layer`, counted from 0; None: all up to its own position."""
    is_global = config.global_every > 0 and (layer + 1) % config.global_every == 0
    return None if is_global else config.sliding_window


def count_branches(config: TransformerConfig) -> int:
    """Return the number of layers that widen the input of a dense feed-forward layer: 2 with a gate."""
    return 2 if config.activation in ("swiglu", "geglu") else 1


def count_block_norms(config: TransformerConfig) -> int:
    """Return the number of norms of hidden states in a block."""
    return 2 * (config.pre_norms + config.post_norms)


def count_vit_tokens(config: VisionTransformerConfig) -> int:
    """Return the number of tokens of an image: its patches, and the class token."""
    return (config.image_size // config.patch_size) ** 2 + 1


def check_shape(config: ModelConfig) -> None:
    """Raise UserError, naming the key, for numbers that do not fit together; a custom model is not looked at."""
    if isinstance(config, TransformerConfig):
        check_transformer(config)
    elif isinstance(config, VisionTransformerConfig):
        check_vit(config)


def check_transformer(config: TransformerConfig) -> None:
    """Check the shape of a transformer; see check_shape."""
    if has_latent_attention(config):
        _check_latent_attention(config)
    elif config.latent != LatentConfig():
        raise UserError("model.latent: has settings, but model.latent.kv_rank=0 makes no latent attention; set kv_rank")
    elif config.head_dim is None:
        _check_divides("heads", config.heads, "hidden", config.hidden, "set model.head_dim to choose a head's width")
    if config.kv_heads is not None:
        why = "each key and value head serves equally many heads"
        _check_divides("kv_heads", config.kv_heads, "heads", config.heads, why)
    if config.positions == "rotary" and compute_rotary_dim(config) % 2:
        key = "latent.rope_head_dim" if has_latent_attention(config) else "head_dim"
        raise UserError(
            f"model.{key}={compute_rotary_dim(config)}: must be even, as model.positions=rotary turns pairs of channels"
        )
    if not (config.pre_norms or config.post_norms):
        raise UserError("model.pre_norms=false: leaves blocks without norms; set model.post_norms=true, too")
    if config.global_every and config.sliding_window is None:
        raise UserError(
            f"model.global_every={config.global_every}: without effect, as no layer has a window; set "
            "model.sliding_window, or leave it out"
        )
    if config.rope.local_theta is not None and (config.sliding_window is None or config.positions != "rotary"):
        raise UserError(
            f"model.rope.local_theta={config.rope.local_theta:g}: without effect, as it is of layers with a window and "
            "rotary positions; set model.sliding_window, or leave it out"
        )
    _check_rope_scaling(config)
    if config.global_every == 1:
        raise UserError("model.global_every=1: leaves no layer with a window; use 2 or more, or no sliding_window")
    if config.experts.count:
        _check_experts(config)
    elif config.experts != ExpertsConfig():
        raise UserError("model.experts: has settings, but model.experts.count=0 makes no experts; set count")


_SCALINGS_WITH = {
    "original_positions": ("llama3", "yarn"),
    "low": ("llama3",),
    "high": ("llama3",),
    **dict.fromkeys(("beta_slow", "beta_fast", "truncate", "table_factor", "mscale", "mscale_all_dim"), ("yarn",)),
}
"""Values of model.rope_scaling for which each setting of model.rope has an effect."""


def _check_rope_scaling(config: TransformerConfig) -> None:
    rope, plain = config.rope, RopeConfig()
    for key, scalings in _SCALINGS_WITH.items():
        value = getattr(rope, key)
        if value != getattr(plain, key) and config.rope_scaling not in scalings:
            raise UserError(
                f"model.rope.{key}={str(value).lower()}: without effect at model.rope_scaling={config.rope_scaling}; "
                f"it is of {' and '.join(scalings)}"
            )
    for low, high in (("low", "high"), ("beta_slow", "beta_fast")):
        if getattr(rope, low) >= getattr(rope, high):
            raise UserError(
                f"model.rope.{low}={getattr(rope, low):g}: must be less than model.rope.{high}={getattr(rope, high):g}"
            )
    if config.rope_scaling == "yarn" and config.rope_theta <= 1:
        raise UserError(f"model.rope_theta={config.rope_theta:g}: yarn needs a base above 1")


def _check_latent_attention(config: TransformerConfig) -> None:
    latent, width = config.latent, compute_head_dim(config)
    if latent.value_head_dim > width:
        raise UserError(
            f"model.latent.value_head_dim={latent.value_head_dim}: is wider than a query, {width}; lower it"
        )
    wanted: dict[str, tuple[object, object]] = {
        "positions": (config.positions, "rotary"),
        "query_key_norm": (config.query_key_norm, "none"),
        "bias": (config.bias, False),
        "dropout": (config.dropout, 0.0),
        "head_dim": (config.head_dim, None),
        "sliding_window": (config.sliding_window, None),
        "attention_softcap": (config.attention_softcap, None),
        "norm": (config.norm, "rmsnorm"),
        "post_norms": (config.post_norms, False),
    }
    for key, (value, only) in wanted.items():
        if value != only:
            raise UserError(
                f"model.{key}={str(value).lower()}: model.latent.kv_rank={latent.kv_rank} goes only with "
                f"model.{key}={'null' if only is None else str(only).lower()}"
            )
    if config.kv_heads not in (None, config.heads):
        raise UserError(
            f"model.kv_heads={config.kv_heads}: latent attention expands keys and values for each of "
            f"model.heads={config.heads}; leave it out"
        )


def _check_experts(config: TransformerConfig) -> None:
    experts = config.experts
    if experts.top_k > experts.count:
        raise UserError(
            f"model.experts.top_k={experts.top_k}: a token cannot use more than model.experts.count={experts.count}; "
            "lower it"
        )
    if experts.first_dense >= config.layers:
        raise UserError(
            f"model.experts.first_dense={experts.first_dense}: leaves no layer of model.layers={config.layers} with "
            "experts; lower it"
        )
    if config.activation != "swiglu" or config.bias:
        raise UserError("model.experts: have activation=swiglu and no biases; set both, or model.experts.count=0")
    _check_divides("experts.groups", experts.groups, "experts.count", experts.count, "groups are equal")
    if experts.top_groups > experts.groups:
        raise UserError(f"model.experts.top_groups={experts.top_groups}: there are {experts.groups} groups; lower it")
    size = experts.count // experts.groups
    if experts.top_k > experts.top_groups * size:
        raise UserError(
            f"model.experts.top_k={experts.top_k}: top_groups={experts.top_groups} groups have "
            f"{experts.top_groups * size} experts; raise top_groups"
        )
    if experts.groups > 1 and size < 2:
        raise UserError(f"model.experts.groups={experts.groups}: a group's score is that of its two best; use fewer")


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether the feed-forward layer of this block, counted from 0, is a mixture of experts."""
    return config.experts.count > 0 and layer >= config.experts.first_dense


def count_expert_layers(config: TransformerConfig) -> int:
    """Count the blocks whose feed-forward layer is a mixture of experts."""
    return sum(has_experts(config, layer) for layer in range(config.layers))


def compute_expert_width(config: TransformerConfig) -> int:
    """Return the width of one routed expert."""
    return config.experts.feed_forward or config.feed_forward


def check_vit(config: VisionTransformerConfig) -> None:
    """Check the shape of a vision transformer; see check_shape."""
    _check_divides("heads", config.heads, "hidden", config.hidden, "a head takes an equal part of it")
    why = "an image is cut into whole patches"
    _check_divides("patch_size", config.patch_size, "image_size", config.image_size, why)


def _check_divides(part: str, divisor: int, key: str, value: int, why: str) -> None:
    if value % divisor:
        raise UserError(f"model.{part}={divisor}: does not divide model.{key}={value}; {why}")


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


def _query_key_norms(config: TransformerConfig) -> int:
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
        + config.layers * (count_block_norms(config) * norm + _query_key_norms(config))
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


def compute_flops_per_token(config: ModelConfig, sequence_length: int) -> float | None:
    """Compute the model FLOPs of forward and backward for one target, without recomputation; MFU is computed from them.

    Transformer, a token of a sequence of T = sequence_length (Chowdhery et al. 2022, arXiv:2204.02311, appendix B,
    with the causal half):

        6 N + 6 layers heads head_dim T

    N is the number of weights in matrix products of a token: the linear layers of all blocks, of routed experts only
    top_k, and the head, but no embedding, norm or bias. Forward is 2 N, backward twice that. Attention takes 2 T' heads
    head_dim for q k^T and as much for the product with v, where a token attends to T' = T / 2 others on average under
    the causal mask; times 3 with backward. In a layer with a window T' is smaller: see compute_mean_keys. Where values
    are narrower than keys (latent attention), head_dim is the mean of both widths.

    Vision transformer: the target is an image, T = patches + 1 tokens from the shape (sequence_length is not used),
    attention in full (12 layers hidden T a token), the patch projection once a patch and the head once.
    None for a custom model.
    """
    if isinstance(config, TransformerConfig):
        used = _count_blocks(config, bias=False, routed=config.experts.top_k if config.experts.count else 0)
        weights = used + config.vocab_size * config.hidden
        width = config.heads * compute_mean_head_dim(config)
        seen = sum(2 * compute_mean_keys(config, layer, sequence_length) for layer in range(config.layers))
        return float(count_transformer_flops(weights, width, seen))
    if isinstance(config, VisionTransformerConfig):
        return _count_vit_flops(config)
    return None


def compute_mean_keys(config: TransformerConfig, layer: int, sequence_length: int) -> float:
    """Mean number of keys that a token sees in a layer: T / 2, or with a window of w < T positions w - w^2 / (2 T).

    The first w tokens of a sequence see w / 2 keys on average, all others w.
    """
    window = find_window(config, layer)
    if window is None or window >= sequence_length:
        return sequence_length / 2
    return window - window**2 / (2 * sequence_length)


def count_transformer_flops(weights: Any, attention_width: Any, sequence_length: Any) -> Any:
    """Return 6 N + 6 layers heads head_dim T, of numbers or of the planner's columns of jobs.

    weights: N. attention_width: layers heads head_dim; the factor `layers` may be in sequence_length instead.
    """
    return 6 * weights + 6 * attention_width * sequence_length


def _count_vit_flops(config: VisionTransformerConfig) -> float:
    tokens = count_vit_tokens(config)
    blocks = tokens * config.layers * (6.0 * _count_vit_block(config, bias=False) + 12.0 * config.hidden * tokens)
    patches = (tokens - 1) * config.channels * config.patch_size**2 * config.hidden
    return blocks + 6.0 * (patches + config.hidden * config.classes)
