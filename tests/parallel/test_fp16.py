"""fp16: float32 master weights, and a loss scale that learns from overflow, agreed on by all ranks and saved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import draw
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import LAYOUTS, engine_of, global_batch, share

from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import Engine, TensorShard, World
from hpc_train.parallel.precision.number_formats import GROWTH_INTERVAL, INITIAL_SCALE, LossScale
from hpc_train.testing import run_ranks

FP16 = "precision=fp16"
ROUNDING = 2**-11
"""Half a unit in the last place of float16, relative."""
LAYOUTS_HERE = ("ddp-2", "zero3-2", "hsdp-2x2")


def _piece(engine: Engine, name: str) -> TensorShard:
    return next(piece for piece in engine.shards() if piece.name == name)


@dataclass
class Training:
    """What one rank sees of several steps."""

    first: Outcome
    """One step, on its own."""
    dtypes: set[str]
    losses: list[float]
    updated: list[bool]
    norms: list[float]
    scales: list[float]
    moved: list[bool]
    """Whether a step changed the parameters."""


def _train(world: World, config: RunConfig, scale: float, steps: int) -> Training:
    first = engine_of("untied", config, world)
    outcome = engine_steps(first, world, config, "untied", "two", (0,))
    engine = engine_of("untied", config, world)
    _piece(engine, "scaler.scale").local.fill_(scale)
    found = Training(outcome, {str(piece.dtype) for piece in engine.shards()}, [], [], [], [], [])
    weight = next(engine.shards()).local
    for _ in range(steps):
        before = weight.clone()
        sums = engine.forward_backward(share(global_batch("untied", 0), world, "two"))
        found.losses.append(float(sums.loss) / sums.tokens)
        found.norms.append(float(engine.clip(config.optim.max_norm)))
        found.updated.append(engine.update(1e-2))
        found.scales.append(float(_piece(engine, "scaler.scale").local))
        found.moved.append(not torch.equal(before, weight))
    return found


OVERFLOW = 2.0**40


@pytest.fixture(scope="module", params=draw(LAYOUTS_HERE, ("ddp-2", "zero3-2")))
def trained(request: pytest.FixtureRequest) -> list[Training]:
    """Each rank's training from a scale at which the gradient overflows."""
    layout = LAYOUTS[request.param]
    config = layout.config(FP16)
    return run_ranks(_train, layout.ranks, config, OVERFLOW, 48, parallel=config.parallel)


def test_master_weights_gradients_and_state_are_float32(trained: list[Training]) -> None:
    assert trained[0].dtypes == {"torch.float32"}


def test_the_gradient_is_that_of_one_process_but_for_rounding(trained: list[Training]) -> None:
    """Unscaled, and within what a dozen roundings to float16 in a row can do; further off than float32 would be."""
    config = LAYOUTS["ddp-2"].config(FP16)
    truth = reference("untied", config, (0,))
    for rank in trained:
        np.testing.assert_allclose(rank.first.losses, truth.losses, rtol=ROUNDING)
        np.testing.assert_allclose(rank.first.norms, truth.norms, rtol=16 * ROUNDING)
    gradients = whole([rank.first.gradients[0] for rank in trained])
    wanted = whole([truth.gradients[0]])
    for name, gradient in gradients.items():
        gradients[name] = gradient / INITIAL_SCALE  # taken before clip, which unscales
        assert gradients[name].shape == wanted[name].shape
    assert_close(gradients, wanted, 16 * ROUNDING)
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(gradients, wanted, 1e-5)


def test_an_overflow_skips_the_update_and_halves_the_scale_until_it_fits(trained: list[Training]) -> None:
    for rank in trained:
        skipped = rank.updated.index(True)
        assert 5 < skipped < 40
        assert not any(rank.updated[:skipped])
        assert not any(rank.moved[:skipped])
        assert not np.isfinite(rank.norms[:skipped]).any()
        assert rank.scales[:skipped] == [OVERFLOW / 2 ** (step + 1) for step in range(skipped)]
        assert all(rank.updated[skipped:])
        assert all(rank.moved[skipped:])
        assert set(rank.scales[skipped:]) == {OVERFLOW / 2**skipped}


