"""The same table in bf16, against one process in float64, within what rounding to bfloat16 costs.

Every operation rounds its result to 8 bits, an error of up to 2**-9 = 0.002 of it. The tolerances are some three times
the worst of what was measured over the layouts below and one process (torch 2.13, CPU):

- the loss, a mean over tokens whose errors are independent: 0.003 of it;
- a gradient, for which some hundred operations follow one another: 0.03 of the norm of all gradients together, 0.05 of
  one tensor's own; the norm before clipping, where errors average out and later steps add theirs: 0.02;
- what two steps add to the parameters: 0.11 of its norm. AdamW's first updates are nearly the signs of the gradient,
  and a gradient with a relative error e has about e / pi of its signs wrong, so that 2 sqrt(e / pi) = 0.2 is the worst.

A layout rounds in other places than one process, but not more: it must be as close to float64 as one process in bf16.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch.distributed.pipelining  # noqa: F401  imported once here and not by every forked rank
from drawn import draw
from matrix import STEPS, Case, fresh, model, steps, truth
from outcome import Arrays, Outcome, assert_close, whole

from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

LOSS, NORM, GRADIENT, ONE_GRADIENT, UPDATE = 0.01, 0.06, 0.09, 0.15, 0.35
AS_CLOSE = 1.5
"""How much farther from float64 than one process in bf16 a layout may be; measured: 1.11."""
BF16 = "precision=bf16"
CASES: dict[str, Case] = {
    "one": Case(1, (BF16,)),
    "ddp-2": Case(2, (BF16, "parallel=ddp")),
    "zero3-2": Case(2, (BF16, "parallel=fsdp")),
    "tp-2": Case(2, (BF16, "parallel.tp=2")),
    "pp-2": Case(2, (BF16, "parallel.pp=2", "parallel.pipeline.schedule=1f1b")),
    "cp-2-ring": Case(2, (BF16, "parallel.cp=2")),
    "zero3-2-tp-2": Case(4, (BF16, "parallel=fsdp", "parallel.tp=2")),
    "recompute-full": Case(2, (BF16, "parallel=fsdp", "parallel.recompute.mode=full")),
}


@cache
def _truth() -> Outcome:
    return truth("llama")[0]


@cache
def _initial() -> Arrays:
    return {name: parameter.detach().numpy() for name, parameter in model("llama").named_parameters()}


@cache
def _trained(name: str) -> list[Outcome]:
    case = CASES[name]
    return run_ranks(_two_steps, case.ranks, case, parallel=case.config().parallel)


def _two_steps(world: World, case: Case) -> Outcome:
    return steps(fresh(case, world), case, world, STEPS)


def gradient_error(ranks: list[Outcome]) -> float:
    """Relative error of the gradients of the first step, of all parameters together."""
    return _distance(_gradients(ranks), _gradients([_truth()]))


def update_error(ranks: list[Outcome]) -> float:
    """Largest relative error of what two steps have added to the parameters."""
    return _distance(_update(ranks), _update([_truth()]))


def _gradients(ranks: list[Outcome]) -> Arrays:
    return whole([rank.gradients[0] for rank in ranks])


def _update(ranks: list[Outcome]) -> Arrays:
    state = whole([rank.state for rank in ranks])
    return {name: state[name] - start for name, start in _initial().items()}


def _distance(got: Arrays, wanted: Arrays) -> float:
    assert got.keys() == wanted.keys()
    errors = sum(np.square(got[name] - array).sum() for name, array in wanted.items())
    return float(np.sqrt(errors / sum(np.square(array).sum() for array in wanted.values())))


DRAWN = ("one", "ddp-2", "pp-2", "cp-2-ring", "zero3-2-tp-2")


@pytest.mark.parametrize("name", draw(CASES, DRAWN))
def test_bf16_is_one_process_in_float64_but_for_its_rounding(name: str) -> None:
    ranks = _trained(name)
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, _truth().losses, rtol=LOSS)
        np.testing.assert_allclose(rank.norms, _truth().norms, rtol=NORM)
    assert_close(_gradients(ranks), _gradients([_truth()]), ONE_GRADIENT)
    assert gradient_error(ranks) <= GRADIENT
    assert update_error(ranks) <= UPDATE


@pytest.mark.parametrize("name", draw(list(CASES)[1:], DRAWN[1:]))
def test_a_layout_is_as_close_to_float64_as_one_process(name: str) -> None:
    ranks, alone = _trained(name), _trained("one")
    assert gradient_error(alone) > 1e-3, "computed in bf16"
    assert gradient_error(ranks) <= AS_CLOSE * gradient_error(alone)
    assert update_error(ranks) <= AS_CLOSE * update_error(alone)


def _half_of_the_batch(world: World, case: Case) -> Outcome:
    """What one of two ranks gets that forget to reduce their gradients."""
    return steps(fresh(case, world), case, replace(world, dp_size=2), STEPS)


def test_a_gradient_that_was_not_reduced_is_far_outside() -> None:
    ranks = run_ranks(_half_of_the_batch, 1, CASES["one"])
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(_gradients(ranks), _gradients([_truth()]), 2 * ONE_GRADIENT)
    assert gradient_error(ranks) > 2 * GRADIENT
    assert update_error(ranks) > 1.5 * UPDATE
