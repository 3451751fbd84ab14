"""config.json of the mixtures of experts: Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3; functions as in dense.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_train.checkpoint.convert.hf_config.dense import encode_llama, parse_llama
from hpc_train.checkpoint.convert.hf_config.rotary import Json, refuse_unknown
from hpc_train.config.model import ExpertsConfig, LatentConfig, TransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import compute_expert_width


def encode_mixtral(config: TransformerConfig) -> Json:
    return {
        **encode_llama(config),
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": compute_expert_width(config),
        "num_local_experts": config.experts.count,
        "num_experts_per_tok": config.experts.top_k,
        "sliding_window": config.sliding_window,
    }


def parse_mixtral(body: Mapping[str, Any], name: str) -> TransformerConfig:
    window = body.get("sliding_window")
    experts = ExpertsConfig(count=int(body["num_local_experts"]), top_k=int(body["num_experts_per_tok"]))
    return replace(parse_llama(body, name), experts=experts, sliding_window=None if window is None else int(window))


def encode_many_experts(config: TransformerConfig, architecture: str) -> Json:
    olmoe = architecture.startswith("Olmoe")
    width = compute_expert_width(config)
    return {
        **encode_llama(config),
        "architectures": [architecture],
        "intermediate_size": width if olmoe else config.feed_forward,
        **({"clip_qkv": None} if olmoe else {"moe_intermediate_size": width, "decoder_sparse_step": 1}),
        "num_experts": config.experts.count,
        "num_experts_per_tok": config.experts.top_k,
        "norm_topk_prob": config.experts.normalise,
    }


def parse_qwen3_moe(body: Mapping[str, Any], name: str) -> TransformerConfig:
    refuse_unknown(body, "decoder_sparse_step", {1}, 1)
    refuse_unknown(body, "use_sliding_window", {False}, False)
    if body.get("mlp_only_layers"):
        raise UserError("config.json: mlp_only_layers names dense layers; our model has them only at its beginning")
    width = int(body["moe_intermediate_size"])
    return replace(parse_llama(body, name), query_key_norm="head", experts=parse_many_experts(body, width))


def parse_olmoe(body: Mapping[str, Any], name: str) -> TransformerConfig:
    refuse_unknown(body, "clip_qkv", {None}, None)
    return replace(parse_llama(body, name), query_key_norm="full", experts=parse_many_experts(body, None))


def parse_many_experts(body: Mapping[str, Any], width: int | None) -> ExpertsConfig:
    # Renamed between releases of transformers.
    count = body["num_experts"] if "num_experts" in body else body["num_local_experts"]
    return ExpertsConfig(
        count=int(count),
        top_k=int(body["num_experts_per_tok"]),
        feed_forward=width,
        normalise=bool(body.get("norm_topk_prob", False)),
    )


def encode_deepseek_v3(config: TransformerConfig) -> Json:
    latent, experts = config.latent, config.experts
    # Latent attention has dimensions of its own in place of these.
    plain = {key: value for key, value in encode_llama(config).items() if key not in ("head_dim", "mlp_bias")}
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


def parse_deepseek_v3(body: Mapping[str, Any], name: str) -> TransformerConfig:
    refuse_unknown(body, "scoring_func", {"sigmoid"}, "sigmoid")
    refuse_unknown(body, "topk_method", {"noaux_tc"}, "noaux_tc")
    refuse_unknown(body, "moe_layer_freq", {1}, 1)
    refuse_unknown(body, "attention_bias", {False}, False)
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
    return replace(parse_llama(body, name), kv_heads=None, head_dim=None, latent=latent, experts=experts)
