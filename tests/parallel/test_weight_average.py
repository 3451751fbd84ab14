"""The average of the weights, in every kind of layout, against a loop of ten lines; resumed, and used to evaluate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn import draw
from matrix import STEPS, Case, fresh, global_batch, model, share, steps
from outcome import Arrays, Held, assert_close, held, whole
from test_matrix import HSDP
from torch import nn

from hpc_train.checkpoint import load_step, save_step
from hpc_train.interfaces import IGNORED_TARGET, World
from hpc_train.testing import run_ranks

DECAY, START = 0.7, 1
EMA = (f"optim.ema.decay={DECAY}", f"optim.ema.start={START}")
LAST = len(STEPS)
CASES = {
    "ddp": Case(2, ("parallel=ddp",)),
    "zero1": Case(2, ("parallel.strategy=zero1",), micro=5),
    "zero1-tp-2": Case(4, ("parallel.strategy=zero1", "parallel.tp=2")),
    "zero3": Case(4, ("parallel=fsdp",), micro=2),
    "hsdp": Case(4, HSDP, micro=2),
    "pp-2-zero2-tied": Case(4, ("parallel.strategy=zero2", "parallel.pp=2"), "tied"),
    "muon-zero3": Case(2, ("parallel=fsdp", "optim=muon")),
}


def _average(case: Case) -> tuple[Arrays, float, float]:
    """Three steps in one process; returns the average, and the losses of the weights and of the average after them."""
    plain = replace(case, ranks=1, overrides=tuple(word for word in case.overrides if word.startswith("optim")))
    (weights,) = run_ranks(_list_weights, 1, plain, parallel=plain.config().parallel)
    average: Arrays = {}
    for update, after in enumerate(weights, 1):
        for name, value in after.items():
            average[name] = value if update <= START else DECAY * average[name] + (1 - DECAY) * value
    return average, _evaluate(weights[-1], case), _evaluate(average, case)


def _list_weights(world: World, case: Case) -> list[Arrays]:
    """The weights after each of three steps."""
    engine, weights = fresh(case, world), []
    for step in (*STEPS, LAST):
        steps(engine, case, world, (step,))
        weights.append({name: p.detach().cpu().numpy().copy() for name, p in engine.parts[0].named_parameters()})
    return weights


def _evaluate(weights: Arrays, case: Case) -> float:
    module = model(case.kind)
    module.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()}, strict=False)
    batch = global_batch(case.kind, 9)
    logits = module(batch.inputs).flatten(0, -2)
    return nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED_TARGET).item()


def _train(world: World, case: Case, folder: Path) -> tuple[list[Held], list[Held], float, float]:
    """Two steps, a save and a resume into a new engine, a third step; and an evaluation with and without it."""
    engine = fresh(case, world)
    steps(engine, case, world, STEPS)
    save_step(folder, LAST, engine.shards(), {}, world).wait()
    again = fresh(case, world)
    load_step(folder, LAST, again.shards(), world)
    steps(again, case, world, (LAST,))
    before = held(again.shards())
    sums = again.evaluate(share(global_batch(case.kind, 9), world, case.micro))
    after = held(again.shards())
    unused = replace(case, overrides=(*case.overrides, "optim.ema.evaluate=false"))
    plain = fresh(unused, world)
    save_step(folder, LAST + 1, again.shards(), {}, world).wait()
    load_step(folder, LAST + 1, plain.shards(), world)
    others = plain.evaluate(share(global_batch(case.kind, 9), world, case.micro))
    return before, after, float(sums.loss) / sums.tokens, float(others.loss) / others.tokens


@pytest.mark.parametrize("name", draw(CASES, ("zero1", "pp-2-zero2-tied")))
def test_equals_the_average_of_whole_weights(name: str, tmp_path: Path) -> None:
    case = replace(CASES[name], overrides=(*CASES[name].overrides, *EMA))
    average, loss, averaged_loss = _average(case)
    ranks = run_ranks(_train, case.ranks, case, tmp_path, parallel=case.config().parallel, timeout=200)
    state = whole([before for before, _, _, _ in ranks])
    found = {key.removeprefix("optim.ema."): value for key, value in state.items() if key.startswith("optim.ema.")}
    assert_close(found, average, 1e-10)
    assert abs(loss - averaged_loss) > 1e-6
    for before, after, with_average, without in ranks:
        np.testing.assert_allclose(with_average, averaged_loss, rtol=1e-10)
        np.testing.assert_allclose(without, loss, rtol=1e-10)
        for one, other in zip(before, after, strict=True):  # an evaluation puts everything back, to the bit
            assert np.array_equal(one.local, other.local), one.name


def test_a_skipped_update_does_not_move_the_average() -> None:
    case = Case(1, ("parallel=ddp", *EMA))

    def attempt(world: World) -> bool:
        engine = fresh(case, world)
        engine.forward_backward(share(global_batch("llama", 0), world, case.micro))
        before = held(engine.shards())
        engine.skip_update()
        return all(np.array_equal(a.local, b.local) for a, b in zip(before, held(engine.shards()), strict=True))

    assert run_ranks(attempt, 1, parallel=case.config().parallel) == [True]
