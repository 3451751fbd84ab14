"""Steps with NaN or infinity, or marked bad: resume skips them, and retention does not count them."""

from __future__ import annotations

import errno
import logging
import math
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import State, alone, blank, holds, save_alone, sharded, whole
from faults import EVERY, at_call, fails

from hpc_train.checkpoint import (
    CheckpointError,
    Saver,
    list_committed_steps,
    mark_bad,
    prune_steps,
    resume_from_checkpoint,
    save_step,
    unmark_bad,
    verify_step,
)
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.storage.retention import KeepRules
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.complex64,
)
GOOD = {"w": torch.ones(3, 4), "optim.exp_avg.w": torch.zeros(3, 4), "n": torch.ones(2, dtype=torch.int64)}


def is_finite(directory: Path, step: int) -> bool:
    return read_manifest(directory / f"step-{step}", step).finite


def resumed_step(directory: Path) -> int | None:
    resumed = resume_from_checkpoint(directory, "auto", blank(whole(GOOD)), alone())
    return resumed.step if resumed else None


def test_each_step_that_auto_is_about_to_load_is_announced(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_alone(tmp_path, step, GOOD)
    mark_bad(tmp_path, 3, "its loss diverged")
    (damaged,) = (tmp_path / "step-2").glob("shards/*/*.h5")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    announced: list[int] = []
    for how in ("auto", "1"):
        resumed = resume_from_checkpoint(tmp_path, how, blank(whole(GOOD)), alone(), announced.append)
        assert resumed is not None
        assert (resumed.step, announced) == (1, [2, 1])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_element_of_any_type_is_seen(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    if value == math.inf and dtype is torch.float8_e4m3fn:
        value = math.nan  # it has no infinity
    bad = torch.ones(5, 7).to(dtype)
    save_alone(tmp_path, 1, {**GOOD, "x": bad})
    bad[3, 2] = value
    save_alone(tmp_path, 2, {**GOOD, "x": bad, "y": torch.ones(2)})
    assert (is_finite(tmp_path, 1), is_finite(tmp_path, 2)) == (True, False)
    assert verify_step(tmp_path, 2) == [], "it is what was saved"


@pytest.mark.parametrize("name", ["w", "optim.exp_avg.w"])
def test_parameters_and_moments_both_count(tmp_path: Path, name: str) -> None:
    save_alone(tmp_path, 1, {**GOOD, name: torch.full((3, 4), -math.inf).fill_diagonal_(1.0)})
    assert not is_finite(tmp_path, 1)


def test_what_only_looks_like_it(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -math.inf).triu(1)
    largest = torch.full((4,), torch.finfo(torch.float32).max)
    bits = torch.full((4,), -1, dtype=torch.int32)  # as a float: NaN
    save_alone(tmp_path, 1, {"mask": mask, "largest": largest, "bits": bits, "none": torch.zeros(0)})
    assert is_finite(tmp_path, 1)


def test_a_small_tensor_among_many_is_seen(tmp_path: Path) -> None:
    many = {f"w{n}": torch.ones(1 + n % 5, dtype=FLOATS[n % 4]) for n in range(200)}
    many["w100"][0] = math.nan
    save_alone(tmp_path, 1, many)
    assert not is_finite(tmp_path, 1)


def test_one_rank_that_has_it_is_enough(tmp_path: Path) -> None:
    bad = {"w": torch.arange(8.0)}
    bad["w"][7] = math.inf

    def save_both(world: World) -> None:
        save_step(tmp_path, 1, sharded({"w": torch.arange(8.0)}, 0, world.rank, world.size), {}, world).wait()
        save_step(tmp_path, 2, sharded(bad, 0, world.rank, world.size), {}, world).wait()

    run_ranks(save_both, 2)
    assert (is_finite(tmp_path, 1), is_finite(tmp_path, 2)) == (True, False)


def poisoned(directory: Path, step: int) -> None:
    """By what the training knows: the loss was NaN."""
    saver = Saver(directory, alone())
    saver.save(step, whole(GOOD), {}, finite=False)
    assert [saved.error for saved in saver.wait()] == [None]


def test_it_is_passed_over_with_a_warning_and_can_still_be_had_by_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_alone(tmp_path, 1, GOOD)
    poisoned(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        assert resumed_step(tmp_path) == 1
    assert "step 2" in caplog.text
    assert "NaN or infinity" in caplog.text
    assert holds(tmp_path, 2, GOOD)
    resumed = resume_from_checkpoint(tmp_path, "2", blank(whole(GOOD)), alone())
    assert resumed is not None
    assert resumed.step == 2


def test_if_all_are_it_says_so_and_does_not_start_over(tmp_path: Path) -> None:
    poisoned(tmp_path, 1)
    with pytest.raises(CheckpointError, match="damaged or no good") as error:
        resumed_step(tmp_path)
    assert "\n" not in str(error.value)


def test_all_ranks_pass_over_it(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, GOOD)
    poisoned(tmp_path, 2)

    def step_of(world: World) -> int | None:
        resumed = resume_from_checkpoint(tmp_path, "auto", blank(sharded(GOOD, 0, world.rank, world.size)), world)
        return resumed.step if resumed else None

    assert run_ranks(step_of, 2) == [1, 1]


def test_a_mark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2):
        save_alone(tmp_path, step, GOOD)
    mark_bad(tmp_path, 2, "the loss\nexploded")
    mark_bad(tmp_path, 2, "the loss exploded\nhere")
    with caplog.at_level(logging.WARNING):
        assert resumed_step(tmp_path) == 1
    assert "step 2 in" in caplog.text
    assert "marked bad: the loss exploded here" in caplog.text
    assert verify_step(tmp_path, 2) == []
    unmark_bad(tmp_path, 2)
    unmark_bad(tmp_path, 2)
    assert resumed_step(tmp_path) == 2
    with pytest.raises(UserError, match="step 7 is not in"):
        mark_bad(tmp_path, 7, "?")


def test_a_step_that_is_saved_anew_has_no_mark(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, GOOD)
    mark_bad(tmp_path, 1, "once")
    save_alone(tmp_path, 1, GOOD)
    assert resumed_step(tmp_path) == 1


def test_any_call_that_fails_leaves_a_mark_or_none(tmp_path: Path) -> None:
    number, made = 0, [""]
    for step in (1, 2):
        save_alone(tmp_path, step, GOOD)
    while len(made) >= number:
        number += 1
        with at_call(number, fails(errno.EIO), EVERY, tmp_path) as made:
            try:
                mark_bad(tmp_path, 2, "why")
                expected = {1}
            except (CheckpointError, OSError):
                expected = {1, 2}
        assert resumed_step(tmp_path) in expected
        unmark_bad(tmp_path, 2)
    assert number > 5


def test_a_mark_that_cannot_be_read_is_no_leave_to_go_on(tmp_path: Path) -> None:
    for step in (1, 2):
        save_alone(tmp_path, step, GOOD)
    mark_bad(tmp_path, 2, "why")
    with at_call(1, fails(errno.EIO), ("io.open",), tmp_path / "step-2" / "bad"):
        assert resumed_step(tmp_path) == 1


def test_retention_never_counts_them(tmp_path: Path) -> None:
    for step in (1, 2):
        save_alone(tmp_path, step, GOOD)
    for step in (3, 4):
        poisoned(tmp_path, step)
    assert prune_steps(tmp_path, keep=2) == [3], "the newest good ones stay, and the newest bad one, to be looked at"
    assert list_committed_steps(tmp_path) == [1, 2, 4]
    save_alone(tmp_path, 5, GOOD)
    assert prune_steps(tmp_path, keep=2) == [1, 4]


def test_nor_are_they_the_best_or_one_for_good(tmp_path: Path) -> None:
    saver = Saver(tmp_path, alone())
    for step, loss in ((10, 1.0), (20, 0.1), (30, 2.0)):
        saver.save(step, whole(GOOD), {}, finite=step != 20, validation_loss=loss)
        saver.wait()
    assert prune_steps(tmp_path, 1, KeepRules(every=20, best=1)) == [20]
    assert list_committed_steps(tmp_path) == [10, 30]


def test_state_with_specials_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """NaN payloads, negative zero, subnormals, infinities, and the largest value of every small format."""
    every: State = {str(d): torch.arange(256, dtype=torch.uint8).view(d) for d in FLOATS[4:6]}
    words = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    every |= {str(d): words.view(d) for d in (torch.float16, torch.bfloat16)}
    save_alone(tmp_path, 1, every)
    assert holds(tmp_path, 1, every)
    assert not is_finite(tmp_path, 1)
