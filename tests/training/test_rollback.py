"""Which checkpoint is good, and what is left of that for the next attempt."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hpc_train.training.numerics.anomalies import SkippedSteps
from hpc_train.training.numerics.rollback import RollbackState, read_rollbacks


def test_a_checkpoint_is_good_when_enough_steps_after_it_went_well() -> None:
    state = RollbackState(good_after=3)
    state.add_checkpoint(10)
    assert [state.count_step(step, True) for step in (11, 12, 13, 14)] == [False, False, True, False]
    assert state.good == 10


def test_a_step_that_went_wrong_starts_the_count_anew() -> None:
    state = RollbackState(good_after=3)
    state.add_checkpoint(10)
    finite = {11: True, 12: False, 13: True, 14: True, 15: True}
    assert [state.count_step(step, ok) for step, ok in finite.items()] == [False, False, False, False, True]


def test_a_newer_good_checkpoint_may_be_gone_back_to_as_often() -> None:
    state = RollbackState(good_after=1, good=4, times=3)
    state.add_checkpoint(8)
    state.count_step(9, True)
    assert (state.good, state.times) == (8, 0)


@pytest.mark.parametrize("seed", range(30))
def test_good_is_the_newest_with_enough_finite_steps_after_it(seed: int) -> None:
    draw = random.Random(seed)
    after, every = draw.randint(1, 6), draw.randint(1, 7)
    state, finite = RollbackState(after), [draw.random() < 0.9 for _ in range(200)]
    for step, ok in enumerate(finite, 1):
        state.count_step(step, ok)
        proved = [
            saved
            for saved in range(every, step, every)
            if any(all(finite[begin : begin + after]) for begin in range(saved, step - after + 1))
        ]
        assert state.good == max(proved, default=None)
        if step % every == 0:
            state.add_checkpoint(step)


def test_the_next_attempt_knows_what_this_one_did(tmp_path: Path) -> None:
    path = tmp_path / "rollbacks.json"
    assert read_rollbacks(path) is None
    RollbackState(3, 40, 2, [SkippedSteps(51, 53, 400, 24, "NaN")]).write(path)
    again = RollbackState(3)
    again.restore(read_rollbacks(path))
    assert (again.good, again.times, again.entries) == (40, 2, [SkippedSteps(51, 53, 400, 24, "NaN")])
    path.write_text('{"good": "many"}')
    assert read_rollbacks(path) is None
