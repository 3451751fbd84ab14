"""config.json of OLMo 2 and 3 (arXiv:2501.00656, arXiv:2512.13961)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_train.checkpoint.convert.hf_config.dense import (
    LAYER_TYPES,
    encode_llama,
    find_global_every,
    list_layer_types,
    parse_llama,
)
from hpc_train.checkpoint.convert.hf_config.rotary import Json, parse_scaling, split_rotary_by_window
from hpc_train.config.model import TransformerConfig
from hpc_train.errors import UserError

_THETA = 500_000.0
"""Base of a file that leaves it to the library's default."""
_WINDOW = 4096
"""Olmo3Config.sliding_window, where a file leaves it out."""


def encode_olmo2(config: TransformerConfig) -> Json:
    """Return the content of config.json of an OLMo 2."""
    plain = {key: value for key, value in encode_llama(config).items() if key not in ("head_dim", "mlp_bias")}
    if config.head_dim not in (None, config.hidden // config.heads):
        raise UserError(
            f"model={config.name}: model.head_dim={config.head_dim}: OLMo of transformers has hidden / heads there; "
            "use --format safetensors"
        )
    return {**plain, "architectures": ["Olmo2ForCausalLM"], "pad_token_id": None}


def encode_olmo3(config: TransformerConfig) -> Json:
    """Return the content of config.json of an OLMo 3: only layers without a window have scaled positions.

    transformers 5 reads rope_parameters, older releases rope_theta and rope_scaling.
    """
    plain = encode_olmo2(config)
    scaling, base = plain["rope_scaling"] or {"rope_type": "default"}, {"rope_theta": config.rope_theta}
    return {
        **plain,
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": config.sliding_window,
        "layer_types": list_layer_types(config),
        "rope_parameters": {
            "full_attention": {**scaling, **base},
            "sliding_attention": {"rope_type": "default", **base},
        },
    }


def parse_olmo2(body: Mapping[str, Any], name: str) -> TransformerConfig:
    """Return the model of a config.json of an OLMo 2."""
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", body.get("rope_theta", _THETA)))
    return replace(_parse_shape(body, name), **parse_scaling(rope, body, theta))


def parse_olmo3(body: Mapping[str, Any], name: str) -> TransformerConfig:
    """Return the model of a config.json of an OLMo 3."""
    config = _parse_shape(body, name)
    kinds = body.get("layer_types") or [LAYER_TYPES[layer % 4 == 0] for layer in range(1, config.layers + 1)]
    window, every = find_global_every(kinds, config.layers, int(body.get("sliding_window") or _WINDOW))
    rope, narrow = split_rotary_by_window(body)
    theta = float(rope.get("rope_theta", body.get("rope_theta", _THETA)))
    config = replace(config, sliding_window=window, global_every=every, **parse_scaling(rope, body, theta))
    local = float(narrow.get("rope_theta", body.get("rope_theta", _THETA)))
    if window is None or (local == theta and config.rope_scaling == "none"):
        return config
    return replace(config, rope=replace(config.rope, local_theta=local))


def _parse_shape(body: Mapping[str, Any], name: str) -> TransformerConfig:
    """Return what both families have, without windows and positions."""
    if body.get("attention_bias"):
        raise UserError("config.json: attention_bias is true; our model has biases in all linear layers or in none")
    plain = {key: value for key, value in body.items() if key not in ("rope_parameters", "rope_scaling")}
    config = parse_llama({"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, **plain}, name)
    return replace(config, pre_norms=False, post_norms=True, query_key_norm="full")
