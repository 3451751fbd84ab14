"""Run one rank of `bench step`: start as a run does, then time rounds of our step and of hand-written loops.

A side is an iterator over training steps that yields each step's loss, so that rounds of the sides can alternate.
step_result.py summarises the times.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_train.bench.rounds import WARM_UP_STEPS, Side, time_rounds, warm_up_side
from hpc_train.bench.step.step import StartupTimer
from hpc_train.bench.step.step_result import (
    REFERENCE_SIDE,
    TRACED_SIDE,
    UNRECORDED_SIDE,
    StepResult,
    summarise_step,
)
from hpc_train.config.run import RunConfig
from hpc_train.data.datasets import Dataset, Indices, require_indexed
from hpc_train.data.loader import compute_share
from hpc_train.data.sample_order import order_samples
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.materialise import materialise_parameters
from hpc_train.parallel.precision.number_formats import autocast_forward, cast_parameters
from hpc_train.parallel.user_model import require_one_input
from hpc_train.runtime.start import join, leave_process_group, start
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_engine, make_model, open_data
from hpc_train.training.loop import report_step
from hpc_train.training.optimizer import require_determinism
from hpc_train.training.rank import place_rank
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.run_directory import RunDirectory
from hpc_train.training.step import train_step
from hpc_train.training.training_run import TrainingRun

_LOSS_TOLERANCE = 0.05
"""Maximum relative difference of two first losses: dropout stays below it, another loss function does not."""


@contextmanager
def start_job(config: RunConfig, startup: StartupTimer) -> Iterator[tuple[World, RunDirectory]]:
    """Start this rank as a run does; yields its world and a temporary run directory."""
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    if config.train.deterministic:
        require_determinism()
    task = join(interface=config.cluster.fabric.interface, timeout=timedelta(seconds=config.launch.timeout_seconds))
    startup.mark("join")
    world = start(task, place_rank(config, task), config)
    startup.mark("process group")
    try:
        with tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as folder:
            yield world, RunDirectory(Path(folder), Path(folder))
    finally:
        leave_process_group()


def measure_step(config: RunConfig, rounds: int, steps: int, startup: StartupTimer) -> StepResult:
    """Measure on all ranks of this job; every rank returns the result. Raises UserError as a run would."""
    with start_job(config, startup) as (world, folder):
        return _measure(config, world, folder, rounds, steps, startup)


def _measure(
    config: RunConfig, world: World, folder: RunDirectory, rounds: int, steps: int, startup: StartupTimer
) -> StepResult:
    """Measure all sides on this rank, in rounds. startup: gets the time of each part of the start."""
    data = require_indexed(open_data(config, world))
    startup.mark("data")
    with assemble_bench_run(config, world, folder, data, startup) as run:
        train_step(run)
        startup.mark("first step")
    with ExitStack() as stack:
        # All sides see the same samples in the same order, so that their first losses can be compared.
        order = draw_sample_order(config, world, data, WARM_UP_STEPS + rounds * steps)
        by_hand = partial(hand_written_steps, data=data, order=order, config=config, world=world)
        sides = [
            *_make_our_sides(config, world, folder, data, stack),
            warm_up_side(REFERENCE_SIDE, lambda: by_hand(make_same_model(config, world), tuned=False)),
            warm_up_side("hand_written_tuned", lambda: by_hand(make_same_model(config, world), tuned=True)),
        ]
        if (trace := find_step_tracer()) is not None:
            sides.append(
                warm_up_side(TRACED_SIDE, lambda: by_hand(make_same_model(config, world), tuned=False, trace=trace))
            )
        _check_first_losses(sides, config)
        tokens = config.train.global_batch * data.tokens_per_sample
        return summarise_step(config, world, sides, time_rounds(sides, rounds, steps), tokens, steps, startup)


def _make_our_sides(
    config: RunConfig, world: World, folder: RunDirectory, data: Dataset, stack: ExitStack
) -> list[Side]:
    """Make the side of a run as it is, and if it records its steps, a side that does not."""

    def assemble(recorded: bool) -> TrainingRun:
        run = stack.enter_context(assemble_bench_run(config, world, folder, data))
        if recorded:
            file = folder.path / f"steps-node-{world.node}.bin"
            run.observers.recorder = StepRecorder(
                run.engine, world, run.observers.heartbeat, file, config.parallel.compile
            )
        return run

    if not config.train.record_steps:
        return [warm_up_side("hpc_train", lambda: run_our_steps(assemble(False)))]
    recorded: list[TrainingRun] = []

    def start_recorded() -> Iterator[float]:
        recorded.append(assemble(True))
        return run_our_steps(recorded[0])

    def start_plain() -> Iterator[float]:
        # Both sides share one process, and so the hooks of the recorder: they are taken off for a step of this side.
        steps, recorder = run_our_steps(assemble(False)), recorded[0].observers.recorder
        assert recorder is not None
        while True:
            with recorder.detached():
                loss = next(steps)
            yield loss

    return [warm_up_side("hpc_train", start_recorded), warm_up_side(UNRECORDED_SIDE, start_plain)]


@contextmanager
def assemble_bench_run(
    config: RunConfig, world: World, folder: RunDirectory, data: Dataset, startup: StartupTimer | None = None
) -> Iterator[TrainingRun]:
    """Assemble a run as `hpc-train train` does, with its output in a log file."""
    startup = startup or StartupTimer()
    with (folder.path / f"task-{world.rank}.log").open("a") as log, redirect_stdout(log):
        engine = make_engine(config, world, make_model(config))
        startup.mark("model and engine")
        run = assemble_run(config, world, folder, 0, StopRequest(), data, engine)
        startup.mark("loader and reports")
        try:
            yield run
        finally:
            run.close()


def make_same_model(config: RunConfig, world: World) -> nn.Module:
    """Build the module with the same initial values as the engine's."""
    model = cast_parameters(make_model(config), config.precision)
    materialise_parameters(model, {}, config.train.seed, world.device)
    return model.to(world.device)


