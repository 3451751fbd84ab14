"""State goes through a checkpoint from any layout into any other, and training goes on as if it had never stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from drawn import draw
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import LAYOUTS, engine_of, global_batch, model, share

from hpc_train.checkpoint import load_step, save_step
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

ROAD = ("ddp-2", "zero3-4", "hsdp-2x2", "zero3-3", "ddp-1")
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")


def _continue(world: World, config: RunConfig, folder: Path, step: int) -> Outcome:
    """Load what is there, train one step, evaluate, save."""
    engine = engine_of("tied", config, world)
    if step:
        assert load_step(folder, step, engine.shards(), world) == {"consumed": step}
    outcome = engine_steps(engine, world, config, "tied", "two", (step,))
    engine.evaluate(share(global_batch("tied", 100), world))  # a forward without a backward, as before most saves
    save_step(folder, step + 1, engine.shards(), {"consumed": step + 1}, world).wait()
    return outcome


def test_a_run_moves_over_all_layouts_and_equals_one_that_never_stopped(tmp_path: Path) -> None:
    for step, name in enumerate(ROAD):
        config = LAYOUTS[name].config(*OPTIM)
        ranks = run_ranks(_continue, LAYOUTS[name].ranks, config, tmp_path, step, parallel=config.parallel)
    truth = reference("tied", LAYOUTS["ddp-1"].config(*OPTIM), range(len(ROAD)))
    np.testing.assert_allclose(ranks[0].losses[-1], truth.losses[-1], rtol=1e-10)
    assert_close(whole([rank.state for rank in ranks]), whole([truth.state]), 1e-10)


def _stop_and_go(world: World, config: RunConfig, folder: Path) -> tuple[Outcome, Outcome]:
    train = partial(engine_steps, world=world, config=config, kind="gpt2", accumulation="short_last")
    first = engine_of("gpt2", config, world)
    train(first, steps=(0, 1))
    save_step(folder, 2, first.shards(), {}, world).wait()
    second = engine_of("gpt2", config, world)
    load_step(folder, 2, second.shards(), world)
    return train(first, steps=(2, 3)), train(second, steps=(2, 3))


@pytest.mark.parametrize("name", draw(["ddp-2", "zero3-3", "hsdp-2x2-kept"], ["ddp-2", "zero3-3"]))
def test_a_resume_at_the_same_layout_is_bit_exact(name: str, tmp_path: Path) -> None:
    config = LAYOUTS[name].config("precision=fp32")
    for straight, resumed in run_ranks(_stop_and_go, LAYOUTS[name].ranks, config, tmp_path, parallel=config.parallel):
        assert straight.losses == resumed.losses
        assert straight.norms == resumed.norms
        for a, b in zip(straight.state, resumed.state, strict=True):
            np.testing.assert_array_equal(a.local, b.local, err_msg=a.name)


def _piece_counts(world: World, config: RunConfig) -> list[int]:
    """Number of pieces when new, after an evaluation, after a step."""
    engine = engine_of("untied", config, world)
    counts = [len(list(engine.shards()))]
    engine.evaluate(share(global_batch("untied", 0), world))
    counts.append(len(list(engine.shards())))
    engine.forward_backward(share(global_batch("untied", 0), world))
    engine.update(1e-3)
    return [*counts, len(list(engine.shards()))]


@pytest.mark.parametrize("name", ["ddp-2", "zero3-2", "zero3-2-kept"])
def test_nothing_is_missing_from_what_is_saved_after_an_evaluation(name: str) -> None:
    config = LAYOUTS[name].config()
    parameters = len(list(model("untied").parameters()))
    for counts in run_ranks(_piece_counts, LAYOUTS[name].ranks, config, parallel=config.parallel):
        assert counts == [4 * parameters] * 3, "each parameter, and step, exp_avg and exp_avg_sq of it"
