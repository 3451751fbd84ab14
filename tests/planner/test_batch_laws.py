"""Laws of the batch and the learning rate, against the figures that their papers and runs give."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.planner.batch_laws import (
    critical_batch,
    loss_factor,
    min_batch_for_bubble,
    scaling_rule,
    step_law_rate,
    time_to_loss,
)
from hpc_train.schedules.generate import generate_order
from hpc_train.schedules.simulate import ActionTimes, simulate_order


@pytest.mark.parametrize(("tokens", "batch"), [(300e9, 2.1e6), (15e12, 19e6)])
def test_the_step_law_gives_the_batches_of_gpt_3_and_llama_3(tokens: float, batch: float) -> None:
    assert critical_batch(tokens) == pytest.approx(batch, rel=0.05)


def test_llama_3_and_gpt_3_are_not_past_twice_the_critical_batch() -> None:
    """16 million tokens per step at 15.6 trillion (arXiv:2407.21783), 3.2 million at 300 billion (arXiv:2005.14165)."""
    assert critical_batch(15.6e12) > 16e6 / 2
    assert critical_batch(300e9) > 3.2e6 / 2


def test_the_step_laws_rate_is_near_those_in_use() -> None:
    """Llama 3 405B: 8e-5 at 15.6 trillion tokens; a factor of two is what the law is good for."""
    assert 0.5 < step_law_rate(401e9, 15.6e12) / 8e-5 < 2


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_time_to_loss_is_least_for_small_batches_and_twice_that_at_the_critical_one(batch: float, at: float) -> None:
    assert loss_factor(at, at) == 2
    assert loss_factor(batch, at) > 1
    assert time_to_loss(10.0, batch, at) == pytest.approx(10.0 * (1 + batch / at))


def test_adam_scales_by_the_root_and_sgd_in_proportion() -> None:
    assert (scaling_rule("adamw"), scaling_rule("sgd")) == ("sqrt", "linear")


@pytest.mark.parametrize(("pp", "virtual"), [(4, 1), (8, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("bubble", [0.05, 0.2])
def test_the_least_batch_is_the_first_that_the_simulated_schedule_accepts(pp: int, virtual: int, bubble: float) -> None:
    least = min_batch_for_bubble(1, 1, pp, virtual, bubble)
    name = "1f1b" if virtual == 1 else "interleaved_1f1b"

    def idle(count: int) -> float:
        """Over the computation; rounds are full in multiples of pp."""
        times = ActionTimes.even(pp * virtual)
        share = simulate_order(generate_order(name, pp, count, virtual), times).mean_bubble
        return share / (1 - share)

    full = -(-least // pp) * pp
    assert idle(full) <= bubble + 1e-9
    if full > pp:
        assert idle(full - pp) > bubble - 1e-9


def test_the_least_batch_counts_ranks_and_micro_batches() -> None:
    assert min_batch_for_bubble(8, 2, 4, 1, 0.1) == 8 * 2 * 30
    assert min_batch_for_bubble(8, 2, 1, 1, 0.1) == 16
