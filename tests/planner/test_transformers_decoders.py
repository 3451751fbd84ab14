"""Decoders of transformers are planned by their own shape: parameters as the library builds them, layouts that run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drawn import draw

from hpc_train.config.compose import compose
from hpc_train.config.model import HfModelConfig
from hpc_train.config.parallel import resolve_degrees
from hpc_train.errors import UserError
from hpc_train.models.counts import compute_seen_share, count_parameters
from hpc_train.models.hf.decoder_shape import describe_decoder
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.auto import choose_parallel
from hpc_train.planner.constants import cluster_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.memory import estimate_memory
from hpc_train.planner.plan import plan_overrides
from hpc_train.planner.rehearsal.one_rank import rehearse_rank

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
WIDE = {**SIZES, "intermediate_size": 80}
FEW = {**WIDE, "num_key_value_heads": 2}
MIXED = {**FEW, "num_experts_per_tok": 2}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**FEW, attention_bias=True),
    "llama tied": transformers.LlamaConfig(**FEW, mlp_bias=True, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**FEW),
    "qwen2": transformers.Qwen2Config(**FEW),
    "qwen3": transformers.Qwen3Config(**FEW, head_dim=16),
    "gemma": transformers.GemmaConfig(**FEW, head_dim=12),
    "gemma2": transformers.Gemma2Config(**FEW, head_dim=16, sliding_window=16),
    "gemma3": transformers.Gemma3TextConfig(**FEW, head_dim=16, sliding_window=16),
    "phi": transformers.PhiConfig(**WIDE),
    "olmo2": transformers.Olmo2Config(**FEW),
    "olmo3": transformers.Olmo3Config(**FEW, sliding_window=16),
    "gpt2": transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=4, n_head=8, resid_pdrop=0, attn_pdrop=0),
    "gpt_neox": transformers.GPTNeoXConfig(**WIDE),
    "gpt_neox plain": transformers.GPTNeoXConfig(**WIDE, attention_bias=False, use_parallel_residual=False),
    "mixtral": transformers.MixtralConfig(**MIXED, num_local_experts=4),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **MIXED, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**MIXED, num_experts=4, moe_intermediate_size=24, head_dim=16),
}
JOB = ["cluster=dgx_h100", "train.sequence_length=64", "train.global_batch=64"]


def save(folder: Path, config: transformers.PretrainedConfig) -> HfModelConfig:
    config.architectures = [type(transformers.AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(folder)
    return HfModelConfig(path=str(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_that_the_library_builds(tmp_path: Path, name: str) -> None:
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    CONFIGS[name].architectures = [type(built).__name__]
    CONFIGS[name].save_pretrained(tmp_path)
    shape = describe_decoder(HfModelConfig(path=str(tmp_path)))
    assert count_parameters(shape) == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma2", "gemma3"])
def test_what_is_planned_runs(tmp_path: Path, name: str) -> None:
    save(tmp_path, CONFIGS[name])
    words = [*JOB, "model=hf", f"model.path={tmp_path}"]
    plan = plan_overrides([*words, "cluster.nodes=2"])
    assert plan.candidates
    chosen = choose_parallel(compose([*words, "parallel=auto"]), 8)
    assert isinstance(chosen.config.model, HfModelConfig)
    check_support(chosen.config, 8)
    assert "the best of" in chosen.line


def test_a_family_without_a_model_is_one_line(tmp_path: Path) -> None:
    save(tmp_path, transformers.DiffLlamaConfig(**FEW))
    words = [*JOB, "model=hf", f"model.path={tmp_path}"]
    with pytest.raises(
        UserError, match=r"the planner has no model of diffllama of transformers for causal_lm, only of"
    ):
        plan_overrides(words)
    assert "ddp" in choose_parallel(compose([*words, "parallel=auto"]), 8).line
    (tmp_path / "moe").mkdir()
    save(tmp_path / "moe", transformers.Qwen3MoeConfig(**MIXED, num_experts=4, mlp_only_layers=[1]))
    with pytest.raises(UserError, match=r"mlp_only_layers=\[1\]: the planner has no model of it"):
        describe_decoder(HfModelConfig(path=str(tmp_path / "moe")))


LARGER: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024,
}  # fmt: skip
GEMMA = {
    "gemma2": transformers.Gemma2Config(**LARGER, sliding_window=128),
    "gemma3": transformers.Gemma3TextConfig(**LARGER, sliding_window=128, sliding_window_pattern=2),
}
LAYOUTS = {
    "zero3": ("parallel.strategy=zero3",),
    "zero3 recomputed": ("parallel.strategy=zero3", "parallel.recompute.mode=full"),
    "zero2 tp2": ("parallel.strategy=zero2", "parallel.tp=2"),
}
GEMMA_LAYOUTS = {f"{name}, {layout}": (name, layout) for name, layout in product(GEMMA, LAYOUTS)}


@pytest.mark.parametrize("case", draw(GEMMA_LAYOUTS, ["gemma2, zero3 recomputed", "gemma3, zero2 tp2"]))
def test_memory_of_gemma_is_what_a_rehearsal_counts(tmp_path: Path, case: str) -> None:
    """Scores that eager attention stores, masks of windows, four norms a layer, and capped logits."""
    name, layout = GEMMA_LAYOUTS[case]
    model = save(tmp_path, GEMMA[name])
    words = ("cluster=dgx_h100", "precision=bf16", "train.sequence_length=512", "train.micro_batch=2")
    config = compose([*words, "train.global_batch=32", "model=hf", f"model.path={tmp_path}", *LAYOUTS[layout]])
    degrees = resolve_degrees(config.parallel, 8)
    counted = rehearse_rank(config, degrees, 0, 2).counted.peak
    jobs = jobs_from_config(replace(config, model=describe_decoder(model)), 8)
    planned = estimate_memory(jobs, cluster_constants(config.cluster))
    parts = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    assert counted is not None
    assert sum(float(getattr(planned, part)[0].max()) for part in parts) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo3"])
def test_flops_of_windows_are_those_of_the_keys_that_are_seen(tmp_path: Path, name: str) -> None:
    shape = describe_decoder(save(tmp_path, CONFIGS[name]))
    ages = torch.arange(64)[:, None] - torch.arange(64)
    causal, local = (ages >= 0), (ages >= 0) & (ages < 16)
    layers = [local if kind == "sliding_attention" else causal for kind in CONFIGS[name].layer_types]
    seen = sum(int(mask.sum()) for mask in layers) / (len(layers) * int(causal.sum()))
    assert compute_seen_share(shape, 64) == pytest.approx(seen, abs=0.02)