def draw_sample_order(config: RunConfig, world: World, data: Dataset, steps: int) -> list[Indices]:
    """Return the sample indices of this rank for all steps."""
    batch, own_samples = config.train.global_batch, compute_share(config.train.global_batch, world.dp_size)
    first = world.dp_index * own_samples
    return [order_samples(config.train.seed, len(data), step * batch + first, own_samples) for step in range(steps)]


def _check_first_losses(sides: list[Side], config: RunConfig) -> None:
    losses = {side.name: side.first_loss for side in sides}
    own_loss, reference_loss = losses["hpc_train"], losses[REFERENCE_SIDE]
    if not abs(own_loss - reference_loss) <= _LOSS_TOLERANCE * abs(reference_loss):
        raise UserError(
            f"model={config.model.name}: its first loss is {own_loss:.6g}, its cross entropy {reference_loss:.6g}; "
            "bench step compares models whose loss is the cross entropy of what they return"
        )


def run_our_steps(run: TrainingRun) -> Iterator[float]:
    """Run the steps of `hpc-train train`, without evaluation and checkpoints."""
    while True:
        step = train_step(run)
        report_step(run, step, None)
        loss: float = step.record["loss"]
        yield loss


StepTracer = Callable[[nn.Module], AbstractContextManager[Any]]
"""Traces the step that runs inside of what it returns."""


def find_step_tracer() -> StepTracer | None:
    """Return TraceML's tracer of steps if `traceml run` started this rank, and None if not."""
    if "traceml_ai.runtime" not in sys.modules:
        return None
    traceml = import_module("traceml_ai")
    traceml.init(mode="auto")
    tracer: StepTracer = traceml.trace_step
    return tracer


def hand_written_steps(
    model: nn.Module,
    data: Dataset,
    order: Iterable[Indices],
    config: RunConfig,
    world: World,
    tuned: bool,
    trace: StepTracer = nullcontext,
) -> Iterator[float]:
    """Run the shortest loop in plain PyTorch; yields the loss of this rank's share.

    model: on its device. order: this rank's samples of each step. tuned: add the two arguments that PyTorch's tuning
    guide recommends. trace: what each step runs inside of.
    """
    if world.size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=tuned)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, fused=tuned or None)
    for indices in order:
        with trace(model):
            inputs, targets = data.get(indices)
            inputs = require_one_input(inputs, "bench step", "the plain loop takes one")
            loss = _accumulate(model, inputs.to(world.device), targets.to(world.device), config)
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.max_norm or float("inf"))
            optimizer.step()
            optimizer.zero_grad()
            # Read inside the trace: on a GPU this waits for the step.
            value = loss.item()
        yield value


def _accumulate(model: nn.Module, inputs: Tensor, targets: Tensor, config: RunConfig) -> Tensor:
    """Run forward and backward of one step; returns the mean loss."""
    total = torch.zeros((), device=targets.device)
    cuts = range(0, len(targets), config.train.micro_batch)
    for cut in cuts:
        x, y = (tensor[cut : cut + config.train.micro_batch] for tensor in (inputs, targets))
        last = cut == cuts[-1]
        # DDP reduces in the backward of the last micro-batch only, as any tuned loop does.
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            with autocast_forward(config.precision, y.device):
                loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten()) * (len(y) / len(targets))
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total
