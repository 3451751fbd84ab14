"""What a run does about its checkpoints: those under way when it fails, poisoned ones, and which of them stay."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from training_runs import run, small, with_run

from hpc_train.checkpoint import list_committed_steps, verify_step
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.training.completion import find_shortfall
from hpc_train.training.loop import run_training
from hpc_train.training.training_run import TrainingRun

_fsync = os.fsync


def slow_fsync(descriptor: int) -> None:
    time.sleep(0.05)
    _fsync(descriptor)


def test_a_save_under_way_when_the_training_fails_is_committed(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path / "run", "checkpoint.every=3")

    def fail_in_step_four(it: TrainingRun) -> str:
        batch = it.loader.batch

        def broken(consumed: int) -> Any:
            if consumed >= 3 * config.train.global_batch:
                raise RuntimeError("the data is gone")
            return batch(consumed)

        with (
            patch.object(os, "fsync", slow_fsync),
            patch.object(it.loader, "batch", broken),
            pytest.raises(RuntimeError, match="the data is gone"),
        ):
            run_training(it)
        return str(it.saves.saved_at)

    assert with_run(config, fail_in_step_four) == ["3", "3"]
    assert list_committed_steps(tmp_path / "run" / "checkpoints") == [3]
    assert verify_step(tmp_path / "run" / "checkpoints", 3) == []


def test_an_update_from_an_infinite_gradient_flags_the_next_save_and_no_other(store: Path, tmp_path: Path) -> None:
    made = "resilience.numbers.skip_nonfinite=false"
    config = small(store, tmp_path / "run", "checkpoint.every=2", "checkpoint.keep=9", made)

    def infinite_in_step_three(it: TrainingRun) -> int:
        clip = it.engine.clip

        def infinite(limit: float | None) -> torch.Tensor:
            norm = clip(limit)
            return norm * math.inf if it.step == 2 else norm

        with patch.object(it.engine, "clip", infinite):
            return run_training(it)

    assert with_run(config, infinite_in_step_three) == [0, 0]
    steps = {step: read_manifest(tmp_path / f"run/checkpoints/step-{step}", step).finite for step in (2, 4, 6)}
    assert steps == {2: True, 4: False, 6: True}


def test_parameters_that_are_nan_are_never_gone_on_from(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path / "run", "checkpoint.every=2", "train.steps=4")
    run(small(store, tmp_path / "run", "checkpoint.every=2", "train.steps=2"))

    def poison(it: TrainingRun) -> int:
        with torch.no_grad():
            next(iter(it.engine.shards())).local.fill_(math.nan)
        return run_training(it)

    assert with_run(config, poison) == [0, 0]
    assert list_committed_steps(tmp_path / "run/checkpoints") == [2, 4]
    assert with_run(config, lambda it: it.step) == [2, 2]


def test_what_the_settings_of_retention_keep(store: Path, tmp_path: Path) -> None:
    # A save that has ended when copies of parameters are compared stays, too: a matter of time, so nothing is compared.
    settings = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=4", "train.eval_every=1")
    settings = (*settings, "resilience.numbers.compare_every=0")
    run(small(store, tmp_path / "run", *settings, "train.steps=3", "checkpoint.keep_every=0"))
    assert list_committed_steps(tmp_path / "run/checkpoints") == [3]
    run(small(store, tmp_path / "run", *settings, "train.steps=7", "checkpoint.keep_best=1"))
    # 3: it went on from it; 4: every fourth; 7: the newest, and the best so far
    assert list_committed_steps(tmp_path / "run/checkpoints") == [3, 4, 7]
    losses = [read_manifest(tmp_path / f"run/checkpoints/step-{n}", n).validation_loss for n in (4, 7)]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[1] < losses[0]


def test_checkpoints_with_nan_do_not_fill_the_disk_and_the_good_ones_stay(store: Path, tmp_path: Path) -> None:
    """Also with fewer good checkpoints than checkpoint.keep, and with none."""
    run(small(store, tmp_path / "run", "checkpoint.every=1", "train.steps=2", "checkpoint.keep=3"))

    def poison(it: TrainingRun) -> int:
        with torch.no_grad():
            next(iter(it.engine.shards())).local.fill_(math.nan)
        return run_training(it)

    lost = ("checkpoint.every=1", "checkpoint.keep=3", "checkpoint.background=false", "train.steps=6")
    assert with_run(small(store, tmp_path / "run", *lost), poison) == [0, 0]
    assert list_committed_steps(tmp_path / "run/checkpoints") == [1, 2, 6]
    assert with_run(small(store, tmp_path / "other", *lost), poison, ranks=1) == [0]
    assert list_committed_steps(tmp_path / "other/checkpoints") == [6]


def test_what_is_not_done_after_the_last_step(store: Path, tmp_path: Path) -> None:
    def shortfall(change: Callable[[TrainingRun], Any]) -> Callable[[TrainingRun], str]:
        def act(it: TrainingRun) -> str:
            change(it)
            assert run_training(it) == 0
            return find_shortfall(it) or ""

        return act

    def spoil(value: float, index: int) -> Callable[[TrainingRun], Any]:
        """Replace the gradient norm of one step, as the loop sees it."""

        def change(it: TrainingRun) -> None:
            clip = it.engine.clip
            it.engine.clip = lambda limit: clip(limit) * value if it.step == index else clip(limit)  # type: ignore[method-assign]

        return change

    def case(name: str, change: Callable[[TrainingRun], Any], *overrides: str, ranks: int = 1) -> set[str]:
        return set(with_run(small(store, tmp_path / name, *overrides), shortfall(change), ranks))

    def no_room(it: TrainingRun) -> None:
        """Fill the disk from the last step on."""
        update = it.engine.update

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def fill(lr: float) -> bool:
            os.fsync = full if it.step == 5 else _fsync
            return update(lr)

        it.engine.update = fill  # type: ignore[method-assign]

    assert case("sound", lambda it: None, "checkpoint.every=4") == {""}
    assert case("recovered", spoil(math.inf, 2), "checkpoint.every=0") == {""}
    (lost,) = case("lost", spoil(math.nan, 5), "checkpoint.every=0", ranks=2)
    assert lost.startswith("not done: the loss or its gradient is not finite at the last step (6), and since step 6")
    (unsaved,) = case("unsaved", no_room, "checkpoint.every=4", "checkpoint.background=false", ranks=2)
    assert unsaved.startswith("not done: step 6, the last, was not saved (the newest saved is of step 4): ")
    assert os.strerror(errno.ENOSPC) in unsaved
    assert case("never", no_room, "checkpoint.every=0") == {""}
