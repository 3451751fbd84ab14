"""Whole runs on several ranks: what they return and what they leave in their directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_engine, make_model, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.optimizer import require_determinism
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import RunDirectory, locate_run_directory, make_attempt, prepare_run_directory
from hpc_train.training.training_run import TrainingRun

SMALL = (
    "data=text",
    "data.validation_fraction=0.2",
    "model.layers=2",
    "model.hidden=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.feed_forward=48",
    "train.sequence_length=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.steps=6",
    "train.eval_every=0",
    "train.eval_batches=3",
    "train.tensorboard=false",
    "optim.schedule.warmup_steps=2",
)


@dataclass
class AskedAtLook(StopRequest):
    """Asks to stop when the training loop looks for the `look`-th time; 0: never."""

    look: int = 0

    @property
    def requested(self) -> bool:
        self.look -= 1
        if self.look == 0:
            self.ask("SIGTERM")
        return self.signal_name is not None


@dataclass(frozen=True)
class Ended:
    """One rank of a run that has ended."""

    code: int
    step: int
    state: dict[str, npt.NDArray[Any]]
    """This rank's part of parameters and optimizer state."""


def small(store: Path | None, run_dir: Path, *overrides: str) -> RunConfig:
    """Return a run of six steps of a tiny model. store: its data; None: the overrides name it."""
    data = [f"data.path={store}"] if store else []
    return compose([*SMALL, *data, f"run_dir={run_dir}", *overrides])


def run(
    config: RunConfig, ranks: int = 2, asked: dict[int, int] | None = None, *, prepared: bool = False
) -> list[Ended]:
    """Run on `ranks` ranks. asked: rank -> the look at which it is asked to stop. prepared: the run directory is."""
    folder = locate_run_directory(config)
    if not prepared:
        prepare_run_directory(folder, config)
    return run_ranks(_rank, ranks, config, folder, make_attempt(folder), asked or {}, parallel=config.parallel)


def _rank(world: World, config: RunConfig, folder: RunDirectory, attempt: int, asked: dict[int, int]) -> Ended:
    if config.train.deterministic:
        require_determinism()
    engine = make_engine(config, world, make_model(config))
    stop = AskedAtLook(look=asked.get(world.rank, 0))
    run = assemble_run(config, world, folder, attempt, stop, open_data(config, world), engine)
    code = run_training(run)
    for loader in (run.loader, run.validation):
        if loader is not None:
            loader.close()
    run.reporter.close()
    return Ended(code, run.step, {piece.name: piece.local.numpy().copy() for piece in engine.shards()})


def with_run(config: RunConfig, act: Callable[[TrainingRun], Any], ranks: int = 2) -> list[Any]:
    """Assemble a run on some ranks and call a function with it."""

    def rank(world: World, folder: RunDirectory) -> Any:
        engine = make_engine(config, world, make_model(config))
        assembled = assemble_run(config, world, folder, 0, StopRequest(), open_data(config, world), engine)
        try:
            return act(assembled)
        finally:
            assembled.close()

    folder = locate_run_directory(config)
    prepare_run_directory(folder, config)
    folder.logs(0).mkdir(parents=True, exist_ok=True)
    return run_ranks(rank, ranks, folder, parallel=config.parallel)


def metrics(config: RunConfig, *keys: str) -> list[tuple[Any, ...]]:
    """Return these columns of metrics.jsonl."""
    return [tuple(record.get(key) for key in keys) for record in read_metrics(locate_run_directory(config).metrics)]


def assert_same_bits(one: list[Ended], other: list[Ended]) -> None:
    """Check that all ranks hold the same parameters and optimizer state."""
    for a, b in zip(one, other, strict=True):
        assert a.state.keys() == b.state.keys()
        for name in a.state:
            np.testing.assert_array_equal(a.state[name], b.state[name], err_msg=name)
