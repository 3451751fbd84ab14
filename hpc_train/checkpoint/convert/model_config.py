"""Convert config.json of transformers from and to our model config, for the families of models/huggingface.py.

`check_tensors_fit_model` compares tensors with a model before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException

from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.config.compose import config_from_dict, config_to_dict
from hpc_train.config.model import (
    CustomModelConfig,
    ExpertsConfig,
    HfModelConfig,
    LatentConfig,
    ModelConfig,
    TransformerConfig,
    VisionTransformerConfig,
)
from hpc_train.config.run import RunConfig
from hpc_train.config.run_file import load_run_file
from hpc_train.errors import UserError
from hpc_train.models.huggingface import find_model_family
from hpc_train.models.registry import build_model
from hpc_train.models.shape import compute_expert_width, compute_head_dim, count_kv_heads, find_window

Json = dict[str, Any]
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only values of these settings that models.rotary computes."""


def encode_hf_config(config: ModelConfig, dtype: str) -> Json:
    """Return the content of config.json. Raises UserError for a model of none of these families."""
    kind = find_model_family(config)
    makers: dict[str, Any] = {
        "llama": _encode_llama,
        "mistral": _encode_mistral,
        "ministral": _encode_ministral,
        "gpt2": _encode_gpt2,
        "vit": _encode_vit,
        "mixtral": _encode_mixtral,
        "qwen3_moe": partial(_encode_many_experts, architecture="Qwen3MoeForCausalLM"),
        "olmoe": partial(_encode_many_experts, architecture="OlmoeForCausalLM"),
        "deepseek_v3": _encode_deepseek_v3,
    }
    made: Json = makers[kind](config)
    return {**made, "model_type": kind, "torch_dtype": dtype}


def parse_hf_config(body: Mapping[str, Any], name: str) -> ModelConfig:
    """Return the model that a config.json describes. Raises UserError if our models cannot compute it."""
    readers: dict[Any, Any] = {
        "llama": _parse_llama,
        "mistral": _parse_mistral,
        "ministral": _parse_ministral,
        "gpt2": _parse_gpt2,
        "vit": _parse_vit,
        "mixtral": _parse_mixtral,
        "qwen3_moe": _parse_qwen3_moe,
        "olmoe": _parse_olmoe,
        "deepseek_v3": _parse_deepseek_v3,
    }
    kind = body.get("model_type") if isinstance(body, Mapping) else None
    if not isinstance(kind, str) or kind not in readers:
        raise UserError(f"config.json: model_type {kind!r} is not one of {', '.join(readers)}, which are those we have")
    try:
        config: ModelConfig = readers[kind](body, name)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"config.json: {type(error).__name__} {error}: is it of a {kind} model?") from error
    return config


def _encode_llama(config: TransformerConfig) -> Json:
    scaling = None
    if config.rope_scaling == "llama3":
        scaling = {"rope_type": "llama3", "factor": config.rope_factor, **_LLAMA3}
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
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": config.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _parse_llama(body: Mapping[str, Any], name: str) -> TransformerConfig:
    _refuse_unknown(body, "hidden_act", {"silu", "swish"}, "silu")
    _refuse_unknown(body, "mlp_bias", {bool(body.get("attention_bias", False))}, False)
    # transformers 5 writes rope_parameters, older releases rope_scaling and a top-level rope_theta.
    rope = body.get("rope_parameters") or body.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3") or (kind == "llama3" and any(rope.get(k) != v for k, v in _LLAMA3.items())):
        raise UserError(f"config.json: this scaling of rotary positions ({kind}) is not one that we compute")
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
        rope_theta=float(rope.get("rope_theta", body.get("rope_theta", 10000.0))),
        rope_scaling="llama3" if kind == "llama3" else "none",
        rope_factor=float(rope.get("factor", 8.0)) if kind == "llama3" else 8.0,
        max_positions=int(body["max_position_embeddings"]),
        bias=bool(body.get("attention_bias", False)),
        tied_embeddings=bool(body.get("tie_word_embeddings", False)),
    )


def _encode_mistral(config: TransformerConfig) -> Json:
    plain = {key: value for key, value in _encode_llama(config).items() if key not in ("attention_bias", "mlp_bias")}
    return {**plain, "architectures": ["MistralForCausalLM"], "sliding_window": config.sliding_window}


def _encode_ministral(config: TransformerConfig) -> Json:
    kinds = {True: "full_attention", False: "sliding_attention"}
    layers = [kinds[find_window(config, layer) is None] for layer in range(config.layers)]
    return {**_encode_mistral(config), "architectures": ["MinistralForCausalLM"], "layer_types": layers}


_MISTRAL_WINDOW = 4096
"""Window of a config.json of Mistral that has no such key: the library's default."""


