"""Find the model of the transformers library that computes what a config describes, or say why none does.

The families are Llama, Mistral, Ministral, Gemma 2 and 3, OLMo 2 and 3, GPT-2, ViT, Mixtral, Qwen3-MoE, OLMoE and
DeepSeek-V3. A new one gets a branch in find_model_family here, and a table of names in huggingface.py.
"""

from __future__ import annotations

from hpc_train.config.model import ExpertsConfig, ModelConfig, TransformerConfig, VisionTransformerConfig
from hpc_train.errors import UserError
from hpc_train.models.shape import has_latent_attention

_GEMMA_PARTS = ("attention_softcap", "logit_softcap", "attention_scale", "post_norms", "scaled_embeddings")


def find_model_family(config: ModelConfig) -> str:
    """Find the library's model that has this shape, such as llama or gpt2. Raises UserError if none has."""
    if isinstance(config, VisionTransformerConfig):
        return "vit"
    if isinstance(config, TransformerConfig):
        kind = (config.positions, config.norm, config.activation)
        if config.norm == "rmsnorm_1p":
            return _check_gemma(config)
        if not config.pre_norms:
            return _check_olmo(config)
        _refuse_gemma_parts(config)
        if has_latent_attention(config):
            return _check_deepseek(config)
        if config.experts.count:
            return _find_expert_family(config)
        if kind == ("rotary", "rmsnorm", "swiglu") and config.query_key_norm == "none":
            return _find_llama_family(config)
        is_gpt = kind[:2] == ("learned", "layernorm") and kind[2] in ("gelu", "gelu_tanh") and config.bias
        if is_gpt and config.sliding_window is None:
            return "gpt2"
    raise UserError(
        f"model={config.name}: is of none of the Llama, Gemma, OLMo, GPT-2 and ViT families of transformers, so its "
        "weights have no names there; use a model of these families"
    )


def _refuse_gemma_parts(config: TransformerConfig) -> None:
    """Raise UserError for what only the models of the Gemma family have, in one of another family."""
    defaults = TransformerConfig(name="")
    for key in _GEMMA_PARTS:
        value = getattr(config, key)
        if value != getattr(defaults, key):
            raise UserError(
                f"model={config.name}: model.{key}={str(value).lower()}: of the models of transformers only those of "
                "the Gemma family have it, with model.norm=rmsnorm_1p, so its weights have no names there; use "
                "--format safetensors"
            )
    if config.rope.local_theta is not None:
        raise UserError(
            f"model={config.name}: model.rope.local_theta={config.rope.local_theta:g}: of the models of transformers "
            "only Gemma 3 has two bases, so its weights have no names there; use --format safetensors"
        )


def _check_gemma(config: TransformerConfig) -> str:
    """Return gemma3_text, or gemma2 if queries and keys have no norms. Raises UserError for what neither computes."""
    kind = "gemma2" if config.query_key_norm == "none" else "gemma3_text"
    requirements = {
        "activation": config.activation == "geglu",
        "positions": config.positions == "rotary",
        "pre_norms": config.pre_norms,
        "post_norms": config.post_norms,
        "scaled_embeddings": config.scaled_embeddings,
        "bias": not config.bias,
        "query_key_norm": config.query_key_norm != "full",
        "experts.count": not config.experts.count,
        "rope.local_theta": kind == "gemma3_text" or config.rope.local_theta is None,
    }
    wrong = [key for key, agrees in requirements.items() if not agrees]
    if wrong:
        raise UserError(
            f"model={config.name}: model.norm=rmsnorm_1p makes it one of the Gemma family in transformers, which has "
            "gated GELU (geglu), rotary positions, post_norms and scaled_embeddings, and no biases or experts; "
            f"model.{wrong[0]} is another, so its weights have no names there; use --format safetensors"
        )
    return kind


