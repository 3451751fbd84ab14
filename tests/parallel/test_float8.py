"""8-bit products: torchao's own numbers in one process, and those in every layout.

With weight gradients in the format of the layer (rowwise_with_gw_hp) every rounding belongs to one row of one product,
so that layouts agree as they do without. With the other recipes a scale spans the tokens of a rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import SEQUENCES, STEPS, Case, fresh, global_batch, model, steps
from outcome import Outcome, assert_close, gradients, whole
from test_matrix import assert_outcome
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from hpc_train.config.compose import compose
from hpc_train.config.train import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.parallel.float8 import convert_linear_layers
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks

EXACT = ("precision.float8=rowwise_with_gw_hp",)
PIPELINE = ("parallel=ddp", "parallel.pp=2")
CASES = {
    "ddp-2": Case(2, ("parallel=ddp", *EXACT), "sixteens"),
    "zero1-2": Case(2, ("parallel.strategy=zero1", *EXACT), "sixteens", micro=2),
    "zero2-2": Case(2, ("parallel.strategy=zero2", *EXACT), "sixteens"),
    "fsdp-4": Case(4, ("parallel=fsdp", *EXACT), "sixteens"),
    "hsdp-2x2": Case(4, ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2", *EXACT), "sixteens"),
    "cp-2": Case(2, ("parallel.cp=2", *EXACT), "sixteens"),
    "pp-2": Case(2, (*PIPELINE, "parallel.pipeline.schedule=1f1b", *EXACT), "sixteens"),
    "pp-2-zbv": Case(2, (*PIPELINE, "parallel.pipeline.schedule=zbv", *EXACT), "sixteens"),
    "fsdp-2-recompute": Case(2, ("parallel=fsdp", "parallel.recompute.mode=full", *EXACT), "sixteens"),
    "fsdp-2-compile": Case(2, ("parallel=fsdp", "parallel.compile=true", *EXACT), "sixteens"),
    "fsdp-2-experts": Case(2, ("parallel=fsdp", *EXACT), "experts"),
}
DRAWN = ("fsdp-4", "cp-2", "pp-2-zbv")


def _train(world: World, case: Case) -> Outcome:
    return steps(fresh(case, world), case, world, STEPS)


@cache
def _in_one_process(kind: str) -> Outcome:
    alone = Case(1, EXACT, kind, micro=SEQUENCES)
    (outcome,) = run_ranks(_train, 1, alone, parallel=alone.config().parallel)
    return outcome


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_every_layout_gives_the_numbers_of_one_process(name: str) -> None:
    case = CASES[name]
    ranks = run_ranks(_train, case.ranks, case, parallel=case.config().parallel, timeout=200)
    assert_outcome(ranks, _in_one_process(case.kind))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_one_process_gives_the_numbers_of_torchao(recipe: str) -> None:
    module = model("sixteens")
    emulated = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(module, config=emulated, module_filter_fn=lambda _, name: name.startswith("layers"))
    assert sum(isinstance(layer, Float8Linear) for layer in module.modules()) == 4 * 7
    batch = global_batch("sixteens", 0)
    logits = module(batch.inputs).flatten(0, -2)
    loss = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET)
    loss.backward()
    alone = Case(1, (f"precision.float8={recipe}",), "sixteens", micro=SEQUENCES)
    (outcome,) = run_ranks(_train, 1, alone, parallel=alone.config().parallel)
    np.testing.assert_allclose(outcome.losses[0], loss.item(), rtol=1e-10)
    assert_close(whole([outcome.gradients[0]]), whole([gradients(module)]), 1e-10)
    exact = Case(1, (), "sixteens", micro=SEQUENCES)
    (without,) = run_ranks(_train, 1, exact, parallel=exact.config().parallel)
    assert 1e-4 < abs(outcome.losses[0] / without.losses[0] - 1) < 0.05, "8 bits, but the same model"


@pytest.mark.parametrize("recipe", draw(["tensorwise", "rowwise", "rowwise_with_gw_hp"], ["rowwise"]))
@pytest.mark.parametrize("strategy", draw(["ddp", "fsdp"], ["fsdp"]))
def test_a_model_learns_in_bf16_with_products_in_8_bits(recipe: str, strategy: str) -> None:
    case = Case(2, (f"parallel={strategy}", "precision=fp8", f"precision.float8={recipe}"), "sixteens")
    outcome, _ = run_ranks(_train, 2, case, parallel=case.config().parallel)
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.tp=2",), "parallel.tp=2 splits; use parallel=fsdp"),
        (("precision=fp16", "precision.float8=rowwise"), "use precision=fp8"),
        (("adapter=lora",), "adapter=lora changes the same layers"),
        (("parallel=server",), "parameter servers"),
    ],
)
def test_what_cannot_be_combined_is_one_line(overrides: tuple[str, ...], words: str) -> None:
    config = compose(["precision=fp8", *overrides])
    with pytest.raises(UserError, match=r"precision\.float8=rowwise: ") as caught:
        check_support(config, 2)
    assert words in str(caught.value)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_formats_of_blocks_are_one_line_that_names_their_hardware(recipe: str) -> None:
    with pytest.raises(
        UserError, match=rf"precision\.float8={recipe}: .* 10\.3 \(B200, B300\).* use .*rowwise"
    ) as caught:
        compose(["precision=fp8", f"precision.float8={recipe}"])
    assert "\n" not in str(caught.value)


def test_a_model_without_fitting_sizes_is_one_line() -> None:
    with pytest.raises(UserError, match="multiples of 16"):
        convert_linear_layers(model("grouped"), PrecisionConfig(float8="rowwise"), torch.device("cpu"))


def test_it_is_off_unless_asked_for() -> None:
    assert compose([]).precision.float8 == "none"
    assert compose(["precision=fp8"]).precision == PrecisionConfig("bf16", "fp32", float8="rowwise")