def _parse_mistral(body: Mapping[str, Any], name: str) -> TransformerConfig:
    window = body.get("sliding_window", _MISTRAL_WINDOW)
    return replace(_parse_llama(body, name), sliding_window=None if window is None else int(window))


def _parse_ministral(body: Mapping[str, Any], name: str) -> TransformerConfig:
    config = _parse_mistral(body, name)
    given = body.get("layer_types")
    if given is None or config.sliding_window is None:
        return config
    is_full = [kind == "full_attention" for kind in given]
    if not any(is_full):
        return config
    every = is_full.index(True) + 1
    if len(is_full) != config.layers or is_full != [layer % every == 0 for layer in range(1, len(is_full) + 1)]:
        raise UserError("config.json: layer_types: our model has full attention in every n-th layer; this is another")
    return replace(config, global_every=every) if every > 1 else replace(config, sliding_window=None)


def _encode_mixtral(config: TransformerConfig) -> Json:
    return {
        **_encode_llama(config),
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": compute_expert_width(config),
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.top_k,
        "sliding_window": config.sliding_window,
    }


def _parse_mixtral(body: Mapping[str, Any], name: str) -> TransformerConfig:
    window = body.get("sliding_window")
    experts = ExpertsConfig(count=int(body["num_local_experts"]), top_k=int(body["num_experts_per_tok"]))
    return replace(_parse_llama(body, name), experts=experts, sliding_window=None if window is None else int(window))


def _encode_many_experts(config: TransformerConfig, architecture: str) -> Json:
    olmoe = architecture.startswith("Olmoe")
    width = compute_expert_width(config)
    return {
        **_encode_llama(config),
        "architectures": [architecture],
        "intermediate_size": width if olmoe else config.feed_forward,
        **({"clip_qkv": None} if olmoe else {"moe_intermediate_size": width, "decoder_sparse_step": 1}),
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.top_k,
        "norm_topk_prob": config.experts.normalise,
    }


def _parse_qwen3_moe(body: Mapping[str, Any], name: str) -> TransformerConfig:
    _refuse_unknown(body, "decoder_sparse_step", {1}, 1)
    _refuse_unknown(body, "use_sliding_window", {False}, False)
    if body.get("mlp_only_layers"):
        raise UserError("config.json: mlp_only_layers names dense layers; our model has them only at its beginning")
    width = int(body["moe_intermediate_size"])
    return replace(_parse_llama(body, name), query_key_norm="head", experts=_parse_many_experts(body, width))


def _parse_olmoe(body: Mapping[str, Any], name: str) -> TransformerConfig:
    _refuse_unknown(body, "clip_qkv", {None}, None)
    return replace(_parse_llama(body, name), query_key_norm="full", experts=_parse_many_experts(body, None))


def _parse_many_experts(body: Mapping[str, Any], width: int | None) -> ExpertsConfig:
    # Renamed between releases of transformers.
    count = body["num_experts"] if "num_experts" in body else body["num_local_experts"]
    return ExpertsConfig(
        count=int(count),
        top_k=int(body["num_experts_per_tok"]),
        feed_forward=width,
        normalise=bool(body.get("norm_topk_prob", False)),
    )


def _encode_deepseek_v3(config: TransformerConfig) -> Json:
    latent, experts = config.latent, config.experts
    # Latent attention has dimensions of its own in place of these.
    plain = {key: value for key, value in _encode_llama(config).items() if key not in ("head_dim", "mlp_bias")}
    return {
        **plain,
        "architectures": ["DeepseekV3ForCausalLM"],
        "moe_intermediate_size": compute_expert_width(config),
        "n_shared_experts": experts.shared,
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.top_k,
        "first_k_dense_replace": experts.first_dense,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": experts.groups,
        "topk_group": experts.top_groups,
        "norm_topk_prob": experts.normalise,
        "routed_scaling_factor": experts.scale,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_head_dim,
        "qk_rope_head_dim": latent.rope_head_dim,
        "v_head_dim": latent.value_head_dim,
        "rope_interleave": latent.interleaved,
        # Multi-token prediction is not trained here.
        "num_nextn_predict_layers": 0,
    }


_BIAS_STEP = 0.001
"""Step of the router's bias in DeepSeek-V3's own training (arXiv:2412.19437, section 4.2), which no file says."""


