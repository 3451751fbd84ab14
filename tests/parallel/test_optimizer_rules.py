"""Optimizers, groups of parameters and averages that a layout does not allow, and settings without effect: one line."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.models.registry import build_model
from hpc_train.parallel.optimizer_step import initialise_optimizer_state
from hpc_train.parallel.rules.check import check_support
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

REFUSED = (
    ("optim=muon parallel=server", "optim.name=muon: not with parallel.server.mode=synchronous"),
    ("optim=muon parallel=fsdp parallel.offload.optimizer=cpu", "not with parallel.offload.optimizer=cpu"),
    ("optim=muon parallel=fsdp parallel.offload.parameters=cpu", "not with parallel.offload.parameters=cpu"),
    ("optim=muon parallel.sync.every=5", "optim.name=muon is not made for copies that train apart"),
    (
        "optim.ema.decay=0.9 parallel.sync.every=5",
        "leave out optim.ema.decay",
    ),
    ("optim.state=bf16 optim=sgd", "works for the moments of AdamW only, not with optim.name=sgd"),
    ("optim.state=bf16 optim.implementation=fused", "is of torch's AdamW, which rounds no moments"),
    ("optim.state=bf16 parallel=fsdp parallel.offload.optimizer=cpu", "not with parallel.offload.optimizer"),
    ("optim.state=bf16 parallel.sync.every=5", "not with parallel.sync.every"),
    ("optim.state=bf16 parallel=server", "not with parallel.server.mode"),
    ("optim.state=8bit optim=muon", "works for the moments of AdamW only, not with optim.name=muon"),
    ("optim.state=8bit parallel.sync.every=5", "not with parallel.sync.every"),
    ("optim.state=8bit parallel=fsdp parallel.offload.parameters=cpu", "not with parallel.offload.parameters"),
    ("optim.state=8bit precision=fp64", "would round the parameters of precision=fp64; use precision=fp32"),
    ("optim.block_size=64", "optim.block_size=64: has no effect; set optim.state=8bit"),
    (
        "optim.state=8bit model=llama_8b parallel.tp=2 model.feed_forward=14464",
        "leaves a rank 7232 elements of each row of the feed-forward layer's output, no multiple of "
        "optim.block_size=128; use optim.block_size=64, a smaller parallel.tp, or optim.state=bf16",
    ),
    ("optim=schedule_free optim.schedule.name=cosine", "set optim.schedule.name=constant (optim=schedule_free does)"),
    ("optim=schedule_free optim.ema.decay=0.9", "evaluates with an average of its own; leave one of them out"),
    ("optim=schedule_free optim.betas=[0,0.9]", "without an average; use 0.9, or optim=adamw"),
    ("optim=schedule_free optim.implementation=fused", "has no effect with optim.name=schedule_free; leave it out"),
    ("optim=schedule_free parallel=server", "where no rank has whole updates; use optim=adamw or ddp"),
    ("optim=schedule_free parallel.sync.every=5", "optim.name=schedule_free"),
    ("optim=schedule_free parallel=fsdp parallel.offload.optimizer=cpu", "not with parallel.offload.optimizer=cpu"),
    ("optim=schedule_free checkpoint.weights_every=5", "from which their average follows; use checkpoint.keep_every"),
    ("optim=schedule_free optim.state=bf16", "not with optim.name=schedule_free"),
    ("optim=sgd optim.sgd.nesterov=true optim.sgd.momentum=0", "optim.sgd.nesterov=true: needs momentum"),
    ("optim.muon.ns_steps=3", "optim.muon.ns_steps=3: has no effect with optim.name=adamw; set optim=muon"),
    ("optim.groups=[{match:'*',lr_scale:2}] parallel=server", "servers know no names"),
    ("optim.ema.start=5", "optim.ema.start=5: has no effect; set optim.ema.decay=0.999"),
    ("optim.ema.decay=0.9 parallel=server", "optim.ema.decay=0.9: not with parallel.server.mode"),
    ("optim.ema.decay=0.9 parallel=fsdp parallel.offload.optimizer=cpu", "leave one of them out"),
)


@pytest.mark.parametrize(("overrides", "line"), REFUSED, ids=[overrides for overrides, _ in REFUSED])
def test_refused_before_a_rank_starts(overrides: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        check_support(compose(overrides.split()), 2)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("optim.groups=[{match:'*',lr_scale:0}]", "optim.groups.0.lr_scale=0.0: must be > 0"),
        ("optim.groups=[{matches:'*'}]", "matches"),
        ("optim.ema.decay=1", "optim.ema.decay=1.0: must be < 1"),
        ("optim=adafactor +optim.args.x=1", "adafactor has settings of its own"),
        ("optim.name=moun", "did you mean 'muon'?"),
    ],
)
def test_senseless_settings(overrides: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(overrides.split())
    assert line in str(caught.value)


UNMATCHED = (
    (
        "optim.groups=[{match:'layers.*.attn.*',lr_scale:2}]",
        r"optim.groups: 'layers.\*.attn.\*' matches no .*attention",
    ),
    ("optim=muon optim.muon.parameters=[embed.*]", "embed.weight is an embedding, which AdamW updates; leave it out"),
    ("optim=muon optim.muon.parameters=['*norm.weight']", "has 1 dimensions, and Muon updates matrices"),
    ("optim=muon optim.muon.parameters=[nothing]", "optim.muon.parameters: 'nothing' matches no trained parameter"),
)


@pytest.mark.parametrize(("overrides", "line"), UNMATCHED, ids=[overrides for overrides, _ in UNMATCHED])
def test_globs_that_do_not_fit_the_model(overrides: str, line: str) -> None:
    config = compose([*overrides.split(), "model=llama_tiny"])

    def attempt(world: World) -> str:
        with pytest.raises(UserError) as caught:
            make_optimizer(build_model(config.model), config.optim, world)
        return str(caught.value)

    (said,) = run_ranks(attempt, 1, parallel=config.parallel)
    assert re.search(line, said)
    assert "\n" not in said


def test_muon_needs_blocks_or_names() -> None:
    config, named = compose(["optim=muon"]), compose(["optim=muon", "optim.muon.parameters=[1.weight]"])

    def attempt(world: World) -> list[str]:
        model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 4))
        with pytest.raises(UserError, match=r"^optim.name=muon: the model has no matrices in blocks\(\)"):
            make_optimizer(model, config.optim, world)
        optimizer = make_optimizer(model, named.optim, world)
        momenta = [name for name, p in model.named_parameters() if "momentum_buffer" in optimizer.state[p]]
        return momenta

    assert run_ranks(attempt, 1, parallel=config.parallel) == [["1.weight"]]


def test_moments_in_8_bits_without_effect_are_refused() -> None:
    config = compose(["model=llama_tiny", "optim.state=8bit", "optim.block_size=4096"])

    def attempt(world: World) -> None:
        with pytest.raises(UserError, match=r"no effect: no matrix has 4096 elements .*block_size=4096 \(the widest"):
            make_optimizer(build_model(config.model), config.optim, world)

    run_ranks(attempt, 1, parallel=config.parallel)


def test_groups_set_rate_and_decay_by_name() -> None:
    groups = "optim.groups=[{match:'*.bias',lr_scale:0.5,weight_decay:0.2},{match:'1.*',lr_scale:3}]"
    config = compose([groups, "optim.weight_decay=0.1"])
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.LayerNorm(5))
    found = {
        id(p): (group["lr_factor"], group["weight_decay"])
        for group in make_optimizer(model, config.optim).param_groups
        for p in group["params"]
    }
    assert {name: found[id(p)] for name, p in model.named_parameters()} == {
        "0.weight": (1.0, 0.1),
        "0.bias": (0.5, 0.2),
        "1.weight": (3.0, 0.1),
        "1.bias": (0.5, 0.2),  # the first that matches counts
        "2.weight": (1.0, 0.0),
        "2.bias": (0.5, 0.2),
    }


class _Packed(torch.Tensor):
    """A tensor whose numbers are not in its own memory, such as those of 8-bit optimizers."""


class _PackingOptimizer(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["packed"] = torch.zeros_like(parameter).as_subclass(_Packed)


def test_a_packed_state_is_refused() -> None:
    with pytest.raises(UserError, match="has the state packed as a _Packed, whose numbers are packed"):
        initialise_optimizer_state(_PackingOptimizer(nn.Linear(2, 2).parameters(), lr=0.1))