def test_the_loss_falls_after_the_overflow(trained: list[Training]) -> None:
    for rank in trained:
        assert rank.updated == trained[0].updated
        assert rank.scales == trained[0].scales
        assert rank.losses[-1] < 0.9 * rank.losses[0]


def test_the_scale_doubles_after_enough_good_updates() -> None:
    scaling = LossScale()
    for _ in range(GROWTH_INTERVAL - 1):
        scaling.adjust(finite=True)
    assert scaling.factor == INITIAL_SCALE
    scaling.adjust(finite=True)
    assert scaling.factor == 2 * INITIAL_SCALE
    scaling.adjust(finite=False)
    assert scaling.factor == INITIAL_SCALE
    for _ in range(GROWTH_INTERVAL - 1):
        scaling.adjust(finite=True)
    assert scaling.factor == INITIAL_SCALE, "a skipped update begins the count anew"


def test_a_gradient_that_no_scale_saves_ends_the_run_in_a_line() -> None:
    scaling = LossScale()
    for _ in range(40):
        scaling.adjust(finite=False)
    assert scaling.factor == INITIAL_SCALE / 2**40
    with pytest.raises(UserError, match=r"precision=fp16: the gradient is not finite even at a loss scale of .*bf16"):
        scaling.adjust(finite=False)


def _stop_and_go(world: World, config: RunConfig, folder: Path) -> tuple[list[float], Outcome, Outcome]:
    """Overflow, save, and go on in the same and in a new engine."""
    train = partial(engine_steps, world=world, config=config, kind="gpt2", accumulation="two")
    first = engine_of("gpt2", config, world)
    _piece(first, "scaler.scale").local.fill_(2.0**60)
    first.forward_backward(share(global_batch("gpt2", 0), world))
    assert not first.update(1e-2)
    _piece(first, "scaler.scale").local.fill_(2.0**9)
    train(first, steps=(0, 1))
    save_step(folder, 2, first.shards(), {}, world).wait()
    second = engine_of("gpt2", config, world)
    load_step(folder, 2, second.shards(), world)
    state = [float(_piece(second, f"scaler.{name}").local) for name in ("scale", "good")]
    return state, train(first, steps=(2, 3)), train(second, steps=(2, 3))


@pytest.mark.parametrize("layout", draw(["ddp-2", "zero3-2"], ["zero3-2"]))
def test_a_resumed_run_has_the_same_scale_and_goes_on_bit_for_bit(layout: str, tmp_path: Path) -> None:
    config = LAYOUTS[layout].config(FP16)
    for state, straight, resumed in run_ranks(_stop_and_go, 2, config, tmp_path, parallel=config.parallel):
        assert state == [2.0**9, 2.0]
        assert straight.losses == resumed.losses
        for a, b in zip(straight.state, resumed.state, strict=True):
            np.testing.assert_array_equal(a.local, b.local, err_msg=a.name)


def _samples(world: World, configs: list[RunConfig], accumulation: str) -> list[float]:
    found = []
    for config in configs:
        batch = share(global_batch("untied", 0), world, accumulation)
        batch.measure = True
        sample = engine_of("untied", config, world).forward_backward(batch).sample
        assert sample is not None
        found.append(float(sample.norm_square))
    return found


@pytest.mark.parametrize(("layout", "accumulation"), [("ddp-2", "one"), ("ddp-2", "two"), ("zero3-2", "two")])
def test_the_gradient_sample_is_unscaled(layout: str, accumulation: str) -> None:
    configs = [LAYOUTS[layout].config(f"precision={name}") for name in ("fp32", "fp16")]
    for exact, low in run_ranks(_samples, 2, configs, accumulation, parallel=configs[0].parallel):
        assert low == pytest.approx(exact, rel=32 * ROUNDING)
