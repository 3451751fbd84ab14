"""What a run does about its checkpoints: those under way when it fails, poisoned ones, and which of them stay."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from training_runs import run, small

from hpc_train.api import World
from hpc_train.checkpoint import committed, verify
from hpc_train.checkpoint.manifest import read
from hpc_train.config.run import RunConfig
from hpc_train.runtime.stop import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.folder import RunFolder, open_folder, prepare
from hpc_train.training.loop import Run, train
from hpc_train.training.rank import assemble, make_engine, make_model, open_data

_fsync = os.fsync


def slow_fsync(descriptor: int) -> None:
    time.sleep(0.05)
    _fsync(descriptor)


def with_run(config: RunConfig, act: Callable[[Run], Any], ranks: int = 2) -> list[Any]:
    """Assemble a run on some ranks and do something with it."""

    def rank(world: World, folder: RunFolder) -> Any:
        engine = make_engine(config, world, make_model(config))
        assembled = assemble(config, world, folder, 0, StopRequest(), open_data(config, world), engine)
        try:
            return act(assembled)
        finally:
            assembled.close()

    folder = open_folder(config)
    prepare(folder, config)
    folder.logs(0).mkdir(parents=True, exist_ok=True)
    return run_ranks(rank, ranks, folder, parallel=config.parallel)


def test_a_save_under_way_when_the_training_fails_is_committed(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path / "run", "checkpoint.every=3")

    def fail_in_step_four(it: Run) -> str:
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
            train(it)
        return str(it.saved_at)

    assert with_run(config, fail_in_step_four) == ["3", "3"]
    assert committed(tmp_path / "run" / "checkpoints") == [3]
    assert verify(tmp_path / "run" / "checkpoints", 3) == []


def test_an_update_from_an_infinite_gradient_flags_the_next_save_and_no_other(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path / "run", "checkpoint.every=2", "checkpoint.keep=9")

    def infinite_in_step_three(it: Run) -> int:
        clip = it.engine.clip

        def infinite(limit: float | None) -> torch.Tensor:
            norm = clip(limit)
            return norm * math.inf if it.step == 2 else norm

        with patch.object(it.engine, "clip", infinite):
            return train(it)

    assert with_run(config, infinite_in_step_three) == [0, 0]
    steps = {step: read(tmp_path / f"run/checkpoints/step-{step}", step).finite for step in (2, 4, 6)}
    assert steps == {2: True, 4: False, 6: True}


def test_parameters_that_are_nan_are_never_gone_on_from(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path / "run", "checkpoint.every=2", "train.steps=4")
    run(small(store, tmp_path / "run", "checkpoint.every=2", "train.steps=2"))

    def poison(it: Run) -> int:
        with torch.no_grad():
            next(iter(it.engine.pieces())).local.fill_(math.nan)
        return train(it)

    assert with_run(config, poison) == [0, 0]
    assert committed(tmp_path / "run/checkpoints") == [2, 4]
    assert with_run(config, lambda it: it.step) == [2, 2]


def test_what_the_settings_of_retention_keep(store: Path, tmp_path: Path) -> None:
    settings = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_every=4", "train.eval_every=1")
    run(small(store, tmp_path / "run", *settings, "train.steps=3", "checkpoint.keep_every=0"))
    assert committed(tmp_path / "run/checkpoints") == [3]
    run(small(store, tmp_path / "run", *settings, "train.steps=7", "checkpoint.keep_best=1"))
    # 3: it went on from it; 4: every fourth; 7: the newest, and the best so far
    assert committed(tmp_path / "run/checkpoints") == [3, 4, 7]
    losses = [read(tmp_path / f"run/checkpoints/step-{n}", n).validation_loss for n in (4, 7)]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[1] < losses[0]
