"""config.json of Gemma 2 and of the text models of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_train.checkpoint.convert.hf_config.dense import LAYER_TYPES, encode_llama, find_global_every, list_layer_types
from hpc_train.checkpoint.convert.hf_config.rotary import (
    Json,
    parse_rotary,
    parse_scaling,
    refuse_unknown,
    split_rotary_by_window,
)
from hpc_train.config.model import TransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import compute_head_dim

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Bases of Gemma 3 where a file leaves them to the library's defaults."""


def encode_gemma2(config: TransformerConfig) -> Json:
    """Return the content of config.json of a Gemma 2."""
    plain = {key: value for key, value in encode_llama(config).items() if key not in ("mlp_bias", "hidden_act")}
    width = compute_head_dim(config)
    scalar = width if config.attention_scale is None else 1 / config.attention_scale**2
    if abs(round(scalar) - scalar) > 1e-9 * scalar:
        raise UserError(
            f"model={config.name}: model.attention_scale={config.attention_scale}: Gemma of transformers has the root "
            "of a whole number there (query_pre_attn_scalar); use --format safetensors"
        )
    return {
        **plain,
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scalar),
        # Without windows the library still wants a number.
        "sliding_window": config.sliding_window or config.max_positions,
        "layer_types": list_layer_types(config),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "pad_token_id": None,
    }


def encode_gemma3(config: TransformerConfig) -> Json:
    """Return the content of config.json of a text model of Gemma 3."""
    if config.sliding_window and config.rope.local_theta is None and config.rope_scaling != "none":
        raise UserError(
            f"model={config.name}: model.rope_scaling={config.rope_scaling}: Gemma 3 of transformers scales no layers "
            "with a window; set model.rope.local_theta, or use --format safetensors"
        )
    return {
        **encode_gemma2(config),
        "architectures": ["Gemma3ForCausalLM"],
        "rope_local_base_freq": config.rope.local_theta or config.rope_theta,
    }


def parse_gemma2(body: Mapping[str, Any], name: str) -> TransformerConfig:
    """Return the model of a config.json of Gemma 2."""
    config = _parse_shape(body, name, 2)
    return replace(_parse_caps(config, body, 50.0, 30.0), **parse_rotary(body))


def parse_gemma3(body: Mapping[str, Any], name: str) -> TransformerConfig:
    """Return the model of a config.json of a text model of Gemma 3."""
    config = _parse_shape(body, name, int(body.get("sliding_window_pattern") or 6))
    rope, narrow = split_rotary_by_window(body)
    rotary = parse_scaling(rope, body, float(rope.get("rope_theta", body.get("rope_theta", _GLOBAL_THETA))))
    config = replace(config, query_key_norm="head", **rotary)
    if config.sliding_window is not None:
        local = float(narrow.get("rope_theta", body.get("rope_local_base_freq", _LOCAL_THETA)))
        config = replace(config, rope=replace(config.rope, local_theta=local))
    return _parse_caps(config, body, None, None)


def _parse_caps(
    config: TransformerConfig, body: Mapping[str, Any], scores: float | None, logits: float | None
) -> TransformerConfig:
    """Set the soft-caps; scores and logits: the library's defaults."""
    scores = body.get("attn_logit_softcapping", scores)
    logits = body.get("final_logit_softcapping", logits)
    return replace(
        config,
        attention_softcap=None if scores is None else float(scores),
        logit_softcap=None if logits is None else float(logits),
    )


def _parse_shape(body: Mapping[str, Any], name: str, pattern: int) -> TransformerConfig:
    """Return what both families have; pattern: every so-many-th layer has no window where layer_types is missing."""
    refuse_unknown(body, "hidden_activation", {"gelu_pytorch_tanh"}, "gelu_pytorch_tanh")
    refuse_unknown(body, "attention_bias", {False}, False)
    refuse_unknown(body, "use_bidirectional_attention", {False, None}, False)
    layers, heads, width = int(body["num_hidden_layers"]), int(body["num_attention_heads"]), int(body["head_dim"])
    hidden, scalar = int(body["hidden_size"]), body.get("query_pre_attn_scalar", 256)
    kinds = body.get("layer_types") or [LAYER_TYPES[(layer + 1) % pattern == 0] for layer in range(layers)]
    window, every = find_global_every(kinds, layers, int(body["sliding_window"]))
    return TransformerConfig(
        name=name,
        vocab_size=int(body["vocab_size"]),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=body.get("num_key_value_heads"),
        head_dim=None if width * heads == hidden else width,
        feed_forward=int(body["intermediate_size"]),
        activation="geglu",
        norm="rmsnorm_1p",
        norm_eps=float(body.get("rms_norm_eps", 1e-6)),
        post_norms=True,
        scaled_embeddings=True,
        max_positions=int(body["max_position_embeddings"]),
        tied_embeddings=bool(body.get("tie_word_embeddings", True)),
        sliding_window=window,
        global_every=every,
        attention_scale=None if scalar == width else float(scalar) ** -0.5,
    )
