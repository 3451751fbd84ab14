"""The families of transformers that are tested, and what can be done with each; no torch.

A family that is not listed here is trained too, with every technique that needs only its blocks. What splits a layer
or the model's forward is refused for it, because nobody has compared its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["causal_lm", "masked_lm", "seq2seq_lm", "image_classification"]

_FUSED = "its q, k and v are one matrix in an order that no rank can take an equal part of"
_JOINED = "its gate and up projections are one matrix, of which a rank would take only one"
_UNTESTED = "nobody has compared its numbers yet"
_NO_PLAN = "transformers has no pipeline plan for it"
_TWO_WAYS = "its attention is not causal"
_IMAGES: Task = "image_classification"


@dataclass(frozen=True)
class Family:
    """A model type of transformers; where a technique is None it can be used, else the text says why not."""

    model_type: str
    """`model_type` in config.json."""
    name: str
    task: Task
    """The task that is tested."""
    tensor: str | None = None
    pipeline: str | None = None
    context: str | None = None
    casts: bool = True
    """Its code computes norms, rotary angles or the softmax in float32 whatever the precision is."""
    unused: tuple[str, ...] = ()
    """Globs of parameters that no forward of the task uses: they are frozen."""
    projections: tuple[tuple[str, str], ...] = ()
    """Tensor plan, as (glob, how) with our words, of a family for which transformers has none that splits attention."""
    modules: tuple[str, ...] = ()
    """Modules in the order of a forward, of a family for which transformers has no pipeline plan."""
    tuples: bool = False
    """Its layers return tuples, of which hidden states are the first entry."""
    unsplit_with: tuple[str, ...] = ()
    """Keys of config.json with which tp cannot split its layers."""
    packs: bool = True
    """Its code keeps packed documents apart by positions that restart."""
    tested: bool = True


def _split_projections(layers: str, columns: tuple[str, ...], rows: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return the tensor plan of layers whose heads are equal: what widens the hidden states, and what narrows them."""
    return tuple((f"{layers}.*.{name}", how) for how, names in (("col", columns), ("row", rows)) for name in names)


