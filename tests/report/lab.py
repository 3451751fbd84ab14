"""Train small models with a lasting fault and look at the report's verdict: together they form the confusion matrix.

A cell is a layout and a fault. Its ranks are real processes with real collectives. The length of a fault is given in
steps of the same run before the fault, so that it is as large on a busy machine as on a quiet one. Cells with a thin
link run in a network namespace whose loopback device the kernel limits (tbf). All ranks are forked from a process that
has torch loaded and nothing else, and have priority over other work of the machine where that is allowed, because other
work would look like a fault.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which every rank would import by itself
from torch import Tensor

from hpc_train.checkpoint.save import save_step
from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.launch.slurm.slurm_cli import run_client
from hpc_train.launch.state.run_lookup import RunPoint
from hpc_train.report.run_summary import summarise_run
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_engine, make_model, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.records.recorder import StepRecorder
from hpc_train.training.run_directory import RunDirectory, locate_run_directory, make_attempt, prepare_run_directory
from hpc_train.training.training_run import TrainingRun

RANKS, STEPS, CALM_STEPS = 4, 13, 4
"""A verdict needs ten recorded steps to see memory grow, and the fault in most of them. Two steps warm up."""
LINK_RATE = "400mbit"
_PRIORITY = -15
_CLONE_NEWNET = 0x40000000  # of sched.h; os.unshare comes with Python 3.12
BASE = (
    "data=text",
    "model.layers=2",
    "model.hidden=128",
    "model.heads=4",
    "model.kv_heads=4",
    "model.feed_forward=384",
    "train.sequence_length=128",
    "train.global_batch=16",
    "train.micro_batch=4",
    f"train.steps={STEPS}",
    "train.eval_every=0",
    "train.noise_scale.every=0",
    "train.tensorboard=false",
    "checkpoint.every=0",
)
LARGE = ("train.global_batch=32", "train.micro_batch=8")
"""More work between two collectives: without it, what shared memory costs is a fault of its own."""
WIDE = ("model.hidden=320", "model.feed_forward=1280", "train.global_batch=8", "train.micro_batch=4")
"""The same for tensor parallelism, whose exchanges grow with the batch as its products do."""
LAYOUTS = {
    "ddp": (),
    "fsdp": ("parallel.strategy=zero3", *LARGE),
    "hsdp": ("parallel.strategy=zero3", "parallel.dp_replicate=2", "parallel.dp_shard=2", *LARGE),
    "tp": ("parallel.tp=2", "parallel.strategy=zero1", *WIDE),
    "pp": ("parallel.pp=2", "parallel.strategy=zero1", "train.global_batch=32", "train.micro_batch=2"),
}
COSTS = {"tp": "network"}
"""What a layout costs by itself: over gloo tensor parallelism spends a quarter of a step in collectives."""
FAULTS = {
    "none": "compute",
    "input": "input",
    "input_one": "input",
    "delay": "straggler",
    "busy": "straggler",
    "link": "network",
    "small": "launch",
    "memory": "memory",
    "save": "checkpoint",
    "input_and_delay": "input",
    "delay_and_input": "straggler",
    "sometimes": "straggler",
    "in_turn": "imbalance",
}
"""Fault -> the class that has to be named."""
NAMES_RANK = ("input_one", "delay", "busy", "memory", "delay_and_input", "sometimes")
"""Faults of one rank, which has to be named."""
QUIET = frozenset({"compute", "balanced"})
"""Classes that name no cause."""


@dataclass(frozen=True)
class Outcome:
    """The report's verdict on a cell."""

    layout: str
    fault: str
    rank: int | None
    """The rank with the fault; None: all."""
    name: str
    ranks: tuple[int, ...]
    share: float | None
    line: str
    right: bool


