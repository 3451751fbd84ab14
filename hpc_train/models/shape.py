"""Check a model's shape, and compute sizes that follow from it, without torch; parameters are counted in counts.py."""

from __future__ import annotations

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

    model_type: str = ""
    """Family, as config.json names it; the names of its layers follow from it."""
    parameters: int = 0
    """Number of parameters, a tied table once."""
    shared_feed_forward: int = 0
    """Width of the feed-forward layer that all tokens pass beside the experts."""
    parallel_block: bool = False
    """Attention and feed-forward layer run on the same input."""
    fused_attention_input: bool = False
    """Queries, keys and values are one linear layer."""
    masks_windows: bool = False
    """A window is a mask of all pairs, for a kernel that computes all of them."""
    stores_scores: bool = False
    """Attention is computed by plain operations, which store the scores of every head."""


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


def count_window_layers(config: TransformerConfig) -> int:
    """Count the layers with a sliding window."""
    return sum(find_window(config, layer) is not None for layer in range(config.layers))


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
            f"model.global_every={config.global_every}: has no effect, as no layer has a window; set "
            "model.sliding_window, or leave it out"
        )
    if config.rope.local_theta is not None and (config.sliding_window is None or config.positions != "rotary"):
        raise UserError(
            f"model.rope.local_theta={config.rope.local_theta:g}: has no effect, as it is of layers with a window and "
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
    rope, defaults = config.rope, RopeConfig()
    for key, scalings in _SCALINGS_WITH.items():
        value = getattr(rope, key)
        if value != getattr(defaults, key) and config.rope_scaling not in scalings:
            raise UserError(
                f"model.rope.{key}={str(value).lower()}: has no effect with model.rope_scaling={config.rope_scaling}; "
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
    requirements: dict[str, tuple[object, object]] = {
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
    for key, (value, only) in requirements.items():
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
