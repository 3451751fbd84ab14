"""LoRA and DoRA on every axis: loss, gradients, norms and two steps equal PEFT's in one process, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from drawn import draw
from matrix import MAX_NORM, RATES, SEQUENCES, STEPS, Case, fresh, global_batch, model, steps, train_and_save
from matrix import resume as resume_case
from outcome import Arrays, Outcome, assert_close, whole
from test_matrix import assert_outcome
from torch import Tensor, nn

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.models.adapters.adapted_linear import initialise_adapters
from hpc_train.parallel.adapters import attach_adapters, find_target_layers
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

TOLERANCE = 1e-10
LORA, DORA = ("adapter=lora", "adapter.rank=3", "adapter.alpha=7"), ("adapter=dora", "adapter.rank=2")
CASES = {
    "one-rank": Case(1, LORA),
    "ddp-2": Case(2, ("parallel=ddp", *LORA)),
    "ddp-2-dora": Case(2, ("parallel=ddp", *DORA), "gpt2"),
    "zero1-2": Case(2, ("parallel.strategy=zero1", *LORA), "tied"),
    "fsdp-2-dora": Case(2, ("parallel=fsdp", *DORA), "grouped"),
    "hsdp-2x2": Case(4, ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2", *LORA)),
    "fsdp-2-recompute": Case(2, ("parallel=fsdp", "parallel.recompute.mode=full", *LORA)),
    "fsdp-2-offload": Case(2, ("parallel=fsdp", "parallel.offload.parameters=cpu", *LORA)),
    "tp-2": Case(2, ("parallel.tp=2", *LORA)),
    "tp-2-dora-grouped": Case(2, ("parallel.tp=2", *DORA), "grouped"),
    "tp-4-dora-bias": Case(4, ("parallel.tp=4", *DORA), "gpt2"),
    "tp-2-no-sequence-dora": Case(2, ("parallel.tp=2", "parallel.tensor.sequence=false", *DORA)),
    "tp-2-head": Case(2, ("parallel.tp=2", *LORA, "adapter.targets=[head,'layers.*.attention.[ov]']")),
    "tp-2-fsdp-2": Case(4, ("parallel=fsdp", "parallel.tp=2", *LORA), "tied"),
    "pp-2": Case(2, ("parallel.pp=2", "parallel.pipeline.schedule=1f1b", *LORA)),
    "pp-2-tied-dora": Case(2, ("parallel.pp=2", "parallel.pipeline.schedule=1f1b", *DORA), "tied"),
    "pp-2-zbv": Case(2, ("parallel.pp=2", "parallel.pipeline.schedule=zbv", *LORA)),
    "cp-2": Case(2, ("parallel.cp=2", *LORA)),
    "pp-2-tp-2": Case(4, ("parallel.pp=2", "parallel.tp=2", "parallel.pipeline.schedule=1f1b", *LORA)),
    "vit-fsdp-2": Case(2, ("parallel=fsdp", *LORA), "vit"),
}
DRAWN = ("fsdp-2-dora", "tp-2-head", "tp-2-dora-grouped", "pp-2-tied-dora")


def make_peft_model(case: Case) -> tuple[nn.Module, list[str]]:
    """Our model in PEFT's hands, with our initial A; the names of its targets."""
    config = case.config().adapter
    ours = model(case.kind)
    names = list(find_target_layers(ours, config.targets))
    attach_adapters(ours, config)
    initialise_adapters(ours, 0)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        target_modules=names,
        use_dora=config.kind == "dora",
    )
    theirs = peft.get_peft_model(model(case.kind), settings)
    with torch.no_grad():
        for name in names:
            layer = theirs.base_model.model.get_submodule(name)
            layer.lora_A.default.weight.copy_(ours.get_parameter(f"{name}.lora_a"))
    return theirs, names


def find_trained(theirs: nn.Module, names: list[str]) -> dict[str, nn.Parameter]:
    """PEFT's trained parameters by our names."""
    found = {}
    for name in names:
        layer = theirs.base_model.model.get_submodule(name)  # type: ignore[operator, union-attr]
        found[f"{name}.lora_a"] = layer.lora_A.default.weight
        found[f"{name}.lora_b"] = layer.lora_B.default.weight
        if layer.lora_magnitude_vector:
            found[f"{name}.lora_magnitude"] = layer.lora_magnitude_vector.default.weight
    return found


@cache
def train_with_peft(case: Case) -> tuple[list[float], list[float], list[Arrays], Arrays]:
    """Losses, norms, gradients and adapters after the steps, by PEFT and plain autograd."""
    theirs, names = make_peft_model(case)
    trained = find_trained(theirs, names)
    assert {id(p) for p in trained.values()} == {id(p) for p in theirs.parameters() if p.requires_grad}
    lengths = {name: parameter.detach().clone() for name, parameter in trained.items() if name.endswith("magnitude")}
    optimizer = make_optimizer(theirs, case.config().optim)
    losses, norms, gradients = [], [], []
    for step in STEPS:
        batch = global_batch(case.kind, step)
        logits = theirs(batch.inputs).flatten(0, -2)
        loss = nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET)
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad.cpu().numpy().copy() for name, p in trained.items() if p.grad is not None})
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
    after = {name: (p.detach() - lengths.get(name, 0.0)).cpu().numpy().copy() for name, p in trained.items()}
    return losses, norms, gradients, after


