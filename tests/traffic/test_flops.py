"""FLOPs of a step against torch's own counter of what operators compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from hpc_train.api import MicroBatch, StepBatch, World
from hpc_train.config.compose import compose
from hpc_train.config.model import TransformerConfig
from hpc_train.config.run import RunConfig
from hpc_train.models.registry import build as build_model
from hpc_train.models.shape import flops_per_token
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.traffic.flops import step_flops
from hpc_train.training.optimizer import make_optimizer

SHAPE = TransformerConfig(name="llama", vocab_size=40, layers=3, hidden=32, heads=4, feed_forward=48)
Shape = tuple[int, ...]
LENGTH, SEQUENCES = 64, 2
FULL, SELECTIVE = "parallel.recompute.mode=full", "parallel.recompute.mode=selective"


def _config(*overrides: str) -> RunConfig:
    sizes = (f"train.global_batch={SEQUENCES}", f"train.micro_batch={SEQUENCES}", f"train.sequence_length={LENGTH}")
    config = compose(("model=llama_tiny", *sizes, *overrides))
    object.__setattr__(config, "model", SHAPE)
    return config


def _forward(q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q, k, v))


def _backward(grad: Shape, q: Shape, k: Shape, v: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, q, k, v))


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
"""Kernels that torch's counter leaves out, by its own formulas for those of GPUs."""


def _counted(world: World, config: RunConfig) -> int:
    with torch.device("meta"):
        whole = build_model(config.model)
    engine = build(whole, lambda part: make_optimizer(part, config.optim), config, world)
    tokens = torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        engine.forward_backward(StepBatch([MicroBatch(tokens, tokens)]))
    return int(counter.get_total_flops())


CASES = {
    "plain": (),
    "full": (FULL,),
    "every-second-block": (FULL, "parallel.recompute.every=2"),
    "products-and-attention-kept": (SELECTIVE,),
    "products-kept": (SELECTIVE, "parallel.recompute.keep=[mm]"),
    "attention-kept": (SELECTIVE, "parallel.recompute.keep=[attention]"),
}


@pytest.mark.parametrize("case", CASES)
def test_hardware_flops_are_what_torch_counts(case: str) -> None:
    config = _config(*CASES[case])
    (counted,) = run_ranks(_counted, 1, config)
    expected = step_flops(config, attention="full")
    assert expected is not None
    assert counted == expected.hardware


@pytest.mark.parametrize("model", ["llama_8b", "gpt3_175b", "vit_large"])
def test_model_flops_are_those_of_mfu(model: str) -> None:
    config = compose((f"model={model}", "train.global_batch=64", "train.sequence_length=512", FULL))
    targets = 64 * (1 if model == "vit_large" else 512)
    found, told = step_flops(config), flops_per_token(config.model, 512)
    assert found is not None
    assert told is not None
    assert found.model == pytest.approx(told * targets)
    assert found.hardware > found.model * 4 / 3 * 0.9


def test_causal_attention_is_half_of_all_pairs() -> None:
    config = _config()
    causal, full = step_flops(config), step_flops(config, attention="full")
    assert causal is not None
    assert full is not None
    pairs = 2 * SHAPE.layers * SHAPE.hidden * LENGTH * LENGTH * SEQUENCES
    assert full.forward - causal.forward == pytest.approx(pairs)
    assert full.scores == 2 * causal.scores == pytest.approx(pairs)


def test_a_custom_model_is_not_guessed() -> None:
    assert step_flops(compose(("model=custom", "model.name=mine"))) is None


def test_more_tokens_of_a_longer_model_cost_more() -> None:
    few, many = _config(), _config()
    object.__setattr__(many, "model", replace(SHAPE, layers=6))
    one, other = step_flops(few), step_flops(many)
    assert one is not None
    assert other is not None
    assert other.forward > one.forward
