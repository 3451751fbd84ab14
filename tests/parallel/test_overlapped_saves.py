"""A save that copies beside the next forward and backward has the state of its own step, bit by bit, in any engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from drawn import draw
from late_copies import assert_same, save_both_ways
from matrix import Case, fresh
from matrix import global_batch as matrix_batch
from matrix import share as matrix_share
from plain_setup import FEATURES, HSDP, LAYOUTS, Layout, engine_of, global_batch, share
from torch import Tensor, nn

from hpc_train.checkpoint import Saver
from hpc_train.interfaces import Engine, StepBatch, World
from hpc_train.parallel.apply import build
from hpc_train.testing import run_ranks
from hpc_train.training.optimizer import make_optimizer

RATE = 1e-2
FILES = ("parallel.offload.optimizer=file", "parallel.offload.parameters=file")

CASES = {
    "zero1-2": Case(2, ("parallel.strategy=zero1",)),
    "zero2-2-tied": Case(2, ("parallel.strategy=zero2",), "tied"),
    "zero3-2-kept": Case(2, ("parallel=fsdp", "parallel.reshard_after_forward=false"), "gpt2"),
    "hsdp-2x2": Case(4, HSDP, micro=2),
    "offload-files": Case(2, ("parallel=fsdp", *FILES)),
    "offload-cpu": Case(2, ("parallel=fsdp", "parallel.offload.parameters=cpu")),
    "tp-2": Case(2, ("parallel.tp=2",)),
    "pp-2-1f1b-tied": Case(2, ("parallel=ddp", "parallel.pp=2", "parallel.pipeline.schedule=1f1b"), "tied"),
    "pp-2-zero-bubble": Case(
        2, ("parallel=ddp", "parallel.pp=2", "parallel.pipeline.schedule=interleaved_zero_bubble"), "gpt2"
    ),
}


class Writing(nn.Module):
    """Its forward writes statistics, and a parameter that is not trained (as models with a moving average do)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 5)
        self.average = nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, FEATURES) -> logits (B, 5)."""
        hidden = self.norm(torch.tanh(self.hidden(x)))
        if self.training:
            self.average.data.lerp_(hidden.detach().mean(0), 0.1)
        out: Tensor = self.out(hidden)
        return out


@pytest.mark.parametrize("name", draw(CASES, ("zero3-2-kept", "offload-files", "pp-2-1f1b-tied")))
def test_of_every_layout(name: str, tmp_path: Path) -> None:
    case, folder = CASES[name], tmp_path / "saved"
    overrides = (*case.overrides, *([f"parallel.offload.dir={tmp_path}"] if "files" in name else []))
    case = Case(case.ranks, overrides, case.kind, case.micro)

    def batch(world: World, step: int) -> StepBatch:
        return matrix_share(matrix_batch(case.kind, step), world, case.micro)

    make = partial(fresh, case)
    for errors, late in run_ranks(save_both_ways, case.ranks, make, batch, folder, parallel=case.config().parallel):
        assert errors == []
        assert late > 0
    assert_same(folder)


def _writing(layout: Layout, world: World) -> Engine:
    config = layout.config()
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return build(Writing(), lambda split: make_optimizer(split, config.optim), config, world)


@pytest.mark.parametrize("name", ["ddp-2"])
def test_what_a_forward_writes_is_copied_before_it(name: str, tmp_path: Path) -> None:
    def batch(world: World, step: int) -> StepBatch:
        return share(global_batch("bare", step), world)

    layout = LAYOUTS[name]
    for errors, late in run_ranks(
        save_both_ways, layout.ranks, partial(_writing, layout), batch, tmp_path, parallel=layout.config().parallel
    ):
        assert errors == []
        assert late > 0
    assert_same(tmp_path)


@pytest.mark.parametrize("name", ["zero3-2"])
def test_with_a_loss_scale(name: str, tmp_path: Path) -> None:
    config = LAYOUTS[name].config("precision=fp16")

    def make(world: World) -> Engine:
        return engine_of("untied", config, world)

    def batch(world: World, step: int) -> StepBatch:
        return share(global_batch("untied", step), world)

    for errors, late in run_ranks(save_both_ways, 2, make, batch, tmp_path, parallel=config.parallel):
        assert errors == []
        assert late > 0
    assert_same(tmp_path)


class Clamping(nn.Module):
    """Its forward writes what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, 5)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, FEATURES) -> logits (B, 5)."""
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        out: Tensor = self.out(x)
        return out


def test_a_forward_that_writes_what_is_trained_is_seen_and_not_trusted(tmp_path: Path) -> None:
    layout = LAYOUTS["ddp-2"]

    def train(world: World) -> list[str | None]:
        config = layout.config()
        engine = build(Clamping(), lambda split: make_optimizer(split, config.optim), config, world)
        saver = Saver(tmp_path, world, overlap=True)
        told = []
        for step in (1, 2):
            saver.save(step, list(engine.shards()), {})
            engine.forward_backward(share(global_batch("bare", step), world))
            told += [str(it.error) if it.error else None for it in saver.wait()]
            engine.update(RATE)
        return told

    for first, second in run_ranks(train, 2, parallel=layout.config().parallel):
        assert first is not None
        assert "tensor 'out.weight' was changed by a forward or a backward while it was copied" in first
        assert second is None, "from then on it is copied at once"
    assert [path.name for path in tmp_path.iterdir()] == ["step-2"]
