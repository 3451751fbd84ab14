"""A run that is stopped and resumed is, bit by bit, the run that was never stopped."""

from pathlib import Path

import pytest
from drawn import draw
from training_runs import assert_same_bits, metrics, run, small

from hpc_train.errors import EXIT_DONE, EXIT_NO_REQUEUE, EXIT_REQUEUE, UserError
from hpc_train.testing import RankFailure

COLUMNS = ("step", "loss", "grad_norm", "lr", "tokens", "noise_scale")
RANDOM = ("model.dropout=0.1", "train.noise_scale.every=1")


@pytest.mark.parametrize("parallel", draw(("ddp", "fsdp"), ("fsdp",)))
def test_with_dropout_a_resumed_run_is_bit_identical(store: Path, tmp_path: Path, parallel: str) -> None:
    straight, stopped = (small(store, tmp_path / name, f"parallel={parallel}", *RANDOM) for name in ("one", "two"))
    whole = run(straight)
    assert {(rank.code, rank.step) for rank in whole} == {(EXIT_DONE, 6)}
    part = run(stopped, asked={1: 3})
    assert {(rank.code, rank.step) for rank in part} == {(EXIT_REQUEUE, 3)}, "one rank was asked, both agree"
    rest = run(stopped)
    assert {(rank.code, rank.step) for rank in rest} == {(EXIT_DONE, 6)}
    assert_same_bits(whole, rest)
    assert metrics(stopped, *COLUMNS) == metrics(straight, *COLUMNS)
    assert [step for (step,) in metrics(stopped, "step")] == [1, 2, 3, 4, 5, 6]


def test_dropout_does_something(store: Path, tmp_path: Path) -> None:
    with_dropout, without = small(store, tmp_path / "a", *RANDOM), small(store, tmp_path / "b", *RANDOM[1:])
    run(with_dropout)
    run(without)
    assert metrics(with_dropout, "loss") != metrics(without, "loss")


def test_a_stop_in_the_last_step_is_the_end(store: Path, tmp_path: Path) -> None:
    assert [rank.code for rank in run(small(store, tmp_path), asked={0: 6})] == [EXIT_DONE] * 2


def test_a_stop_that_saves_nothing_is_not_requeued(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path, "checkpoint.every=0")
    assert [rank.code for rank in run(config, asked={0: 2})] == [EXIT_NO_REQUEUE] * 2
    assert not (tmp_path / "checkpoints").exists()


def test_deterministic_mode_trains_and_repeats_itself(store: Path, tmp_path: Path) -> None:
    one, two = (small(store, tmp_path / name, "train.deterministic=true", *RANDOM) for name in ("one", "two"))
    assert_same_bits(run(one), run(two))


def test_a_run_whose_checkpoints_are_gone_does_not_start_over(store: Path, tmp_path: Path) -> None:
    """As where their file system is not mounted. What the run has recorded stays."""
    config, again = (small(store, tmp_path / "run", f"checkpoint.resume={how}") for how in ("auto", "never"))
    run(config, ranks=1, asked={0: 3})
    steps = metrics(config, "step")
    (tmp_path / "run/checkpoints").rename(tmp_path / "elsewhere")
    gone = "no checkpoint is there, and the run has saved step 3"
    with pytest.raises(UserError, match=gone):
        run(config, ranks=1)
    assert not (tmp_path / "run/checkpoints").exists(), "they can be moved back"
    with pytest.raises(RankFailure, match=gone):  # on the nodes of a job they may be gone since then
        run(config, ranks=1, prepared=True)
    assert metrics(config, "step") == steps
    assert {rank.code for rank in run(again, ranks=1)} == {EXIT_DONE}
