"""Plans of models of experts: memory as a rehearsal counts it, layouts that train on real ranks, and laws of time."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from drawn import draw
from planner_runs import asked, run

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.models.counts import compute_flops_per_token, count_parameters
from hpc_train.models.registry import build_model
from hpc_train.parallel.apply import build
from hpc_train.parallel.rules.check import check_support
from hpc_train.planner.constants import default_constants
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.rehearsal.rehearse import rehearse_run
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

BASE = (
    "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16", "train.sequence_length=1024", "train.micro_batch=1",
    "train.global_batch=32", "model=mixtral_8x7b", "model.layers=8", "model.hidden=1024", "model.heads=8",
    "model.kv_heads=4", "model.feed_forward=2048", "model.vocab_size=8192", "model.experts.balance_loss=0",
)  # fmt: skip
LATENT = (
    "model.kv_heads=null", "model.latent.kv_rank=64", "model.latent.q_rank=96", "model.latent.nope_head_dim=64",
    "model.latent.rope_head_dim=32", "model.latent.value_head_dim=64", "model.experts.shared=1",
    "model.experts.feed_forward=512", "model.experts.first_dense=1",
)  # fmt: skip
NARROW = (
    "train.sequence_length=4096", "model.layers=4", "model.experts.count=64", "model.experts.top_k=8",
    "model.experts.feed_forward=256", "model.query_key_norm=head",
)  # fmt: skip
LAYOUTS = {
    "zero3": ("parallel.strategy=zero3",),
    "zero3, ep 4": ("parallel.strategy=zero3", "parallel.ep=4"),
    "zero3, ep 8": ("parallel.strategy=zero3", "parallel.ep=8"),
    "zero3, full": ("parallel.strategy=zero3", "parallel.recompute.mode=full"),
    "zero2, ep 4": ("parallel.strategy=zero2", "parallel.ep=4"),
    "zero1, ep 4": ("parallel.strategy=zero1", "parallel.ep=4"),
    "ddp": ("parallel.strategy=ddp",),
    "tp 2, ep 2": ("parallel.strategy=zero3", "parallel.tp=2", "parallel.ep=2"),
    "pp 2, ep 4": ("parallel.strategy=zero3", "parallel.pp=2", "parallel.ep=4", "parallel.pipeline.schedule=1f1b"),
    "latent, ep 4": ("parallel.strategy=zero3", "parallel.ep=4", *LATENT),
    "narrow experts, ep 8": ("parallel.strategy=zero3", "parallel.ep=8", *NARROW),
}
TOLERANCE = 0.06


def _run(*overrides: str) -> RunConfig:
    return run(*{item.partition("=")[0]: item for item in (*BASE, *overrides)}.values())


@pytest.mark.parametrize("layout", draw(LAYOUTS, ["pp 2, ep 4"]))
def test_planned_memory_is_what_a_rehearsal_counts(layout: str) -> None:
    config = _run(*LAYOUTS[layout])
    found = rehearse_run(config, 8, "0,4" if config.parallel.pp > 1 else "0", 1)
    for built in found.ranks:
        assert built.counted.peak is not None
        assert sum(found.planned[built.rank].values()) == pytest.approx(built.counted.peak, rel=TOLERANCE)


@pytest.mark.parametrize(
    "model", ["mixtral_8x7b", "qwen3_30b_a3b", "olmoe_1b_7b", "deepseek_v3", "llama_moe_tiny", "deepseek_tiny"]
)
def test_parameters_and_flops_are_the_models(model: str) -> None:
    """The planner counts matrices, without norms."""
    config = run(f"model={model}", "cluster=dgx_h100", "cluster.nodes=1", "precision=bf16", "train.global_batch=8")
    jobs = jobs_from_config(config, 8)
    assert float(jobs.parameters) == pytest.approx(count_parameters(config.model), rel=2e-3)
    flops = compute_flops_per_token(config.model, config.train.sequence_length)
    assert float(jobs.model_flops / jobs.tokens) == pytest.approx(flops, rel=1e-9)


TINY = (
    "cluster=dgx_h100", "cluster.node.gpus=4", "cluster.nodes=1", "train.global_batch=8", "train.sequence_length=32",
)  # fmt: skip


@cache
def candidates(model: str, *more: str) -> list[RunConfig]:
    return [candidate.config for candidate in asked(*TINY, f"model={model}", *more, top=20).candidates]


def train_steps(world: World, config: RunConfig) -> float:
    """Train one step of what a plan recommends; returns the loss."""
    with torch.device("meta"):
        whole = build_model(config.model)
    engine = build(whole, lambda split: make_optimizer(split, config.optim, world), config, world)
    tokens = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(1))
    rows = 8 // world.dp_size
    mine = tokens[world.dp_index * rows : (world.dp_index + 1) * rows]
    parts = [MicroBatch(part[:, :-1], part[:, 1:]) for part in mine.split(config.train.micro_batch)]
    sums = engine.forward_backward(StepBatch(parts, step=0))
    engine.clip(1.0)
    assert engine.update(1e-3)
    return float(sums.loss) / sums.tokens


def _train_all(model: str, *more: str, every: int) -> None:
    found = candidates(model, *more)
    assert found
    for config in found[::every]:
        check_support(config, 4)
        losses = run_ranks(train_steps, 4, config, parallel=config.parallel)
        assert losses == [pytest.approx(losses[0])] * 4
        assert 4 < losses[0] < 7  # log 256 is 5.5


def test_what_is_recommended_trains() -> None:
    _train_all("llama_moe_tiny", "parallel.ep=2", "parallel.strategy=zero3", every=8)


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama_moe_tiny", "deepseek_tiny"])
@pytest.mark.parametrize("more", [(), ("parallel.ep=4",), ("parallel.ep=2", "parallel.recompute.mode=full")])
def test_every_candidate_trains(model: str, more: tuple[str, ...]) -> None:
    _train_all(model, *more, every=1)


DRAWN = {
    "any layout": (),
    "pipelines": ("parallel.pp=2",),
    "context": ("parallel.cp=2", "train.sequence_length=64"),
    "tensor": ("parallel.tp=2", "parallel.recompute.mode=selective"),
    "offload": ("parallel.strategy=zero3", "parallel.offload.optimizer=cpu"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWN)
def test_every_candidate_of_a_dense_plan_trains(name: str) -> None:
    _train_all("llama_tiny", *DRAWN[name], every=1)


@pytest.mark.parametrize("model", ["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3"])
def test_plans_of_published_models_are_accepted(model: str) -> None:
    size = {"mixtral_8x7b": 8, "qwen3_30b_a3b": 8, "deepseek_v3": 128}[model]
    flat = ("parallel.cp=1", "parallel.tp=1", "parallel.dp_replicate=1", "parallel.tensor.sequence=true")
    plan = asked(
        f"model={model}", "cluster=dgx_h100", f"cluster.nodes={size}", "precision=bf16", "train.global_batch=1024",
        "train.sequence_length=4096", "train.micro_batch=1", "parallel.strategy=zero3", *flat, top=5,
    )  # fmt: skip
    assert plan.best is not None
    for candidate in plan.candidates:
        check_support(candidate.config, size * 8)
    assert any(candidate.config.parallel.ep > 1 for candidate in plan.candidates)


def seconds(*overrides: str, ranks: int = 64) -> tuple[float, float]:
    """Return (step, exposed ep)."""
    found = estimate_step_time(jobs_from_config(_run("cluster.nodes=8", *overrides), ranks), default_constants())
    return float(found.step), float(found.experts)


def test_tokens_travel_longer_between_nodes_than_inside() -> None:
    shared = ("parallel.strategy=zero3", "model.experts.count=64", "train.global_batch=64")
    alone, inside, across = (seconds(*shared, f"parallel.ep={ep}")[1] for ep in (1, 8, 64))
    assert alone == 0
    assert across > 2 * inside > 0


def test_busier_experts_take_longer() -> None:
    shared = ("parallel.strategy=zero3", "parallel.ep=8", "train.global_batch=64")
    even, busy = (seconds(*shared, f"plan.expert_imbalance={factor}")[0] for factor in (1, 1.5))
    assert even < busy < 1.6 * even


def test_more_experts_cost_memory_and_little_time() -> None:
    """A token uses as many of them."""
    few, many = (
        seconds("parallel.strategy=zero3", "parallel.ep=8", "train.micro_batch=8", "train.global_batch=512", *more)[0]
        for more in ((), ("model.experts.count=16",))
    )
    assert few < many < 1.5 * few


def test_bands_of_experts_are_wider() -> None:
    dense = jobs_from_config(_run("model=llama_1b", "parallel.strategy=zero3"), 8)
    mixed = jobs_from_config(_run("parallel.strategy=zero3"), 8)
    spreads = [float(np.max(estimate_step_time(jobs, default_constants()).spread)) for jobs in (dense, mixed)]
    assert spreads[1] > 1.5 * spreads[0]
