"""The families of transformers that are tested, and what can be done with each; no torch.

A family that is not listed here is trained too, with every technique that needs only its blocks. What splits a layer
or the model's forward is refused for it, because nobody has compared its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpc_train.models.hf import family_plans as plans
from hpc_train.models.hf.family_plans import Projections

Task = Literal["causal_lm", "masked_lm", "seq2seq_lm", "image_classification"]

_UNTESTED = "nobody has compared its numbers yet"
_NO_PLAN = "transformers has no pipeline plan for it"
_TWO_WAYS = "its attention is not causal"
_ALIBI = "its attention adds a bias of positions (ALiBi), which no ring does"
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
    projections: Projections = ()
    """Tensor plan, as (glob, how) with our words, of a family for which transformers has none that splits attention."""
    one_key_projections: Projections = ()
    """Tensor plan of models of the family whose heads all share one key (`multi_query`)."""
    modules: tuple[str, ...] = ()
    """Modules in the order of a forward, of a family for which transformers has no pipeline plan."""
    tuples: bool = False
    """Its layers return tuples, of which hidden states are the first entry."""
    unsplit_with: tuple[str, ...] = ()
    """Keys of config.json with which tp cannot split its layers."""
    groups_of_heads: int = 0
    """Number of groups of heads that cannot be split, of which a rank has some; 0: single heads can be."""
    packs: bool = True
    """Its code keeps packed documents apart by positions that restart."""
    tested: bool = True


FAMILIES: tuple[Family, ...] = (
    Family("llama", "Llama", "causal_lm"),
    Family("mistral", "Mistral", "causal_lm"),
    Family("qwen2", "Qwen2", "causal_lm"),
    Family("qwen3", "Qwen3", "causal_lm"),
    Family("gemma2", "Gemma 2", "causal_lm", context="it caps attention scores, which no ring does"),
    Family("gemma3_text", "Gemma 3", "causal_lm"),
    Family("phi", "Phi", "causal_lm"),
    Family("olmo2", "OLMo 2", "causal_lm", projections=plans.OLMO),
    Family("olmo3", "OLMo 3", "causal_lm", projections=plans.OLMO),
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
    Family("granite", "Granite", "causal_lm", modules=plans.DECODER_MODULES),
    Family("nemotron", "Nemotron", "causal_lm", modules=plans.DECODER_MODULES),
    Family("glm", "GLM", "causal_lm", projections=plans.GLM),
    Family("glm4", "GLM-4", "causal_lm", projections=plans.GLM),
    Family("phi3", "Phi-3", "causal_lm", projections=plans.PHI3),
    Family(
        *("gpt2", "GPT-2", "causal_lm"),
        casts=False,
        projections=plans.GPT2,
        modules=plans.GPT2_MODULES,
        unsplit_with=("add_cross_attention",),
    ),
    Family(
        *("gpt_bigcode", "GPT-BigCode", "causal_lm"),
        projections=plans.GPT_BIGCODE,
        one_key_projections=plans.GPT2,
        modules=plans.GPT2_MODULES,
        unsplit_with=("add_cross_attention",),
    ),
    Family(
        *("codegen", "CodeGen", "causal_lm"),
        projections=plans.CODEGEN,
        modules=plans.CODEGEN_MODULES,
        groups_of_heads=4,
    ),
    Family(
        *("mpt", "MPT", "causal_lm"),
        context=_ALIBI,
        projections=plans.MPT,
        modules=plans.MPT_MODULES,
        tuples=True,
        packs=False,
    ),
    Family("persimmon", "Persimmon", "causal_lm", projections=plans.PERSIMMON, modules=plans.PERSIMMON_MODULES),
    Family(
        *("gpt_oss", "gpt-oss", "causal_lm"),
        context="its attention has sinks, which no ring computes",
        projections=plans.GPT_OSS,
    ),
    Family("gpt_neox", "GPT-NeoX", "causal_lm"),
    Family("mixtral", "Mixtral", "causal_lm"),
    Family("qwen2_moe", "Qwen2-MoE", "causal_lm"),
    Family("qwen3_moe", "Qwen3-MoE", "causal_lm"),
    Family("deepseek_v2", "DeepSeek-V2", "causal_lm"),
    Family("deepseek_v3", "DeepSeek-V3", "causal_lm", projections=plans.DEEPSEEK_V3),
    Family("glm4_moe", "GLM-4 MoE", "causal_lm"),
    Family("ernie4_5_moe", "ERNIE 4.5 MoE", "causal_lm"),
    Family("dots1", "dots.llm1", "causal_lm"),
    Family("apertus", "Apertus", "causal_lm", projections=plans.APERTUS),
    Family("ministral3", "Ministral 3", "causal_lm"),
    Family("cwm", "CWM", "causal_lm"),
    Family("gptj", "GPT-J", "causal_lm"),
    Family("jais2", "Jais 2", "causal_lm"),
    Family("hyperclovax", "HyperCLOVA X", "causal_lm"),
    Family("granitemoe", "GraniteMoE", "causal_lm", projections=plans.GRANITE_EXPERTS, modules=plans.DECODER_MODULES),
    Family(
        *("olmoe", "OLMoE", "causal_lm"),
        projections=plans.FLEX_OLMO,
        modules=plans.DECODER_MODULES,
    ),
    Family("flex_olmo", "FlexOLMo", "causal_lm", projections=plans.FLEX_OLMO),
    Family(
        *("granitemoeshared", "GraniteMoE shared", "causal_lm"),
        projections=plans.GRANITE_SHARED,
        modules=plans.DECODER_MODULES,
    ),
    Family("nanochat", "NanoChat", "causal_lm", pipeline="it has one norm for before and after the layers"),
    Family(
        *("stablelm", "StableLM", "causal_lm"),
        projections=plans.STABLELM,
        modules=plans.DECODER_MODULES,
        unsplit_with=("qk_layernorm",),
    ),
    Family("roberta", "RoBERTa", "masked_lm", None, _NO_PLAN, _TWO_WAYS, False, (), plans.ROBERTA),
    Family("xlm-roberta", "XLM-RoBERTa", "masked_lm", None, _NO_PLAN, _TWO_WAYS, False, (), plans.ROBERTA),
    Family("distilbert", "DistilBERT", "masked_lm", None, _NO_PLAN, _TWO_WAYS, False, (), plans.DISTILBERT),
    Family("bert", "BERT", "masked_lm", None, _NO_PLAN, _TWO_WAYS, False, (), plans.BERT),
    Family("modernbert", "ModernBERT", "masked_lm", None, _NO_PLAN, _TWO_WAYS, True, (), plans.MODERNBERT),
    Family("eurobert", "EuroBERT", "masked_lm", context=_TWO_WAYS),
    Family(
        *("opt", "OPT", "causal_lm"),
        casts=False,
        projections=plans.OPT,
        modules=plans.OPT_MODULES,
        packs=False,
    ),
    Family(
        *("bloom", "BLOOM", "causal_lm"),
        context=_ALIBI,
        projections=plans.FUSED_HEADS,
        modules=plans.BLOOM_MODULES,
        tuples=True,
        packs=False,
    ),
    Family(
        *("falcon", "Falcon", "causal_lm"),
        context="its code does not call the attention that can be replaced",
        projections=plans.FUSED_HEADS,
        one_key_projections=plans.FALCON_ONE_KEY,
        modules=plans.FALCON_MODULES,
        tuples=True,
        packs=False,
    ),
    *(
        Family(model_type, name, "seq2seq_lm", None, _NO_PLAN, _TWO_WAYS, False, (), plans.BART)
        for model_type, name in (("bart", "BART"), ("mbart", "mBART"), ("pegasus", "Pegasus"))
    ),
    Family("t5", "T5", "seq2seq_lm", None, _NO_PLAN, _TWO_WAYS, projections=plans.T5),
    Family("vit", "ViT", _IMAGES, None, _NO_PLAN, _TWO_WAYS, False, (), plans.VIT),
    Family("dinov2", "DINOv2", _IMAGES, None, _NO_PLAN, _TWO_WAYS, False, ("*.mask_token",), plans.DINO),
    Family("clip", "CLIP", _IMAGES, None, _NO_PLAN, _TWO_WAYS, False, ("*.post_layernorm.*",), plans.CLIP),
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