def run_cell(layout: str, fault: str, seed: int, store: Path, folder: Path) -> Outcome:
    """Train a cell and let the report judge it."""
    chooser = random.Random(f"{layout} {fault} {seed}")
    ranks = 2 if fault == "busy" and layout != "hsdp" else RANKS
    rank = chooser.randrange(ranks) if fault in (*NAMES_RANK, "input_and_delay") else None
    run_dir = folder / f"{layout}-{fault}-{seed}"
    config = compose([*BASE, f"data.path={store}", *LAYOUTS[layout], *_settings(layout, fault), f"run_dir={run_dir}"])
    directory = locate_run_directory(config)
    prepare_run_directory(directory, config)
    entries = [{"rank": each, "process": each, "host": f"node{each // 2 + 1}"} for each in range(ranks)]
    (run_dir / "rankmap.json").write_text(json.dumps({"ranks": entries}))
    run_ranks(_rank, ranks, config, directory, make_attempt(directory), fault, rank, parallel=config.parallel)
    verdict = summarise_run(RunPoint(run_dir.name, run_dir), run_client).verdict
    named = set(verdict.ranks)
    if fault == "none":
        right = verdict.name in QUIET or verdict.name == COSTS.get(layout)
    else:
        right = verdict.name == FAULTS[fault] and named == _find_slowed(fault, rank, ranks)
    return Outcome(layout, fault, rank, verdict.name, verdict.ranks, verdict.share_lost, verdict.line, right)


def _core_of(rank: int) -> int:
    return rank % (os.cpu_count() or 1)


def _find_slowed(fault: str, rank: int | None, ranks: int) -> set[int]:
    """Return the ranks that the report has to name: of a busy core all that run on it."""
    if rank is None or fault not in NAMES_RANK:
        return set()
    return {each for each in range(ranks) if _core_of(each) == _core_of(rank)} if fault == "busy" else {rank}


def _settings(layout: str, fault: str) -> tuple[str, ...]:
    if fault == "small":
        return (
            "train.sequence_length=8",
            "model.layers=4",
            "model.hidden=16",
            "model.feed_forward=32",
            # With two micro-batches a third of the pipeline would be idle, which is a fault of its own.
            f"train.global_batch={32 if layout == 'pp' else 4}",
            "train.micro_batch=1",
        )
    if fault == "save":
        return ("checkpoint.every=3", "checkpoint.background=false", "checkpoint.keep=1")
    if fault == "none" and layout == "ddp":
        return LARGE  # or the reduction of gradients takes a fifth of a step
    if fault == "none" and layout in ("fsdp", "hsdp"):
        return ("train.global_batch=96", "train.micro_batch=24")  # or gathering parameters takes a fifth of a step
    if fault == "none" and layout == "pp":
        return ("model.layers=4",)  # or one stage is a third longer
    return ()