def _check_olmo(config: TransformerConfig) -> str:
    """Return olmo2, or olmo3 with windows. Raises UserError for settings that neither has."""
    defaults = TransformerConfig(name="")
    requirements = {
        "norm": config.norm == "rmsnorm",
        "activation": config.activation == "swiglu",
        "positions": config.positions == "rotary",
        "bias": not config.bias,
        "query_key_norm": config.query_key_norm == "full",
        "experts.count": not config.experts.count,
        "rope.local_theta": config.rope.local_theta in (None, config.rope_theta),
        **{key: getattr(config, key) == getattr(defaults, key) for key in _GEMMA_PARTS if key != "post_norms"},
    }
    wrong = [key for key, agrees in requirements.items() if not agrees]
    if wrong:
        raise UserError(
            f"model={config.name}: model.pre_norms=false makes it one of the OLMo family in transformers, which has "
            "rmsnorm, swiglu, rotary positions of one base and query_key_norm=full, and no biases or experts; "
            f"model.{wrong[0]} is another, so its weights have no names there; use --format safetensors"
        )
    if config.sliding_window is not None and config.rope.local_theta is None and config.rope_scaling != "none":
        raise UserError(
            f"model={config.name}: model.rope_scaling={config.rope_scaling}: OLMo 3 of transformers scales no layers "
            f"with a window; set model.rope.local_theta={config.rope_theta:g}, or use --format safetensors"
        )
    return "olmo2" if config.sliding_window is None else "olmo3"


def _find_llama_family(config: TransformerConfig) -> str:
    """Return llama, or with windows mistral (all layers) or ministral (some). Raises UserError if those have biases."""
    if config.sliding_window is None:
        return "llama"
    if config.bias:
        raise UserError(
            f"model={config.name}: model.bias=true: Mistral of transformers, which has model.sliding_window, has no "
            "biases, so its weights have no names there; use --format safetensors"
        )
    return "ministral" if config.global_every else "mistral"


def _find_expert_family(config: TransformerConfig) -> str:
    """Return mixtral, qwen3_moe or olmoe, by the norm of queries and keys. Raises UserError if none of them fits."""
    experts, defaults = config.experts, ExpertsConfig()
    dense = config.positions != "rotary" or config.norm != "rmsnorm" or config.activation != "swiglu"
    unsupported = ("shared", "first_dense", "gate", "scale", "groups", "balance_bias", "capacity_factor")
    changed = [name for name in unsupported if getattr(experts, name) != getattr(defaults, name)]
    if config.query_key_norm == "none" and not experts.normalise:
        changed.append("normalise")
    if config.sliding_window is not None and (config.query_key_norm != "none" or config.global_every):
        raise UserError(
            f"model={config.name}: model.sliding_window={config.sliding_window}: of the models of experts only Mixtral "
            "of transformers has windows, and in all layers, so its weights have no names there; use --format "
            "safetensors"
        )
    if dense or changed:
        part = f"model.experts.{changed[0]}={getattr(experts, changed[0])}" if changed else "its dense layers"
        raise UserError(
            f"model={config.name}: {part}: Mixtral, Qwen3-MoE and OLMoE of transformers compute something else, so its "
            "weights have no names there; use --format safetensors"
        )
    return {"none": "mixtral", "head": "qwen3_moe", "full": "olmoe"}[config.query_key_norm]


def _check_deepseek(config: TransformerConfig) -> str:
    """Return deepseek_v3. Raises UserError for what it does not compute."""
    experts = config.experts
    requirements = {
        "experts.gate": experts.gate == "sigmoid",
        "experts.shared": experts.shared > 0,
        "experts.balance_bias": experts.balance_bias > 0,
        "experts.capacity_factor": experts.capacity_factor is None,
        "norm": config.norm == "rmsnorm",
        "activation": config.activation == "swiglu",
    }
    wrong = [key for key, agrees in requirements.items() if not agrees]
    if wrong or not experts.count:
        key = wrong[0] if experts.count else "experts.count"
        raise UserError(
            f"model={config.name}: model.latent makes it one of DeepSeek-V3's family in transformers, which has "
            "experts with a sigmoid gate, a bias (balance_bias) and shared ones, and no capacity; "
            f"model.{key} is another, so its weights have no names there; use --format safetensors"
        )
    return "deepseek_v3"