def _parse_deepseek_v3(body: Mapping[str, Any], name: str) -> TransformerConfig:
    _refuse_unknown(body, "scoring_func", {"sigmoid"}, "sigmoid")
    _refuse_unknown(body, "topk_method", {"noaux_tc"}, "noaux_tc")
    _refuse_unknown(body, "moe_layer_freq", {1}, 1)
    _refuse_unknown(body, "attention_bias", {False}, False)
    latent = LatentConfig(
        kv_rank=int(body["kv_lora_rank"]),
        q_rank=body.get("q_lora_rank"),
        nope_head_dim=int(body["qk_nope_head_dim"]),
        rope_head_dim=int(body["qk_rope_head_dim"]),
        value_head_dim=int(body["v_head_dim"]),
        interleaved=bool(body.get("rope_interleave", True)),
    )
    experts = ExpertsConfig(
        count=int(body["n_routed_experts"]),
        top_k=int(body["num_experts_per_tok"]),
        feed_forward=int(body["moe_intermediate_size"]),
        shared=int(body["n_shared_experts"]),
        first_dense=int(body.get("first_k_dense_replace") or 0),
        gate="sigmoid",
        normalise=bool(body.get("norm_topk_prob", True)),
        scale=float(body.get("routed_scaling_factor", 1.0)),
        groups=int(body.get("n_group") or 1),
        top_groups=int(body.get("topk_group") or 1),
        balance_bias=_BIAS_STEP,
    )
    return replace(_parse_llama(body, name), kv_heads=None, head_dim=None, latent=latent, experts=experts)


def _encode_gpt2(config: TransformerConfig) -> Json:
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


def _parse_gpt2(body: Mapping[str, Any], name: str) -> TransformerConfig:
    _refuse_unknown(body, "activation_function", set(_GPT2_ACTIVATIONS), "gelu_new")
    _refuse_unknown(body, "scale_attn_weights", {True}, True)
    _refuse_unknown(body, "scale_attn_by_inverse_layer_idx", {False}, False)
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


def _encode_vit(config: VisionTransformerConfig) -> Json:
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


def _parse_vit(body: Mapping[str, Any], name: str) -> VisionTransformerConfig:
    _refuse_unknown(body, "hidden_act", {"gelu"}, "gelu")
    _refuse_unknown(body, "qkv_bias", {True}, True)
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


def _refuse_unknown(body: Mapping[str, Any], key: str, supported: set[Any], default: Any) -> None:
    value = body.get(key, default)
    if value not in supported:
        raise UserError(f"config.json: {key} is {value!r}; our model has {' or '.join(map(repr, sorted(supported)))}")


def load_run_config(file: Path, base: str | None = None) -> RunConfig:
    """Load the config.yaml of a run. Raises UserError if it is not one.

    base: where the folder of a model of transformers is now, if it is not where it was.
    """
    try:
        config = config_from_dict(load_run_file(file))
        return config if base is None else _move_base(config, base)
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}); give the config.yaml of a run") from error
    except (OmegaConfBaseException, AssertionError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file}: is not the config.yaml of a run ({type(error).__name__})") from error


def load_model_config(file: Path, base: str | None = None) -> RunConfig:
    """Load the config.yaml of a run whose model is about to be built. See load_run_config.

    Raises UserError, with what to do, if the folder of a model of transformers has moved.
    """
    config = load_run_config(file, base)
    model = config.model
    if isinstance(model, HfModelConfig) and not Path(model.path).expanduser().is_dir():
        raise UserError(
            f"{file}: its model is that of model.path={model.path}, which is not there; say where this folder is now "
            "with --base FOLDER"
        )
    return config


def _move_base(config: RunConfig, base: str) -> RunConfig:
    """Let the model, and a tokenizer from the same folder, be read from `base`."""
    if not isinstance(config.model, HfModelConfig):
        raise UserError(f"--base: model={config.model.name} is not read from a folder of transformers; leave it out")
    plain, before = config_to_dict(config), config.model.path
    plain["model"]["path"] = str(Path(base).expanduser().absolute())
    if plain["data"].get("tokenizer") == before:
        plain["data"]["tokenizer"] = plain["model"]["path"]
    return config_from_dict(plain)


def check_tensors_fit_model(tensors: Iterable[SavedTensor], config: ModelConfig, where: str) -> None:
    """Raise UserError for the first weight that the model does not have, that is missing, or that has another shape.

    A custom model is not checked: only the run itself can build it.
    """
    if isinstance(config, CustomModelConfig):
        return
    given, expected = {tensor.name: tensor.shape for tensor in tensors}, _model_shapes(config)
    unknown, missing = (
        [name for name in given if name not in expected],
        [name for name in expected if name not in given],
    )
    if unknown:
        raise UserError(f"{where}: the tensor {unknown[0]!r} is not one of model={config.name}; name another model")
    if missing:
        raise UserError(f"{where}: model={config.name} needs the tensor {missing[0]!r}, which is not there")
    for name, shape in given.items():
        if shape != expected[name]:
            raise UserError(
                f"{where}: the tensor {name!r} is of shape {shape}, in model={config.name} of {expected[name]}"
            )


def _model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"):
            model = build_model(config)
    except (RuntimeError, ArithmeticError, TypeError, ValueError, AssertionError) as error:
        text = " ".join(str(error).split())[:200]
        raise UserError(
            f"model={config.name}: cannot be built with these sizes ({type(error).__name__}: {text})"
        ) from None
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