def train_here(world: World, case: Case) -> Outcome:
    return steps(fresh(case, world), case, world, STEPS)


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_adapters_train_as_in_peft(name: str) -> None:
    case = CASES[name]
    losses, norms, gradients, after = train_with_peft(case)
    ranks = run_ranks(train_here, case.ranks, case, parallel=case.config().parallel, timeout=200)
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, losses, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.norms, norms, rtol=TOLERANCE)
    for step, expected in enumerate(gradients):
        assert_close(whole([rank.gradients[step] for rank in ranks]), expected, TOLERANCE)
    state = whole([rank.state for rank in ranks])
    assert_close({key: state[key] for key in after}, after, TOLERANCE)
    untouched = {key: value.numpy() for key, value in model(case.kind).state_dict().items()}
    for key, value in untouched.items():
        np.testing.assert_array_equal(state[key], value)
    assert {key for key in state if key.startswith("optim.exp_avg.")} == {f"optim.exp_avg.{key}" for key in after}


ROUTER = (*LORA, "adapter.targets=['*.router.gate','*.q']")
MIXTURES = {
    "fsdp-2": (Case(2, ("parallel=fsdp", *LORA), "shared-experts"), LORA),
    "tp-2-dora": (Case(2, ("parallel.tp=2", *DORA), "shared-experts"), DORA),
    "tp-2-router": (Case(2, ("parallel.tp=2", *ROUTER), "shared-experts"), ROUTER),
    "tp-2-latent": (Case(2, ("parallel.tp=2", *LORA), "latent"), LORA),
}


@pytest.mark.parametrize("name", draw(MIXTURES, ["tp-2-dora", "tp-2-router"]))
def test_adapters_of_mixtures_of_experts_train_as_in_one_process(name: str) -> None:
    """Attention, shared experts and routers have adapters; routed experts are frozen."""
    case, adapter = MIXTURES[name]
    (alone,) = run_ranks(train_here, 1, Case(1, adapter, case.kind, micro=SEQUENCES))
    ranks = run_ranks(train_here, case.ranks, case, parallel=case.config().parallel, timeout=200)
    assert_outcome(ranks, alone)


def test_resume_in_another_layout(tmp_path: Path) -> None:
    """What two ranks of fsdp saved, two of tp go on from, and so does one alone, with equal numbers."""
    fsdp, tp, alone = Case(2, ("parallel=fsdp", *DORA)), Case(2, ("parallel.tp=2", *DORA)), Case(1, DORA)
    run_ranks(train_and_save, 2, fsdp, tmp_path, parallel=fsdp.config().parallel)
    (wanted,) = run_ranks(resume_case, 1, alone, tmp_path)
    got = run_ranks(resume_case, 2, tp, tmp_path, parallel=tp.config().parallel)
    np.testing.assert_allclose(got[0].losses, wanted.losses, rtol=TOLERANCE)
    assert_close(whole([rank.state for rank in got]), whole([wanted.state]), TOLERANCE)


def _adapter(*overrides: str) -> RunConfig:
    return Case(1, ("adapter=lora", *overrides)).config()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        ("[atention.q]", "'atention.q' matches no linear layer; the nearest are"),
        ("[embed]", "'embed' matches no linear layer but Embedding; only nn.Linear"),
        ("[head,'*.nothing']", "'*.nothing' matches no linear layer; the nearest are down, gate"),
    ],
)
def test_wrong_targets(targets: str, words: str) -> None:
    with pytest.raises(UserError) as raised:
        attach_adapters(model("llama"), _adapter(f"adapter.targets={targets}").adapter)
    assert words in str(raised.value)


def test_targets_by_the_end_of_a_name_and_by_default() -> None:
    layers = find_target_layers(model("llama"), ["q", "layers.0.*.down"])
    assert list(layers) == [
        "layers.0.attention.q", "layers.0.feed_forward.down", "layers.1.attention.q", "layers.2.attention.q",
        "layers.3.attention.q",
    ]  # fmt: skip
    assert "head" not in find_target_layers(model("llama"), [])
    assert len(find_target_layers(model("llama"), [])) == 4 * 7


class OwnForward(nn.Linear):
    """As FalconLinear of transformers: the same product, written differently."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class Scaled(OwnForward):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Tagged(OwnForward):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.zeros(()))


def test_a_linear_layer_with_a_forward_of_its_own_takes_adapters_if_it_computes_the_same() -> None:
    layers = {kind.__name__: kind(8, 8) for kind in (OwnForward, Scaled, Tagged)}
    assert list(find_target_layers(nn.ModuleDict(layers), [])) == ["OwnForward"]


def test_attention_that_reads_weights_without_calling_layers_is_left_out() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert list(find_target_layers(layer, [])) == ["linear1", "linear2"]
    with pytest.raises(UserError, match="NonDynamicallyQuantizableLinear"):
        find_target_layers(layer, ["out_proj"])
