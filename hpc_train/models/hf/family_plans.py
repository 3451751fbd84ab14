"""Tensor plans and orders of modules of families for which transformers has none that can be applied; no torch.

A tensor plan is (glob over module names, how), in the words of parallel/tensor/tensor_plan.py.
"""

from __future__ import annotations

Projections = tuple[tuple[str, str], ...]


def split_projections(layers: str, columns: tuple[str, ...], rows: tuple[str, ...]) -> Projections:
    """Return the tensor plan of layers whose heads are equal: what widens the hidden states, and what narrows them."""
    return tuple((f"{layers}.*.{name}", how) for how, names in (("col", columns), ("row", rows)) for name in names)


QUERY_KEY_VALUE = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
VIT = split_projections("vit.layers", (*QUERY_KEY_VALUE, "mlp.fc1"), ("attention.o_proj", "mlp.fc2"))
DINO = split_projections(
    "dinov2.encoder.layer",
    (*QUERY_KEY_VALUE, "mlp.fc1", "mlp.gate_proj", "mlp.up_proj"),
    ("attention.o_proj", "mlp.fc2", "mlp.down_proj"),
)
CLIP = split_projections(
    "vision_model.encoder.layers",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"),
    ("self_attn.out_proj", "mlp.fc2"),
)
BERT, ROBERTA = (
    split_projections(
        f"{name}.encoder.layer",
        ("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
        ("attention.output.dense", "output.dense"),
    )
    for name in ("bert", "roberta")
)
DISTILBERT = split_projections(
    "distilbert.transformer.layer",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin", "ffn.lin1"),
    ("attention.out_lin", "ffn.lin2"),
)
OPT = (
    *split_projections(
        "model.decoder.layers",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"),
        ("self_attn.out_proj", "fc2"),
    ),
    ("model.decoder.layers.*.self_attn", "attention"),
)
OLMO = (
    *split_projections(
        "model.layers",
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
    ("model.layers.*.self_attn.[qk]_norm", "all_heads"),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
DEEPSEEK_V3 = (
    *split_projections(
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
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkv")
EXPERTS = (
    *split_projections("model.layers", ATTENTION, ("self_attn.o_proj",)),
    ("model.layers.*.mlp.experts", "stacked_experts"),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
GRANITE_EXPERTS = (
    *(line for line in EXPERTS if line[1] != "stacked_experts"),
    ("model.layers.*.block_sparse_moe.experts", "stacked_experts"),
)
APERTUS = (
    *split_projections("model.layers", (*ATTENTION, "mlp.up_proj"), ("self_attn.o_proj", "mlp.down_proj")),
    ("model.layers.*.self_attn.[qk]_norm", "heads"),
    ("model.layers.*.mlp.act_fn", "heads"),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
STABLELM = (
    ("model.layers.*.self_attn", "attention"),
    *split_projections(
        "model.layers", (*ATTENTION, "mlp.gate_proj", "mlp.up_proj"), ("self_attn.o_proj", "mlp.down_proj")
    ),
    ("model.embed_tokens", "vocab"),
    ("lm_head", "vocab"),
)
FUSED_HEADS = (
    *split_projections(
        "transformer.h",
        ("self_attention.query_key_value", "mlp.dense_h_to_4h"),
        ("self_attention.dense", "mlp.dense_4h_to_h"),
    ),
    ("transformer.h.*.self_attention", "attention"),
    ("transformer.word_embeddings", "vocab"),
    ("lm_head", "vocab"),
)
T5_ATTENTION = ("SelfAttention", "EncDecAttention")
T5 = (
    *split_projections(
        "*.block",
        (*(f"{name}.{part}" for name in T5_ATTENTION for part in "qkv"), "DenseReluDense.wi", "DenseReluDense.wi_?"),
        (*(f"{name}.o" for name in T5_ATTENTION), "DenseReluDense.wo"),
    ),
    *((f"*.block.*.{name}", "attention") for name in T5_ATTENTION),
    ("*.relative_attention_bias", "head_bias"),
)

DECODER_MODULES = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
GPT2_MODULES = ("transformer.wte", "transformer.wpe", "transformer.h", "transformer.ln_f", "lm_head")
OPT_MODULES = (
    *(f"model.decoder.{name}" for name in ("embed_tokens", "embed_positions", "project_in", "layers")),
    *("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head"),
)
FALCON_MODULES = ("transformer.word_embeddings", "transformer.h", "transformer.ln_f", "lm_head")
BLOOM_MODULES = ("transformer.word_embeddings", "transformer.word_embeddings_layernorm", *FALCON_MODULES[1:])

CODEGEN_MODULES = ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head")
MPT_MODULES = ("transformer.wte", "transformer.blocks", "transformer.norm_f", "lm_head")
PERSIMMON_MODULES = ("model.embed_tokens", "model.layers", "model.final_layernorm", "lm_head")

_VOCABULARY = (("model.embed_tokens", "vocab"), ("lm_head", "vocab"))
_GPT_VOCABULARY = (("transformer.wte", "vocab"), ("lm_head", "vocab"))
PHI3 = (
    ("model.layers.*.self_attn.qkv_proj", "fused_qkv"),
    ("model.layers.*.mlp.gate_up_proj", "fused_gate_up"),
    ("model.layers.*.self_attn", "attention"),
    *split_projections("model.layers", (), ("self_attn.o_proj", "mlp.down_proj")),
    *_VOCABULARY,
)
GLM = (
    ("model.layers.*.mlp.gate_up_proj", "fused_gate_up"),
    *split_projections("model.layers", ATTENTION, ("self_attn.o_proj", "mlp.down_proj")),
    *_VOCABULARY,
)
_GPT = (
    ("transformer.h.*.attn", "attention"),
    *split_projections("transformer.h", ("mlp.c_fc",), ("attn.c_proj", "mlp.c_proj")),
    *_GPT_VOCABULARY,
)
GPT2 = (("transformer.h.*.attn.c_attn", "fused_qkv"), *_GPT)
GPT_BIGCODE = (("transformer.h.*.attn.c_attn", "col"), *_GPT)
FALCON_ONE_KEY = (
    ("transformer.h.*.self_attention.query_key_value", "fused_qkv"),
    *(line for line in FUSED_HEADS if not line[0].endswith("query_key_value")),
)
CODEGEN = (
    *split_projections("transformer.h", ("attn.qkv_proj", "mlp.fc_in"), ("attn.out_proj", "mlp.fc_out")),
    *_GPT_VOCABULARY,
)
MPT = (
    ("transformer.blocks.*.attn.Wqkv", "fused_qkv"),
    ("transformer.blocks.*.attn", "attention"),
    *split_projections("transformer.blocks", ("ffn.up_proj",), ("attn.out_proj", "ffn.down_proj")),
    *_GPT_VOCABULARY,
)
PERSIMMON = (
    ("model.layers.*.self_attn", "attention"),
    *split_projections(
        "model.layers",
        ("self_attn.query_key_value", "mlp.dense_h_to_4h"),
        ("self_attn.dense", "mlp.dense_4h_to_h"),
    ),
    *_VOCABULARY,
)
GRANITE_SHARED = (
    ("model.layers.*.shared_mlp.input_linear", "fused_gate_up"),
    ("model.layers.*.shared_mlp.output_linear", "row"),
    *GRANITE_EXPERTS,
)
FLEX_OLMO = (*EXPERTS, ("model.layers.*.self_attn.[qk]_norm", "all_heads"))
MODERNBERT = (
    ("model.layers.*.attn.Wqkv", "fused_qkv"),
    ("model.layers.*.mlp.Wi", "fused_gate_up"),
    *split_projections("model.layers", (), ("attn.Wo", "mlp.Wo")),
)
GPT_OSS = (("model.layers.*.self_attn", "sinks"), *EXPERTS)
BART = tuple(
    line
    for side, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn")))
    for line in split_projections(
        f"model.{side}.layers",
        (*(f"{name}.{part}_proj" for name in attentions for part in "qkv"), "fc1"),
        (*(f"{name}.out_proj" for name in attentions), "fc2"),
    )
)
