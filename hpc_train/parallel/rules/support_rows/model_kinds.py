"""Rows of what a model may be made of: experts, attention, norms, and adapters on frozen weights."""

from __future__ import annotations

from hpc_train.parallel.rules.support_rows.technique import INEXACT, Technique

MODELS = (
    Technique(
        name="mixture of experts, auxiliary loss, bias or capacity",
        option="model=llama_moe_tiny",
        done_by="our own layer; torch's grouped products on GPUs in bfloat16",
        needs="no compilation; a whole backward; no parameter servers",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="multi-head latent attention (DeepSeek-V3)",
        option="model=deepseek_tiny",
        done_by="our own layer; tp and cp as any attention, tp gathers latents",
        needs="rotary positions; no dropout; values no wider than keys",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="sliding windows, in all layers or with global ones between",
        option="model.sliding_window=64 model.global_every=2",
        done_by="our own blocks of a sequence; FlexAttention on GPUs; a shorter ring",
        needs="not latent attention",
        proof="tests/parallel/test_windows.py",
    ),
    Technique(
        name="soft-caps of attention scores and logits",
        option="model.attention_softcap=50 model.logit_softcap=30",
        done_by="our own operator; FlexAttention on GPUs",
        needs="not latent attention",
        proof="tests/parallel/test_windows.py",
    ),
    Technique(
        name="Gemma 2 and 3: four norms per block, gated GELU, two rotary bases",
        option="model=gemma_tiny",
        done_by="our own layers",
        needs="not latent attention",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="OLMo 2 and 3: norms of results only, queries and keys normalised over all heads",
        option="model.pre_norms=false model.post_norms=true model.query_key_norm=full",
        done_by="our own layers; tp adds up the squares of its heads",
        needs="not latent attention",
        proof="tests/parallel/test_matrix.py",
    ),
    Technique(
        name="choice of the attention kernel",
        option="model.attention=flash",
        done_by="torch's scaled_dot_product_attention, FlexAttention",
        needs="a kernel of the device; not the ring, whose blocks are its own",
        proof="tests/parallel/test_attention_choice.py",
    ),
)

ADAPTERS = (
    Technique(
        name="fine-tuning with adapters: LoRA, DoRA",
        option="adapter=lora",
        done_by="our own layers, PEFT's file format",
        needs="no asynchronous tensor parallelism, ep, servers; dropout: tp=1",
        proof="tests/parallel/test_adapters.py",
    ),
    Technique(
        name="adapters over a base in bfloat16",
        option="adapter=lora adapter.base=bf16 precision=bf16",
        done_by="our own layers",
        numbers=INEXACT + "computed in bfloat16; the bits of LoRA over a base in float32",
        needs="precision=bf16",
        proof="tests/parallel/test_adapter_base.py",
    ),
    Technique(
        name="adapters over a base in 4 bits (NF4): QLoRA, QDoRA",
        option="model=hf adapter=qlora",
        done_by="bitsandbytes rounds and expands; our own layers",
        numbers=INEXACT + "weights rounded to 4 bits; the same in every layout",
        needs="model.path with weights; no compilation, no offloaded parameters",
        proof="tests/parallel/test_hf_adapters.py",
    ),
)
