"""Law 1: at any layout the loss, gradients, clipped norm and updated state are those of one plain process."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from drawn import draw, runs_long_tests
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import ACCUMULATIONS, KINDS, LAYOUTS, engine_of, model

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

TOLERANCE = 1e-10
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
"""Always clipping; eps keeps AdamW from blowing up the rounding of gradients that are zero by symmetry (key biases)."""
STEPS = (0, 1)
CASES = [*product(("untied", "tied", "gpt2"), ACCUMULATIONS), *product(("half_frozen", "bare"), ("short_last",))]

Case = tuple[str, str]


def _draw_cases(layout: str) -> list[Case]:
    """Each kind of model once; the accumulations take turns, so that each kind meets each of them in some layout."""
    turn = list(LAYOUTS).index(layout)
    taken = ((kind, ACCUMULATIONS[(turn + at) % 3]) for at, kind in enumerate(("untied", "tied", "gpt2")))
    return [*taken, ("half_frozen", "short_last"), ("bare", "short_last")]


DRAWN_LAYOUTS = [
    name for name in LAYOUTS if name not in ("ddp-4", "zero3-4", "zero3-3-kept", "hsdp-2x2", "hsdp-2x2-kept")
]
"""Uneven shards of three ranks among them; test_matrix.py has copies of shards."""
DRAWN = {layout: _draw_cases(layout) if layout in DRAWN_LAYOUTS else [] for layout in LAYOUTS}


def _train_cases(world: World, config: RunConfig, cases: list[Case]) -> dict[Case, Outcome]:
    return {
        (kind, accumulation): engine_steps(engine_of(kind, config, world), world, config, kind, accumulation, STEPS)
        for kind, accumulation in cases
    }


@cache
def _train(layout: str, long: bool) -> list[dict[Case, Outcome]]:
    """What each rank of one layout saw, by case; one start of the ranks serves all cases."""
    config = LAYOUTS[layout].config(*OPTIM)
    cases = CASES if long else DRAWN[layout]
    return run_ranks(_train_cases, LAYOUTS[layout].ranks, config, cases, parallel=config.parallel)


def _list_cases() -> list[Any]:
    return [
        pytest.param(
            layout, case, id="-".join((layout, *case)), marks=() if case in DRAWN[layout] else pytest.mark.long
        )
        for layout in LAYOUTS
        for case in CASES
    ]


@cache
def _truth(kind: str) -> Outcome:
    return reference(kind, LAYOUTS["ddp-1"].config(*OPTIM), STEPS)


@pytest.mark.parametrize(("layout", "case"), _list_cases())
def test_every_layout_gives_the_numbers_of_one_process(layout: str, case: Case, request: pytest.FixtureRequest) -> None:
    trained = _train(layout, runs_long_tests(request.session))
    ranks, truth = [outcomes[case] for outcomes in trained], _truth(case[0])
    for rank in ranks:
        np.testing.assert_allclose(rank.losses, truth.losses, rtol=TOLERANCE)
        np.testing.assert_allclose(rank.norms, truth.norms, rtol=TOLERANCE)
    for step in STEPS:
        assert_close(whole([rank.gradients[step] for rank in ranks]), whole([truth.gradients[step]]), TOLERANCE)
    assert_close(whole([rank.state for rank in ranks]), whole([truth.state]), TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_that_are_compared_are_clipped(kind: str) -> None:
    assert min(_truth(kind).norms) > 2 * 0.05


@pytest.mark.parametrize("layout", draw(LAYOUTS, DRAWN_LAYOUTS))
def test_a_frozen_parameter_and_a_buffer_stay_as_they_were(layout: str, request: pytest.FixtureRequest) -> None:
    trained = _train(layout, runs_long_tests(request.session))
    ranks, start = [outcomes["bare", "short_last"] for outcomes in trained], model("bare").double().state_dict()
    state = whole([rank.state for rank in ranks])
    for name in ("frozen.weight", "frozen.bias", "scale"):
        np.testing.assert_array_equal(state[name], start[name])
    assert not any(gradient.name.startswith("frozen") for rank in ranks for gradient in rank.gradients[0])
    assert "shift" not in state, "a buffer that is not persistent is not saved"