def _rank(world: World, config: RunConfig, directory: RunDirectory, attempt: int, fault: str, rank: int | None) -> None:
    os.sched_setaffinity(0, {_core_of(world.rank)})
    engine = make_engine(config, world, make_model(config))
    run = assemble_run(config, world, directory, attempt, StopRequest(), open_data(config, world), engine)
    run.observers.recorder = StepRecorder(
        engine, world, run.observers.heartbeat, directory.step_records(attempt, world.rank // 2), False
    )
    trouble = Trouble(run, fault, world.rank, rank is None or rank == world.rank)
    try:
        run_training(run)
    finally:
        trouble.end()
        run.close()


class Leak:
    """Memory that a rank gains, 16 MiB at a time.

    The pages exist from the beginning and only become part of the process: making new ones takes 50 ms for 16 MiB on
    some virtual machines, which would be a fault of its own.
    """

    _BYTES = 16 << 20

    def __init__(self) -> None:
        self._file = os.memfd_create("leak")
        os.posix_fallocate(self._file, 0, STEPS * self._BYTES)
        self._gained: list[mmap.mmap] = []

    def grow(self) -> None:
        offset = len(self._gained) * self._BYTES
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._gained.append(mmap.mmap(self._file, self._BYTES, flags, offset=offset))


class Trouble:
    """Makes the fault of a cell on one rank, from CALM_STEPS on."""

    def __init__(self, run: TrainingRun, fault: str, rank: int, mine: bool) -> None:
        self._run, self._fault, self._rank, self._hogs = run, fault, rank, list[subprocess.Popen[bytes]]()
        self._leak = Leak() if fault == "memory" and mine else None
        self._starts: list[float] = []
        self._data = self._delay = self._save = 0.0
        match fault:
            case "input":
                self._data = 0.6
            case "input_one" if mine:
                self._data = 0.8
            case "delay" if mine:
                self._delay = 0.8
            case "sometimes" if mine:
                self._delay = 1.6
            case "in_turn":
                self._delay = 0.8
            case "save":
                self._save = 3.0
            case "input_and_delay":
                self._data, self._delay = 1.2, 0.5 if mine else 0.0
            case "delay_and_input":
                self._data, self._delay = 0.5, 1.5 if mine else 0.0
        self._busy = fault == "busy" and mine
        inner: Callable[..., Any] = run.loader.batch

        def batch(first: int) -> Any:
            self._begin_step()
            time.sleep(self._data * self.unit)
            return inner(first)

        run.loader.batch = batch  # type: ignore[method-assign]
        write = save_step.write_shard

        def write_shard(*arguments: Any) -> Any:
            time.sleep(self._save * self.unit)
            return write(*arguments)

        save_step.write_shard = write_shard
        if self._delay:
            run.engine.parts[0].register_forward_hook(self._delay_backward)
        self._slept_in = -1

    @property
    def unit(self) -> float:
        """Return the seconds of a step before the fault; 0 before it is known, so that no fault is made yet."""
        if len(self._starts) <= CALM_STEPS:
            return 0.0
        steps = sorted(b - a for a, b in zip(self._starts[1:CALM_STEPS], self._starts[2 : CALM_STEPS + 1], strict=True))
        return steps[len(steps) // 2]

    def end(self) -> None:
        for hog in self._hogs:
            hog.kill()
            hog.wait()

    def _begin_step(self) -> None:
        self._starts.append(time.perf_counter())
        if self._leak is not None:
            self._leak.grow()
        if self._busy and not self._hogs and len(self._starts) > CALM_STEPS:
            self._hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]

    def _is_late(self) -> bool:
        """Whether this rank's delay comes in this step."""
        match self._fault:
            case "sometimes":
                return self._run.step % 3 == 0
            case "in_turn":
                return random.Random(self._run.step).randrange(RANKS) == self._rank
        return True

    def _delay_backward(self, part: torch.nn.Module, inputs: Any, output: Tensor) -> None:
        def sleep(gradient: Tensor) -> None:
            if self._slept_in != self._run.step:  # once per step
                self._slept_in = self._run.step
                time.sleep(self._delay * self.unit * self._is_late())

        if output.requires_grad:
            output.register_hook(sleep)


def limit_loopback(rate: str) -> None:
    """Limit the loopback device of this network namespace."""
    for words in (
        ("ip", "link", "set", "lo", "up"),
        ("tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms"),
    ):
        subprocess.run(words, check=True)


def run_cells(cells: list[tuple[str, str, int]], store: Path, folder: Path) -> list[Outcome]:
    """Run cells in a process of their own; those with a thin link in a network namespace with one."""
    found: list[Outcome] = []
    for thin in (False, True):
        chosen = [cell for cell in cells if (cell[1] == "link") == thin]
        if chosen:
            found += _run_in_child(chosen, thin, store, folder)
    return found


def _run_in_child(cells: list[tuple[str, str, int]], thin: bool, store: Path, folder: Path) -> list[Outcome]:
    # A new interpreter: next to all that a process of tests has gathered, memory that a rank gains would be little.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_apart, args=(sender, cells, thin, store, folder))
    child.start()
    sender.close()
    try:
        return [receiver.recv() for _ in cells]
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # with its ranks, if the test was stopped
        child.kill()
        child.join()
        receiver.close()


def _run_apart(sender: Connection, cells: list[tuple[str, str, int]], thin: bool, store: Path, folder: Path) -> None:
    """Run cells one after another, and send their outcomes."""
    take_priority()
    torch.set_num_threads(1)  # run_ranks forks
    if thin:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "a network namespace needs root")
        limit_loopback(LINK_RATE)
    for layout, fault, seed in cells:
        sender.send(run_cell(layout, fault, seed, store, folder))


def take_priority() -> None:
    """Begin a session with priority over other work of this machine, as far as that is allowed."""
    os.setsid()
    with suppress(OSError):
        os.nice(_PRIORITY)
        # With sched_autogroup each session has a weight of its own, and nice counts only inside it.
        Path("/proc/self/autogroup").write_text(str(_PRIORITY))
