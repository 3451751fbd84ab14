"""8-bit products: torchao's own numbers in one process, and those in every layout.

With weight gradients in the format of the layer (rowwise_with_gw_hp, mxfp8_with_gw_hp) every rounding belongs to one
row of one product, so that layouts agree as they do without. With mxfp8 a scale of the gradient spans 32 tokens, here
two sequences, so that layouts agree that do not part them. With the other recipes a scale spans the tokens of a rank.
Where tp splits a layer, rows of its parts have scales of their own, which blocks of 32 values have anyway.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import SEQUENCES, STEPS, Case, fresh, global_batch, model, steps
from outcome import Outcome, assert_close, gradients, whole
from test_matrix import assert_outcome
from torch import Tensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from hpc_train.config.compose import compose
from hpc_train.config.train import PrecisionConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.parallel.precision.float8 import convert_linear_layers, set_product
from hpc_train.parallel.precision.mxfp8 import make_mxfp8_expert_product, make_mxfp8_product
from hpc_train.parallel.precision.number_formats import check_precision_device
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks

EXACT = ("precision.float8=rowwise_with_gw_hp",)
MXFP8, MXFP8_WIDE = "precision.float8=mxfp8", "precision.float8=mxfp8_with_gw_hp"
EXPERTS = (MXFP8_WIDE, "precision.float8_experts=true")
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
    "mxfp8-ddp-2": Case(2, ("parallel=ddp", MXFP8), "thirty-twos", micro=2),
    "mxfp8-fsdp-4": Case(4, ("parallel=fsdp", MXFP8), "thirty-twos"),
    "mxfp8-zero1-2-recompute": Case(
        2, ("parallel.strategy=zero1", "parallel.recompute.mode=full", MXFP8), "thirty-twos"
    ),
    "mxfp8-pp-2-zbv": Case(2, (*PIPELINE, "parallel.pipeline.schedule=zbv", MXFP8), "thirty-twos"),
    "mxfp8-fsdp-2-compile": Case(2, ("parallel=fsdp", "parallel.compile=true", MXFP8), "thirty-twos"),
    "mxfp8-wide-cp-2": Case(2, ("parallel.cp=2", MXFP8_WIDE), "thirty-twos"),
    "mxfp8-wide-hsdp-2x2-short": Case(
        4, ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2", MXFP8_WIDE), "thirty-twos", micro=3
    ),
    "mxfp8-tp-2": Case(2, ("parallel.tp=2", MXFP8), "sixty-fours"),
    "mxfp8-tp-2-no-sequence": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false", MXFP8), "sixty-fours"),
    "mxfp8-fsdp-2-tp-2-compile": Case(
        4, ("parallel=fsdp", "parallel.tp=2", "parallel.compile=true", MXFP8), "sixty-fours"
    ),
    "mxfp8-wide-pp-2-tp-2-recompute": Case(
        4, (*PIPELINE, "parallel.tp=2", "parallel.recompute.mode=full", MXFP8_WIDE), "sixty-fours"
    ),
    "mxfp8-wide-fsdp-2-experts": Case(2, ("parallel=fsdp", MXFP8_WIDE), "wide-experts"),
    "experts-ddp-2": Case(2, ("parallel=ddp", *EXPERTS), "experts in 8 bits"),
    "experts-fsdp-2-ep-2": Case(2, ("parallel=fsdp", "parallel.ep=2", *EXPERTS), "experts in 8 bits", micro=2),
    "experts-fsdp-4-ep-2": Case(4, ("parallel=fsdp", "parallel.ep=2", *EXPERTS), "experts in 8 bits"),
    "experts-zero1-4-ep-4-recompute": Case(
        4, ("parallel.strategy=zero1", "parallel.ep=4", "parallel.recompute.mode=full", *EXPERTS), "experts in 8 bits"
    ),
    "experts-fsdp-2-cp-2-ep-4": Case(
        4, ("parallel=fsdp", "parallel.cp=2", "parallel.ep=4", *EXPERTS), "experts in 8 bits"
    ),
    "experts-fsdp-2-tp-2-ep-2": Case(
        4, ("parallel=fsdp", "parallel.tp=2", "parallel.ep=2", *EXPERTS), "experts in 8 bits"
    ),
    "experts-pp-2": Case(2, (*PIPELINE, *EXPERTS), "experts in 8 bits"),
}
DRAWN = (
    *("fsdp-4", "cp-2", "pp-2-zbv", "mxfp8-fsdp-4", "mxfp8-wide-cp-2", "mxfp8-tp-2"),
    *("experts-fsdp-4-ep-2", "experts-fsdp-2-cp-2-ep-4"),
)


def _train(world: World, case: Case) -> Outcome:
    return steps(fresh(case, world), case, world, STEPS)


def _learn(world: World, case: Case) -> Outcome:
    """Train twice on the first batch."""
    return steps(fresh(case, world), case, world, (0, 0))


@cache
def _in_one_process(kind: str, *recipe: str) -> Outcome:
    alone = Case(1, recipe, kind, micro=SEQUENCES)
    (outcome,) = run_ranks(_train, 1, alone, parallel=alone.config().parallel)
    return outcome


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_every_layout_gives_the_numbers_of_one_process(name: str) -> None:
    case = CASES[name]
    ranks = run_ranks(_train, case.ranks, case, parallel=case.config().parallel, timeout=200)
    recipe = (override for override in case.overrides if override.startswith("precision.float8"))
    assert_outcome(ranks, _in_one_process(case.kind, *recipe))


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


@pytest.mark.parametrize("wide", [False, True])
def test_products_of_blocks_are_those_of_torchao(wide: bool) -> None:
    """torchao emulates them in float32; ours are those of a layer whose tokens fill no whole number of blocks."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 96))
    x = torch.randn(5, 8, 64, generator=generator) * torch.logspace(-3, 3, 64)  # scales differ from block to block
    seed = torch.randn(5, 8, 96, generator=generator)
    mine, theirs = x.clone().requires_grad_(), torch.cat([x.flatten(0, 1), x.new_zeros(24, 64)]).requires_grad_()
    set_product(layer[0], make_mxfp8_product(wide, torch.device("cpu")))
    (layer(mine) * seed).sum().backward()
    weight = layer[0].weight.detach().clone().requires_grad_()
    eight, emulated, by_torch = torch.float8_e4m3fn, KernelPreference.EMULATED, MXFP8Dim1CastKernelChoice.TORCH
    formats = (eight, eight, eight, 32, emulated, MXFP8Dim0CastKernelChoice.TORCH, by_torch, ScaleCalculationMode.RCEIL)
    out = mx_mm.apply(theirs, weight, *formats, wide)[:40] + layer[0].bias
    (out * seed.flatten(0, 1)).sum().backward()
    torch.testing.assert_close(layer(x).flatten(0, 1), out, rtol=1e-6, atol=1e-6 * float(out.detach().abs().max()))
    for ours, own in ((layer[0].weight.grad, weight.grad), (mine.grad.flatten(0, 1), theirs.grad[:40])):
        torch.testing.assert_close(ours, own, rtol=1e-6, atol=1e-6 * float(own.abs().max()))
    exact = seed.flatten(0, 1).t() @ x.flatten(0, 1)
    error = float((layer[0].weight.grad - exact).norm() / exact.norm())
    assert error < 1e-6 if wide else 0.01 < error < 0.05


