"""Micro-batches of several inputs by name, and models that return dictionaries, train as one tensor does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawn import draw
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import FEATURES, HSDP, LAYOUTS, Bare, Layout, global_batch, share
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import IGNORED_TARGET, MicroBatch, StepBatch, World
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_engine, make_model
from hpc_train.training.optimizer import make_optimizer

STEPS = (0, 1)
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
HALF = FEATURES // 2


class Logits(Bare):
    """Takes two halves of the features by name, and returns a dictionary."""

    def blocks(self) -> dict[str, nn.Module]:
        return {"hidden": self.hidden, "out": self.out}

    def join(self, left: Tensor, right: Tensor) -> Tensor:
        return super().forward(torch.cat((left, right), -1))

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return {"logits": self.join(left, right), "extra": None}


class MeanLoss(Logits):
    """Returns its mean loss only, as a model of transformers that gets labels."""

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> Any:
        loss = F.cross_entropy(self.join(left, right), labels, ignore_index=IGNORED_TARGET)
        return SequenceClassifierOutput(loss=loss)


class LossAndLogits(Logits):
    """Returns both: the loss is what counts."""

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> Any:
        logits = self.join(left, right)
        return {"loss": F.cross_entropy(logits, labels, ignore_index=IGNORED_TARGET), "logits": 3 * logits}


class OwnSum(Logits):
    """Adds up its loss itself."""

    def loss_sum(self, out: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(out["logits"], target, ignore_index=IGNORED_TARGET, reduction="sum")


MODELS = {kind.__name__: kind for kind in (Logits, MeanLoss, LossAndLogits, OwnSum)}
TECHNIQUES = {
    "ddp-2": LAYOUTS["ddp-2"],
    "zero1": Layout(2, ("parallel.strategy=zero1",)),
    "zero2": Layout(2, ("parallel.strategy=zero2",)),
    "zero3-2": LAYOUTS["zero3-2"],
    "hsdp-2x2": Layout(4, HSDP),
    "recomputed": Layout(2, ("parallel=fsdp", "parallel.recompute.mode=full")),
    "static": Layout(2, ("parallel=ddp", "parallel.static_graph=true")),
    "unused": Layout(2, ("parallel=ddp", "parallel.unused_parameters=true")),
}
DRAWN = {
    "Logits-ddp-2",
    "MeanLoss-ddp-2",
    "MeanLoss-zero3-2",
    "LossAndLogits-hsdp-2x2",
    "OwnSum-recomputed",
    "Logits-zero2",
    "MeanLoss-static",
}


def make(kind: str) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return MODELS[kind]()


def name_inputs(kind: str, batch: MicroBatch) -> MicroBatch:
    assert isinstance(batch.inputs, Tensor)
    inputs = {"left": batch.inputs[:, :HALF], "right": batch.inputs[:, HALF:]}
    return MicroBatch({**inputs, "labels": batch.targets} if "Loss" in kind else inputs, batch.targets)


@cache
def truth() -> Outcome:
    return reference("bare", LAYOUTS["ddp-1"].config(*OPTIM), STEPS)


def _train(world: World, kind: str, config: RunConfig) -> tuple[Outcome, float]:
    engine = build(make(kind), lambda split: make_optimizer(split, config.optim), config, world)
    evaluated = engine.evaluate(share(name_inputs(kind, global_batch("bare", 0)), world, "two"))
    outcome = engine_steps(engine, world, config, "bare", "short_last", STEPS, lambda batch: name_inputs(kind, batch))
    return outcome, float(evaluated.loss) / evaluated.tokens


@pytest.mark.parametrize("case", draw([f"{kind}-{name}" for kind in MODELS for name in TECHNIQUES], DRAWN))
def test_named_inputs_train_as_one_tensor(case: str) -> None:
    kind, _, name = case.partition("-")
    config = TECHNIQUES[name].config(*OPTIM)
    ranks = run_ranks(_train, TECHNIQUES[name].ranks, kind, config, parallel=config.parallel)
    for outcome, evaluated in ranks:
        assert outcome.losses == pytest.approx(truth().losses, rel=1e-10)
        assert outcome.norms == pytest.approx(truth().norms, rel=1e-10)
        assert evaluated == pytest.approx(truth().losses[0], rel=1e-10)
    got, wanted = whole([outcome.state for outcome, _ in ranks]), whole([truth().state])
    assert_close(got, {name: wanted[name] for name in got}, 1e-10)


def _mixed(world: World, config: RunConfig) -> list[float]:
    engine = build(make("MeanLoss"), lambda split: make_optimizer(split, config.optim), config, world)
    if config.parallel.strategy == "zero3":  # autocast casts what meets a buffer; fully_shard casts parameters alone
        for part in engine.parts:
            part.scale, part.shift = part.scale.bfloat16(), part.shift.bfloat16()
    return engine_steps(
        engine, world, config, "bare", "two", STEPS, lambda batch: name_inputs("MeanLoss", batch)
    ).losses


@pytest.mark.parametrize("layout", ["ddp-2", "zero3-2"])
def test_named_inputs_in_low_precision(layout: str) -> None:
    config = LAYOUTS[layout].config(*OPTIM, "precision=bf16")
    for losses in run_ranks(_mixed, 2, config, parallel=config.parallel):
        assert losses == pytest.approx(truth().losses, rel=2e-2)
        assert losses != pytest.approx(truth().losses, rel=1e-6)


class Hidden(Logits):
    """Returns an object in which torch sees no tensor."""

    def forward(self, left: Tensor, right: Tensor) -> Any:
        return [{self.join(left, right)}]

    def loss_sum(self, out: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(out[0].pop(), target, ignore_index=IGNORED_TARGET, reduction="sum")


class VectorLoss(Logits):
    def forward(self, left: Tensor, right: Tensor) -> Any:
        return {"loss": self.join(left, right)}


class OtherNames(Logits):
    def forward(self, left: Tensor, wright: Tensor) -> Any:
        return {"logits": self.join(left, wright)}


def _refused(world: World, module: nn.Module, config: RunConfig) -> str:
    engine = build(module, lambda split: make_optimizer(split, config.optim), config, world)
    batch = name_inputs("Logits", global_batch("bare", 0))
    with pytest.raises(UserError) as caught:
        engine.forward_backward(StepBatch([batch]))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "layout", "says"),
    [
        (Hidden, "zero3-1", "Hidden.forward returned a list, in which fully_shard sees no tensor; return a tensor, a"),
        (VectorLoss, "ddp-1", "returned a dict (loss) whose loss is a tensor (24, 5) of float64; return its mean"),
        (OtherNames, "ddp-1", "OtherNames.forward is called with the data's inputs by name (left, right): missing a"),
    ],
)
def test_what_a_model_takes_and_returns_is_checked(kind: type[nn.Module], layout: str, says: str) -> None:
    config = LAYOUTS[layout].config()
    (said,) = run_ranks(_refused, 1, kind(), config, parallel=config.parallel)
    assert says in said
    assert "test_named_inputs.py:" in said
    assert "\n" not in said


def _refused_split(world: World, config: RunConfig) -> str:
    engine, tokens = make_engine(config, world, make_model(config)), torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(UserError) as caught:
        engine.forward_backward(StepBatch([MicroBatch({"x": tokens}, tokens)]))
    return str(caught.value)


@pytest.mark.parametrize("overrides", [("parallel.pp=2",), ("parallel.cp=2",), ("parallel.tp=2",)])
def test_what_splits_one_tensor_refuses_several(overrides: tuple[str, ...]) -> None:
    config = Layout(2, overrides).config()
    for said in run_ranks(_refused_split, 2, config, parallel=config.parallel):
        assert said.startswith(f"{overrides[0]}: the data give the inputs x by name, and ")
        assert "\n" not in said
