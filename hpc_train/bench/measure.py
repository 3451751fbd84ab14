"""One rank of `bench step`: start as a run does, then take rounds of our step and of the hand-written loops."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import nn

from hpc_train.api import World
from hpc_train.bench.result import CONTRACT, Result, summarise
from hpc_train.bench.rounds import WARM_UP, Side, begin, take_rounds
from hpc_train.bench.sides import hand_written, hpc_train
from hpc_train.bench.startup import StartUp
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, Indices
from hpc_train.data.loader import share
from hpc_train.data.order import samples
from hpc_train.errors import UserError
from hpc_train.parallel.materialise import materialise
from hpc_train.parallel.precision import keep_parameters
from hpc_train.runtime.start import join, shut_down, start
from hpc_train.runtime.stop import StopRequest
from hpc_train.training.folder import RunFolder
from hpc_train.training.loop import Run, train_step
from hpc_train.training.rank import assemble, make_engine, make_model, open_data, place
from hpc_train.training.seeds import be_deterministic

_ALIKE = 0.05
"""Relative difference of two first losses that dropout explains and another loss function does not."""


@contextmanager
def started(config: RunConfig, startup: StartUp) -> Iterator[tuple[World, RunFolder]]:
    """This rank as a run starts it, and a folder that is gone afterwards."""
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    if config.train.deterministic:
        be_deterministic()
    task = join(interface=config.cluster.fabric.interface, timeout=timedelta(seconds=config.launch.timeout_seconds))
    startup.mark("join")
    world = start(task, place(config, task), config)
    startup.mark("process group")
    try:
        with tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as folder:
            yield world, RunFolder(Path(folder), Path(folder))
    finally:
        shut_down()


def measure(config: RunConfig, rounds: int, steps: int, startup: StartUp) -> Result:
    """Measure on all ranks of this job; every rank gets the result. Raises UserError as a run would."""
    with started(config, startup) as (world, folder):
        return _measure(config, world, folder, rounds, steps, startup)


def _measure(config: RunConfig, world: World, folder: RunFolder, rounds: int, steps: int, startup: StartUp) -> Result:
    data = open_data(config, world)
    startup.mark("data")
    with assembled(config, world, folder, data, startup) as run:
        train_step(run)
        startup.mark("first step")
    with ExitStack() as stack:
        order = sample_order(config, world, data, WARM_UP + rounds * steps)
        by_hand = partial(hand_written, data=data, order=order, config=config, world=world)
        sides = [
            begin("hpc_train", lambda: hpc_train(stack.enter_context(assembled(config, world, folder, data)))),
            begin(CONTRACT, lambda: by_hand(same_model(config, world), tuned=False)),
            begin("hand_written_tuned", lambda: by_hand(same_model(config, world), tuned=True)),
        ]
        _check_alike(sides, config)
        tokens = config.train.global_batch * data.tokens_per_sample
        return summarise(config, world, sides, take_rounds(sides, rounds, steps), tokens, steps, startup)


@contextmanager
def assembled(
    config: RunConfig, world: World, folder: RunFolder, data: Dataset, startup: StartUp | None = None
) -> Iterator[Run]:
    """A run as `hpc-train train` makes it; its words go to a file, as those of a rank do there."""
    startup = startup or StartUp()
    with (folder.path / f"task-{world.rank}.log").open("a") as log, redirect_stdout(log):
        engine = make_engine(config, world, make_model(config))
        startup.mark("model and engine")
        run = assemble(config, world, folder, 0, StopRequest(), data, engine)
        startup.mark("loader and reports")
        try:
            yield run
        finally:
            run.loader.close()
            run.reporter.close()


def same_model(config: RunConfig, world: World) -> nn.Module:
    """The same module with the same initial values as the engine's."""
    model = keep_parameters(make_model(config), config.precision)
    materialise(model, {}, config.train.seed, world.device)
    return model.to(world.device)


def sample_order(config: RunConfig, world: World, data: Dataset, steps: int) -> list[Indices]:
    """The samples that the loader gives this rank in each step, drawn beforehand."""
    batch, mine = config.train.global_batch, share(config.train.global_batch, world.dp_size)
    first = world.dp_index * mine
    return [samples(config.train.seed, len(data), step * batch + first, mine) for step in range(steps)]


def _check_alike(sides: list[Side], config: RunConfig) -> None:
    ours, theirs = sides[0].first_loss, sides[1].first_loss
    if not abs(ours - theirs) <= _ALIKE * abs(theirs):
        raise UserError(
            f"model={config.model.name}: its first loss is {ours:.6g}, its cross entropy {theirs:.6g}; bench step "
            "compares models whose loss is the cross entropy of what they return"
        )