def test_experts_compute_in_8_bits_only_if_asked_for() -> None:
    kind = "experts in 8 bits"
    asked, without = _in_one_process(kind, *EXPERTS).losses, _in_one_process(kind, MXFP8_WIDE).losses
    assert 1e-6 < abs(asked[0] / without[0] - 1) < 0.05


@pytest.mark.parametrize("wide", [False, True])
def test_products_of_experts_are_those_of_torchao(wide: bool) -> None:
    """torchao emulates them in bfloat16, and fills up the rows of each expert to blocks; one has none."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([5, 0, 32, 40])
    rows, weights, seed = (
        torch.randn(*size, generator=generator).bfloat16() for size in ((77, 64), (4, 64, 96), (77, 96))
    )
    rows *= torch.logspace(-3, 3, 64)  # scales differ from block to block
    results = []
    for product in (make_mxfp8_expert_product(wide, torch.device("cpu")), partial(_multiply_by_torchao, wide)):
        x, w = rows.clone().requires_grad_(), weights.clone().requires_grad_()
        out = product(x, w, counts)
        (out * seed).sum().backward()
        results.append([tensor.float() for tensor in (out.detach(), x.grad, w.grad)])
    for ours, theirs in zip(*results, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 0.004, "the same up to the last bit of bfloat16"
    parts = zip(rows.float().split(counts.tolist()), weights.float(), strict=True)
    exact = torch.cat([part @ weight for part, weight in parts])
    assert 0.01 < float((results[0][0] - exact).norm() / exact.norm()) < 0.05


def _multiply_by_torchao(wide: bool, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    out: Tensor = _to_mxfp8_then_scaled_grouped_mm(
        rows,
        weights.transpose(1, 2).contiguous().transpose(1, 2),
        counts.cumsum(0).to(torch.int32),
        out_dtype=torch.bfloat16,
        kernel_preference=KernelPreference.EMULATED,
        wgrad_with_hp=wide,
        pad_token_groups_for_grouped_mm=True,
    )
    return out


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model=llama_moe_tiny", "precision=fp8"), "rowwise has no products of experts"),
        (("model=llama_tiny", "precision=mxfp8"), "model=llama_tiny has no experts"),
    ],
)
def test_experts_that_cannot_compute_in_8_bits_are_one_line(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=r"precision\.float8_experts=true: ") as caught:
        check_support(compose([*overrides, "precision.float8_experts=true"]), 2)
    assert words in str(caught.value)


def test_experts_of_odd_widths_are_one_line() -> None:
    with pytest.raises(UserError, match="experts of 12, which must be multiples of 32"):
        convert_linear_layers(
            model("wide-experts"), PrecisionConfig(float8="mxfp8", float8_experts=True), torch.device("cpu")
        )


@pytest.mark.parametrize(
    "recipe", draw(["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "mxfp8_with_gw_hp"], ["rowwise", "mxfp8"])
)
@pytest.mark.parametrize("strategy", draw(["ddp", "fsdp"], ["fsdp"]))
def test_a_model_learns_in_bf16_with_products_in_8_bits(recipe: str, strategy: str) -> None:
    kind = "thirty-twos" if recipe.startswith("mxfp8") else "sixteens"
    case = Case(2, (f"parallel={strategy}", "precision=fp8", f"precision.float8={recipe}"), kind)
    outcome, _ = run_ranks(_learn, 2, case, parallel=case.config().parallel)
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("parallel.tp=2", "parallel.tensor.asynchronous=true"), "use parallel.tensor.asynchronous=false"),
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


def test_a_torchao_without_products_of_blocks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a prototype there, which older releases lack and later ones may move."""
    monkeypatch.setitem(sys.modules, "hpc_train.parallel.precision.mxfp8", None)
    says = r"float8=mxfp8: this torchao has no such products .*'torchao>=0\.18,<0\.19'"
    with pytest.raises(UserError, match=says) as caught:
        convert_linear_layers(model("thirty-twos"), PrecisionConfig(float8="mxfp8"), torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_formats_of_4_bits_are_one_line_that_names_others(recipe: str) -> None:
    with pytest.raises(
        UserError, match=rf"precision\.float8={recipe}: .*use .*mxfp8 .* 10\.3 \(B200, B300\)"
    ) as caught:
        compose(["precision=fp8", f"precision.float8={recipe}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("capability", "works"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)])
def test_a_gpu_without_products_of_blocks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], works: bool
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    config = compose(["precision=mxfp8"]).precision
    if works:
        check_precision_device(config, torch.device("cuda", 0))
        return
    with pytest.raises(UserError, match=r"precision\.float8=mxfp8: a GPU has no such products, .* use precision=fp8"):
        check_precision_device(config, torch.device("cuda", 0))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_tensor_parallel_layers_are_as_close_as_whole_ones(recipe: str) -> None:
    """Their rows have more scales than whole ones, so that they round no worse."""
    split = Case(2, ("parallel.tp=2", f"precision.float8={recipe}"), "sixty-fours")
    ranks = run_ranks(_train, 2, split, parallel=split.config().parallel)
    exact = Case(1, (), "sixty-fours", micro=SEQUENCES)
    (truth,) = run_ranks(_train, 1, exact, parallel=exact.config().parallel)
    errors = [_measure_error(ranks, truth), _measure_error([_in_one_process("sixty-fours", split.overrides[1])], truth)]
    assert 0.005 < errors[0] < 1.3 * errors[1]


def _measure_error(ranks: list[Outcome], truth: Outcome) -> float:
    """Relative error of the first step's gradients, all parameters together."""
    got, wanted = (whole([one.gradients[0] for one in outcomes]) for outcomes in (ranks, [truth]))
    off = sum(float(((got[name] - array) ** 2).sum()) for name, array in wanted.items())
    return float(np.sqrt(off / sum(float((array**2).sum()) for array in wanted.values())))


@pytest.mark.parametrize(("kind", "recipe", "multiple"), [("grouped", "rowwise", 16), ("grouped", "mxfp8", 32)])
def test_a_model_without_fitting_sizes_is_one_line(kind: str, recipe: str, multiple: int) -> None:
    with pytest.raises(UserError, match=f"multiples of {multiple}"):
        convert_linear_layers(model(kind), PrecisionConfig(float8=recipe), torch.device("cpu"))


def test_it_is_off_unless_asked_for() -> None:
    assert compose([]).precision.float8 == "none"
    assert compose(["precision=fp8"]).precision == PrecisionConfig("bf16", "fp32", float8="rowwise")
