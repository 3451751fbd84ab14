"""config.json of Llama, Mistral, Ministral, GPT-2 and ViT.

An `encode_` function returns the fields of config.json that describe one of our shapes; a `parse_` function returns the
shape that config.json describes. Raises UserError for what our models do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_train.checkpoint.convert.hf_config.rotary import Json, encode_rotary, parse_rotary, refuse_unknown
from hpc_train.config.model import TransformerConfig, VisionTransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import compute_head_dim, count_kv_heads, find_window

LAYER_TYPES = {True: "full_attention", False: "sliding_attention"}
"""The library's name of a layer without a window (True), and of one with a window."""
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def encode_llama(config: TransformerConfig) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": count_kv_heads(config),
        "head_dim": compute_head_dim(config),
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        **encode_rotary(config),
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def parse_llama(body: Mapping[str, Any], name: str) -> TransformerConfig:
    refuse_unknown(body, "hidden_act", {"silu", "swish"}, "silu")
    refuse_unknown(body, "mlp_bias", {bool(body.get("attention_bias", False))}, False)
    hidden, heads = int(body["hidden_size"]), int(body["num_attention_heads"])
    return TransformerConfig(
        name=name,
        vocab_size=int(body["vocab_size"]),
        layers=int(body["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=body.get("num_key_value_heads"),
        # Written by many files although it is the default; None keeps our config equal to one that was never exported.
        head_dim=None if body.get("head_dim") == hidden // heads else body.get("head_dim"),
        feed_forward=int(body["intermediate_size"]),
        norm_eps=float(body["rms_norm_eps"]),
        **parse_rotary(body),
        max_positions=int(body["max_position_embeddings"]),
        bias=bool(body.get("attention_bias", False)),
        tied_embeddings=bool(body.get("tie_word_embeddings", False)),
    )


def encode_mistral(config: TransformerConfig) -> Json:
    plain = {key: value for key, value in encode_llama(config).items() if key not in ("attention_bias", "mlp_bias")}
    return {**plain, "architectures": ["MistralForCausalLM"], "sliding_window": config.sliding_window}


def encode_ministral(config: TransformerConfig) -> Json:
    return {
        **encode_mistral(config),
        "architectures": ["MinistralForCausalLM"],
        "layer_types": list_layer_types(config),
    }


_MISTRAL_WINDOW = 4096
"""Window of a config.json of Mistral that has no such key: the library's default."""


def parse_mistral(body: Mapping[str, Any], name: str) -> TransformerConfig:
    window = body.get("sliding_window", _MISTRAL_WINDOW)
    return replace(parse_llama(body, name), sliding_window=None if window is None else int(window))


def parse_ministral(body: Mapping[str, Any], name: str) -> TransformerConfig:
    config = parse_mistral(body, name)
    given = body.get("layer_types")
    if given is None or config.sliding_window is None:
        return config
    window, every = find_global_every(given, config.layers, config.sliding_window)
    return replace(config, sliding_window=window, global_every=every)


def list_layer_types(config: TransformerConfig) -> list[str]:
    """Return layer_types of config.json: whether each layer has a window."""
    return [LAYER_TYPES[find_window(config, layer) is None] for layer in range(config.layers)]


def find_global_every(kinds: Sequence[str], layers: int, window: int) -> tuple[int | None, int]:
    """Return model.sliding_window and model.global_every of a list layer_types. Raises UserError for another order."""
    is_full = [kind == LAYER_TYPES[True] for kind in kinds]
    if not any(is_full) and len(is_full) == layers:
        return window, 0
    every = is_full.index(True) + 1
    if len(is_full) != layers or is_full != [layer % every == 0 for layer in range(1, len(is_full) + 1)]:
        raise UserError("config.json: layer_types: our model has full attention in every n-th layer; this is another")
    return (window, every) if every > 1 else (None, 0)


def encode_gpt2(config: TransformerConfig) -> Json:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
        "n_positions": config.max_positions,
        "n_embd": config.hidden,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.feed_forward,
        "activation_function": "gelu" if config.activation == "gelu" else "gelu_new",
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def parse_gpt2(body: Mapping[str, Any], name: str) -> TransformerConfig:
    refuse_unknown(body, "activation_function", set(_GPT2_ACTIVATIONS), "gelu_new")
    refuse_unknown(body, "scale_attn_weights", {True}, True)
    refuse_unknown(body, "scale_attn_by_inverse_layer_idx", {False}, False)
    hidden = int(body["n_embd"])
    return TransformerConfig(
        name=name,
        vocab_size=int(body["vocab_size"]),
        layers=int(body["n_layer"]),
        hidden=hidden,
        heads=int(body["n_head"]),
        feed_forward=int(body.get("n_inner") or 4 * hidden),
        activation=_GPT2_ACTIVATIONS[body.get("activation_function", "gelu_new")],
        norm="layernorm",
        norm_eps=float(body.get("layer_norm_epsilon", 1e-5)),
        positions="learned",
        max_positions=int(body["n_positions"]),
        bias=True,
        tied_embeddings=bool(body.get("tie_word_embeddings", True)),
    )


def encode_vit(config: VisionTransformerConfig) -> Json:
    labels = {str(label): f"LABEL_{label}" for label in range(config.classes)}
    return {
        "architectures": ["ViTForImageClassification"],
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.channels,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.feed_forward,
        "hidden_act": "gelu",
        "qkv_bias": True,
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "initializer_range": config.init_std,
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }


def parse_vit(body: Mapping[str, Any], name: str) -> VisionTransformerConfig:
    refuse_unknown(body, "hidden_act", {"gelu"}, "gelu")
    refuse_unknown(body, "qkv_bias", {True}, True)
    return VisionTransformerConfig(
        name=name,
        image_size=int(body["image_size"]),
        patch_size=int(body["patch_size"]),
        channels=int(body.get("num_channels", 3)),
        # transformers leaves id2label out where there are its default two classes.
        classes=len(body.get("id2label") or ("", "")),
        layers=int(body["num_hidden_layers"]),
        hidden=int(body["hidden_size"]),
        heads=int(body["num_attention_heads"]),
        feed_forward=int(body["intermediate_size"]),
        norm_eps=float(body.get("layer_norm_eps", 1e-12)),
    )
