"""The `plan` part of a run: what contradicts itself, and that a run which goes on may change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.training.run_directory import check_same_config, locate_run_directory, prepare_run_directory


@pytest.mark.parametrize(
    ("overrides", "answer"),
    [
        (["plan.budget=1000"], "plan.budget=1000: needs plan.price_per_gpu_hour or plan.spot_price_per_gpu_hour"),
        (
            ["plan.spot_price_per_gpu_hour=1"],
            "plan.spot_price_per_gpu_hour=1: needs plan.spot_interruptions_per_1000_node_days, without which the price "
            "says little",
        ),
        (
            ["plan.energy.pue=1.2"],
            "plan.energy: needs watts_per_gpu, the mean draw of a GPU with its share of the node",
        ),
        (
            ["plan.failures_per_1000_node_days=5", "plan.failure_logs=[a.txt]"],
            "plan.failures_per_1000_node_days=5: there are plan.failure_logs too; give one of them",
        ),
        (
            ["plan.checkpoint_seconds=1", "plan.checkpoint_stall_seconds=2"],
            "plan.checkpoint_stall_seconds=2: longer than the whole save, plan.checkpoint_seconds=1",
        ),
        (["plan.energy.pue=0.9"], "plan.energy.pue=0.9: must be >= 1"),
        (["plan.objective=speed"], "plan.objective=speed: must be one of time, cost, loss"),
        (["plan.token=1e9"], "plan.token=1e9: no key 'token'; did you mean 'tokens'?"),
    ],
)
def test_one_line_answers(overrides: list[str], answer: str) -> None:
    with pytest.raises(UserError) as caught:
        compose(overrides)
    assert str(caught.value) == answer


def test_no_price_and_no_energy_figure_has_a_default() -> None:
    plan = compose().plan
    prices = [name for name in vars(plan) if "price" in name]
    assert len(prices) == 2
    assert [getattr(plan, name) for name in prices] == [None, None]
    assert set(vars(plan.energy).values()) - {True} == {None}
    assert plan.storage.price_per_tib_month is None


def test_a_run_that_goes_on_may_have_other_goals(tmp_path: Path) -> None:
    run = f"run_dir={tmp_path / 'run'}"
    first = compose([run])
    prepare_run_directory(locate_run_directory(first), first)
    check_same_config(locate_run_directory(first), compose([run, "plan.tokens=1e9", "plan.deadline_days=3"]))
