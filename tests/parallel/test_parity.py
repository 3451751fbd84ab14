"""Law 1: at any layout the loss, gradients, clipped norm and updated state are those of one plain process."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from outcome import Outcome, assert_close, engine_steps, reference, whole
from plain_setup import ACCUMULATIONS, KINDS, LAYOUTS, engine_of, model

from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

TOLERANCE = 1e-10
OPTIM = ("optim.max_norm=0.05", "optim.eps=1e-6")
"""Always clipping; eps keeps AdamW from blowing up the rounding of gradients that are zero by symmetry (key biases)."""
STEPS = (0, 1, 2)
CASES = [*product(("untied", "tied", "gpt2"), ACCUMULATIONS), *product(("half_frozen", "bare"), ("short_last",))]

Case = tuple[str, str]


def _every_case(world: World, config: RunConfig) -> dict[Case, Outcome]:
    return {
        (kind, accumulation): engine_steps(engine_of(kind, config, world), world, config, kind, accumulation, STEPS)
        for kind, accumulation in CASES
    }


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request: pytest.FixtureRequest) -> list[dict[Case, Outcome]]:
    """What each rank of one layout saw, by case; one start of the ranks serves all cases."""
    layout = LAYOUTS[request.param]
    config = layout.config(*OPTIM)
    return run_ranks(_every_case, layout.ranks, config, parallel=config.parallel)


@cache
def _truth(kind: str) -> Outcome:
    return reference(kind, LAYOUTS["ddp-1"].config(*OPTIM), STEPS)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_layout_gives_the_numbers_of_one_process(trained: list[dict[Case, Outcome]], case: Case) -> None:
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


def test_a_frozen_parameter_and_a_buffer_stay_as_they_were(trained: list[dict[Case, Outcome]]) -> None:
    ranks, start = [outcomes["bare", "short_last"] for outcomes in trained], model("bare").double().state_dict()
    state = whole([rank.state for rank in ranks])
    for name in ("frozen.weight", "frozen.bias", "scale"):
        np.testing.assert_array_equal(state[name], start[name])
    assert not any(gradient.name.startswith("frozen") for rank in ranks for gradient in rank.gradients[0])
    assert "shift" not in state, "a buffer that is not persistent is not saved"