_QUERY_KEY_VALUE = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
_VIT = _split_projections("vit.layers", (*_QUERY_KEY_VALUE, "mlp.fc1"), ("attention.o_proj", "mlp.fc2"))
_DINO = _split_projections(
    "dinov2.encoder.layer",
    (*_QUERY_KEY_VALUE, "mlp.fc1", "mlp.gate_proj", "mlp.up_proj"),
    ("attention.o_proj", "mlp.fc2", "mlp.down_proj"),
)
_CLIP = _split_projections(
    "vision_model.encoder.layers",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"),
    ("self_attn.out_proj", "mlp.fc2"),
)
_BERT, _ROBERTA = (
    _split_projections(
        f"{name}.encoder.layer",
        ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
        ("attention.output.dense", "output.dense"),
    )
    for name in ("bert", "roberta")
)
_DISTILBERT = _split_projections(
    "distilbert.transformer.layer",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin", "ffn.lin1"),
    ("attention.out_lin", "ffn.lin2"),
)
_OPT = (
    *_split_projections(
        "model.decoder.layers",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"),
        ("self_attn.out_proj", "fc2"),
    ),
    ("model.decoder.layers.*.self_attn", "attention"),
)
_OLMO = (
    *_split_projections(
        "model.layers",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
    ("model.layers.*.self_attn.[qk]_norm", "all_heads"),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
_DEEPSEEK_V3 = (
    *_split_projections(
        "model.layers",
        (
            *(f"self_attn.{name}" for name in ("q_proj", "q_b_proj", "kv_b_proj")),
            *(f"{name}.{part}_proj" for name in ("mlp", "mlp.shared_experts") for part in ("gate", "up")),
        ),
        ("self_attn.o_proj", "mlp.down_proj", "mlp.shared_experts.down_proj"),
    ),
    ("model.layers.*.self_attn.kv_a_proj_with_mqa", "shared_key"),
    ("model.layers.*.mlp.experts", "stacked_experts"),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
_ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkv")
_EXPERTS = (
    *_split_projections("model.layers", _ATTENTION, ("self_attn.o_proj",)),
    ("model.layers.*.mlp.experts", "stacked_experts"),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
_GRANITE_EXPERTS = (
    *(line for line in _EXPERTS if line[1] != "stacked_experts"),
    ("model.layers.*.block_sparse_moe.experts", "stacked_experts"),
)
_APERTUS = (
    *_split_projections("model.layers", (*_ATTENTION, "mlp.up_proj"), ("self_attn.o_proj", "mlp.down_proj")),
    ("model.layers.*.self_attn.[qk]_norm", "heads"),
    ("model.layers.*.mlp.act_fn", "heads"),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
_STABLELM = (
    ("model.layers.*.self_attn", "attention"),
    *_split_projections(
        "model.layers", (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj"), ("self_attn.o_proj", "mlp.down_proj")
    ),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
_FUSED_HEADS = (
    *_split_projections(
        "transformer.h",
        ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
        ("self_attention.dense", "mlp.dense_4h_to_h"),
    ),
    ("transformer.h.*.self_attention", "attention"),
    ("transformer.word_embeddings", "vocab"),
    ("lm_head", "vocab"),
)
_T5_ATTENTION = ("SelfAttention", "EncDecAttention")
_T5 = (
    *_split_projections(
        "*.block",
        (*(f"{name}.{part}" for name in _T5_ATTENTION for part in "qkv"), "DenseReluDense.wi", "DenseReluDense.wi_?"),
        (*(f"{name}.o" for name in _T5_ATTENTION), "DenseReluDense.wo"),
    ),
    *((f"*.block.*.{name}", "attention") for name in _T5_ATTENTION),
    ("*.relative_attention_bias", "head_bias"),
)

_DECODER_MODULES = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
_GPT2_MODULES = ("transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head")
_OPT_MODULES = (
    *(f"model.decoder.{name}" for name in ("embed_tokens", "embed_positions", "project_in", "layers")),
    *("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
)
_FALCON_MODULES = ("transformer.word_embeddings", "transformer.h", "transformer.ln_f", "lm_head")
_BLOOM_MODULES = ("transformer.word_embeddings", "transformer.word_embeddings_layernorm", *_FALCON_MODULES[1:])

FAMILIES: tuple[Family, ...] = (
    Family("llama", "Llama", "causal_lm"),
    Family("mistral", "Mistral", "causal_lm"),
    Family("qwen2", "Qwen2", "causal_lm"),
    Family("qwen3", "Qwen3", "causal_lm"),
    Family("gemma2", "Gemma 2", "causal_lm", context="it caps attention scores, which no ring does"),
    Family("gemma3_text", "Gemma 3", "causal_lm"),
    Family("phi", "Phi", "causal_lm"),
    Family("olmo2", "OLMo 2", "causal_lm", projections=_OLMO),
    Family("olmo3", "OLMo 3", "causal_lm", projections=_OLMO),
    Family("olmo", "OLMo", "causal_lm"),
    Family("gemma", "Gemma", "causal_lm"),
    Family("cohere", "Cohere", "causal_lm"),
    Family("cohere2", "Cohere 2", "causal_lm"),
    Family("starcoder2", "StarCoder2", "causal_lm"),
    Family("smollm3", "SmolLM3", "causal_lm"),
    Family("exaone4", "EXAONE 4", "causal_lm"),
    Family("ministral", "Ministral", "causal_lm"),
    Family("seed_oss", "Seed-OSS", "causal_lm"),
    Family("arcee", "Arcee", "causal_lm"),
    Family("helium", "Helium", "causal_lm"),
    Family("ernie4_5", "ERNIE 4.5", "causal_lm"),
    Family("granite", "Granite", "causal_lm", modules=_DECODER_MODULES),
    Family("nemotron", "Nemotron", "causal_lm", modules=_DECODER_MODULES),
    Family("glm4", "GLM-4", "causal_lm", tensor=_JOINED),
    Family("phi3", "Phi-3", "causal_lm", tensor=_JOINED),
    Family("gpt2", "GPT-2", "causal_lm", tensor=_FUSED, casts=False, modules=_GPT2_MODULES),
    Family("gpt_neox", "GPT-NeoX", "causal_lm"),
    Family("mixtral", "Mixtral", "causal_lm"),
    Family("qwen2_moe", "Qwen2-MoE", "causal_lm"),
    Family("qwen3_moe", "Qwen3-MoE", "causal_lm"),
    Family("deepseek_v2", "DeepSeek-V2", "causal_lm"),
    Family("deepseek_v3", "DeepSeek-V3", "causal_lm", projections=_DEEPSEEK_V3),
    Family("glm4_moe", "GLM-4 MoE", "causal_lm"),
    Family("ernie4_5_moe", "ERNIE 4.5 MoE", "causal_lm"),
    Family("dots1", "dots.llm1", "causal_lm"),
    Family("apertus", "Apertus", "causal_lm", projections=_APERTUS),
    Family("ministral3", "Ministral 3", "causal_lm"),
    Family("cwm", "CWM", "causal_lm"),
    Family("gptj", "GPT-J", "causal_lm"),
    Family("jais2", "Jais 2", "causal_lm"),
    Family("hyperclovax", "HyperCLOVA X", "causal_lm"),
    Family("granitemoe", "GraniteMoE", "causal_lm", projections=_GRANITE_EXPERTS, modules=_DECODER_MODULES),
    Family(
        *("olmoe", "OLMoE", "causal_lm"),
        projections=(*_EXPERTS, ("model.layers.*.self_attn.[qk]_norm", "all_heads")),
        modules=_DECODER_MODULES,
    ),
    Family(
        *("stablelm", "StableLM", "causal_lm"),
        projections=_STABLELM,
        modules=_DECODER_MODULES,
        unsplit_with=("qk_layernorm",),
    ),
    Family("roberta", "RoBERTa", "masked_lm", None, _NO_PLAN, _TWO_WAYS, casts=False, projections=_ROBERTA),
    Family("xlm-roberta", "XLM-RoBERTa", "masked_lm", None, _NO_PLAN, _TWO_WAYS, casts=False, projections=_ROBERTA),
    Family("distilbert", "DistilBERT", "masked_lm", None, _NO_PLAN, _TWO_WAYS, casts=False, projections=_DISTILBERT),
    Family("bert", "BERT", "masked_lm", None, _NO_PLAN, _TWO_WAYS, casts=False, projections=_BERT),
    Family(
        *("opt", "OPT", "causal_lm"),
        casts=False,
        projections=_OPT,
        modules=_OPT_MODULES,
        packs=False,
    ),
    Family(
        *("bloom", "BLOOM", "causal_lm"),
        context="its attention adds a bias of positions (ALiBi), which no ring does",
        projections=_FUSED_HEADS,
        modules=_BLOOM_MODULES,
        tuples=True,
        packs=False,
    ),
    Family(
        *("falcon", "Falcon", "causal_lm"),
        context="its code does not call the attention that can be replaced",
        projections=_FUSED_HEADS,
        modules=_FALCON_MODULES,
        tuples=True,
        packs=False,
    ),
    Family("t5", "T5", "seq2seq_lm", None, _NO_PLAN, _TWO_WAYS, projections=_T5),
    Family("vit", "ViT", _IMAGES, None, _NO_PLAN, _TWO_WAYS, False, (), _VIT),
    Family("dinov2", "DINOv2", _IMAGES, None, _NO_PLAN, _TWO_WAYS, False, ("*.mask_token",), _DINO),
    Family("clip", "CLIP", _IMAGES, None, _NO_PLAN, _TWO_WAYS, False, ("*.post_layernorm.*",), _CLIP),
)


def find_family(model_type: str) -> Family:
    """Return the family of a model type; for one that is not listed, a family that cannot be split."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    return Family(model_type, model_type, "causal_lm", _UNTESTED, _UNTESTED, _UNTESTED, tested=False)


def format_family_table() -> str:
    """Format the families as Markdown, for docs/transformers_models.md."""
    heads = ("family", "model_type", "task", "ddp, ZeRO, FSDP, HSDP", "recompute", "tp", "pp", "cp")
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * len(heads))} |"]
    for family in FAMILIES:
        splits = ("yes" if why is None else f"no: {why}" for why in (family.tensor, family.pipeline, family.context))
        cells = (family.name, f"`{family.model_type}`", f"`{family.task}`", "yes", "yes", *splits)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
