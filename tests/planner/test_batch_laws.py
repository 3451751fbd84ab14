"""Laws of the batch and the learning rate, against the figures that their papers and runs give."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_train.planner.model.batch_laws import (
    RampStage,
    critical_batch,
    deepseek_batch,
    deepseek_rate,
    loss_factor,
    make_batch_ramp,
    min_batch_for_bubble,
    ramp_cost,
    scaled_rate,
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
    """16 million tokens a step at 15.6 trillion (arXiv:2407.21783), 3.2 million at 300 billion (arXiv:2005.14165)."""
    assert critical_batch(15.6e12) > 16e6 / 2
    assert critical_batch(300e9) > 3.2e6 / 2


def test_deepseeks_laws_give_what_its_models_were_trained_with() -> None:
    """67B on 2 trillion tokens: 4,608 sequences of 4,096 and 3.2e-4; 7B: 2,304, 4.2e-4 (arXiv:2401.02954, table 2)."""
    for parameters, sequences, rate in ((67e9, 4608, 3.2e-4), (7e9, 2304, 4.2e-4)):
        flops = 6 * parameters * 2e12
        assert deepseek_batch(flops) == pytest.approx(sequences * 4096, rel=0.3)
        assert deepseek_rate(flops) == pytest.approx(rate, rel=0.3)


def test_the_step_laws_rate_is_near_those_in_use() -> None:
    """Llama 3 405B: 8e-5 at 15.6 trillion tokens; a factor of two is what the law is good for."""
    assert 0.5 < step_law_rate(401e9, 15.6e12) / 8e-5 < 2


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_time_to_loss_is_least_for_small_batches_and_twice_that_at_the_critical_one(batch: float, at: float) -> None:
    assert loss_factor(at, at) == 2
    assert loss_factor(batch, at) > 1
    assert time_to_loss(10.0, batch, at) == pytest.approx(10.0 * (1 + batch / at))


@given(st.floats(0.01, 100), st.floats(0.01, 100), st.sampled_from(["linear", "sqrt", "none"]))
def test_scaling_twice_is_scaling_by_the_product(once: float, again: float, rule: str) -> None:
    both = scaled_rate(scaled_rate(1e-3, once, rule), again, rule)
    assert both == pytest.approx(scaled_rate(1e-3, once * again, rule))


def test_adam_scales_by_the_root_and_sgd_in_proportion() -> None:
    assert scaled_rate(1e-3, 4, scaling_rule("adamw")) == pytest.approx(2e-3)
    assert scaled_rate(1e-3, 4, scaling_rule("sgd")) == pytest.approx(4e-3)


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


def test_blooms_ramp_has_its_stages_and_its_sequences() -> None:
    """16 to 2,048 by 16 over 9,765,625 sequences (bigscience, training chronicles of BLOOM)."""
    stages = make_batch_ramp(16, 2048, 16, 9_765_625)
    assert (stages[0].batch, stages[-1].batch, len(stages)) == (16, 2032, 127)
    sequences = sum(stage.batch * stage.steps for stage in stages)
    assert 9_765_625 <= sequences <= 9_765_625 + sum(stage.batch for stage in stages)


def test_what_blooms_ramp_cost() -> None:
    """8 TFLOP/s a GPU at 16 sequences, 73 at 192, 150 at 2,048, as its chronicles tell, and in between on a line."""
    points = [(16, 8.0), (192, 73.0), (2048, 150.0)]

    def seconds(batch: int) -> float:
        (x0, y0), (x1, y1) = next((a, b) for a, b in pairwise(points) if a[0] <= batch <= b[0])
        at = (math.log(batch) - math.log(x0)) / (math.log(x1) - math.log(x0))
        return batch / (y0 + at * (y1 - y0)) * 15.0

    stages = make_batch_ramp(16, 2048, 16, 9_765_625)
    full = 9_765_625 / 2048 * seconds(2048)
    assert 0.5 * full < ramp_cost(stages, 2048, seconds) < 2 * full


def test_a_ramp_that_starts_at_its_end_is_none_and_costs_nothing() -> None:
    assert make_batch_ramp(64, 64, 16, 1000) == ()
    assert ramp_cost((), 64, lambda batch: 1.0) == 0
    assert ramp_cost((RampStage(32, 10),), 64, lambda batch: batch * 0.1) == pytest.approx(0)
