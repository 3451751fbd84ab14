"""The validation loss is the same at any layout, and evaluating changes nothing."""

from pathlib import Path

import pytest
import torch
from drawn import draw
from training_runs import assert_same_bits, metrics, run, small

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import MicroBatch, StepBatch, World
from hpc_train.testing import run_ranks
from hpc_train.training.factory import make_engine, make_model

HSDP = ("parallel=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2")
EXACT = ("precision=fp64", "train.eval_every=1", "train.steps=2")


def test_the_validation_loss_is_the_same_at_any_layout(store: Path, tmp_path: Path) -> None:
    layouts = {
        1: ("train.micro_batch=8",),
        2: ("parallel=ddp", "train.micro_batch=3"),
        3: ("parallel=fsdp", "train.micro_batch=4"),
        4: HSDP,
    }
    losses = {}
    for number, overrides in layouts.items():
        config = small(store, tmp_path / str(number), *EXACT, *overrides)
        run(config, ranks={1: 1, 2: 2, 3: 2, 4: 4}[number])
        losses[number] = [loss for (loss,) in metrics(config, "validation_loss")]
    assert len(losses[1]) == 2
    for found in losses.values():
        assert found == pytest.approx(losses[1], rel=1e-10)


@pytest.mark.parametrize("parallel", draw(("ddp", "fsdp"), ("ddp",)))
def test_evaluating_does_not_change_training(store: Path, tmp_path: Path, parallel: str) -> None:
    shared = (f"parallel={parallel}", "model.dropout=0.1", "checkpoint.every=2")
    never, always = (small(store, tmp_path / f"{every}", *shared, f"train.eval_every={every}") for every in (0, 1))
    assert_same_bits(run(never), run(always))
    assert metrics(never, "loss", "grad_norm") == metrics(always, "loss", "grad_norm")
    assert all(loss is not None for (loss,) in metrics(always, "validation_loss"))


def test_evaluation_has_no_dropout(store: Path, tmp_path: Path) -> None:
    """With a learning rate of next to nothing the model stays the same, and so must its loss."""
    config = small(store, tmp_path, "model.dropout=0.5", "train.eval_every=1", "optim.lr=1e-30")
    run(config)
    assert len(set(metrics(config, "validation_loss"))) == 1
    assert len(set(metrics(config, "loss"))) == 6


def test_a_module_that_was_put_into_evaluation_mode_stays_in_it(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path, "model.dropout=0.1")

    def modes(world: World, config: RunConfig) -> list[dict[str, bool]]:
        engine = make_engine(config, world, make_model(config))
        model = engine.parts[0]
        model.get_submodule("layers.0").eval()
        before = {name: module.training for name, module in model.named_modules()}
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        engine.evaluate(StepBatch([MicroBatch(tokens, tokens)]))
        return [before, {name: module.training for name, module in model.named_modules()}]

    for before, after in run_ranks(modes, 2, config, parallel=config.parallel):
        assert before == after
        assert set(before.values()) == {True, False}
