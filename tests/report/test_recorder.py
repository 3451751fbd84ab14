"""A real run records where its time goes: blocked time where it was blocked, and nothing of it changes the training."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from multiprocessing import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawn import draw
from lab import BASE, LAYOUTS

from hpc_train.config.compose import compose
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.report.efficiency import measure_blocked, measure_work, split_step
from hpc_train.report.step_table import StepTable, read_step_table
from hpc_train.resilience.heartbeat import Heartbeat, Phase
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.step_clock import HostClock, StepPart
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_engine, make_model, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.records.recorder import StepRecorder, count_nodes, measure_node_seconds, read_node_counters
from hpc_train.training.records.run_records import read_metrics
from hpc_train.training.run_directory import RunDirectory, locate_run_directory, make_attempt, prepare_run_directory

RANKS = 4
LATE = 0.1
"""Seconds for which rank 1 lets the others wait in each backward, at least."""

LITTLE = ("model.hidden=64", "model.feed_forward=128", "train.sequence_length=32")
"""For what does not depend on how long the computation takes."""


@dataclass(frozen=True)
class Recorded:
    """A run that was recorded."""

    table: StepTable
    losses: list[float]
    wait: Any
    """dist.Work.wait after the run."""


class WatchedClock(HostClock):
    """Tells the other ranks since when this one has been waiting for a collective, in `since[rank]`; 0: it is not.

    DistributedDataParallel waits in C++, from the last bucket on. There are as many as in the backward before.
    """

    def __init__(self, rank: int, since: Any) -> None:
        super().__init__()
        self._rank, self._since_when = rank, since
        self._buckets = self._last = 0

    def mark_bucket(self) -> None:
        super().mark_bucket()
        self._buckets += 1
        self._since_when[self._rank] = time.perf_counter() if self._buckets == self._last else 0.0

    def end_backward(self) -> None:
        self._since_when[self._rank] = 0.0
        self._last, self._buckets = self._buckets, 0
        super().end_backward()

    def begin_wait(self) -> float:
        begun = super().begin_wait()
        self._since_when[self._rank] = time.perf_counter()
        return begun

    def end_wait(self, begun: float) -> None:
        self._since_when[self._rank] = 0.0
        super().end_wait(begun)


def let_others_wait(rank: int, since: Any) -> None:
    """Return when each other rank has been in one and the same wait for LATE seconds."""
    deadline = time.monotonic() + 60
    others = [*range(rank), *range(rank + 1, RANKS)]
    while not all(0.0 < since[other] < time.perf_counter() - LATE for other in others):
        assert time.monotonic() < deadline, f"the ranks wait since {list(since)}"
        time.sleep(0.005)


def train(
    store: Path, folder: Path, layout: str, *overrides: str, record: bool = True, late: bool = False
) -> list[float]:
    config = compose([*BASE, f"data.path={store}", *LAYOUTS[layout], "train.steps=8", *overrides, f"run_dir={folder}"])
    directory = locate_run_directory(config)
    prepare_run_directory(directory, config)
    since = RawArray("d", RANKS) if late else None
    run_ranks(_rank, RANKS, config, directory, make_attempt(directory), record, since, parallel=config.parallel)
    return [line["loss"] for line in read_metrics(directory.metrics)]


def _rank(world: World, config: RunConfig, directory: RunDirectory, attempt: int, record: bool, since: Any) -> None:
    wait = dist.Work.wait
    if since is not None:
        world = replace(world, clock=WatchedClock(world.rank, since))
    engine = make_engine(config, world, make_model(config))
    run = assemble_run(config, world, directory, attempt, StopRequest(), open_data(config, world), engine)
    if record:
        _lose_the_processor_before(run.observers.heartbeat)
        file = directory.step_records(attempt, 0)
        run.observers.recorder = StepRecorder(engine, world, run.observers.heartbeat, file, False)
        assert dist.Work.wait is not wait

    def be_late(gradient: torch.Tensor) -> None:
        if run.step:  # in the first step nobody knows how many buckets there are
            let_others_wait(world.rank, since)

    if since is not None and world.rank == 1:
        engine.parts[0].register_forward_hook(lambda part, inputs, out: out.register_hook(be_late) and None)
    run_training(run)
    run.close()
    assert dist.Work.wait is wait


def _lose_the_processor_before(heartbeat: Heartbeat) -> None:
    """Let some milliseconds pass before each read of the phases, as on a busy machine."""
    read_seconds = heartbeat.seconds

    def read_later() -> dict[Phase, float]:
        time.sleep(0.005)
        return read_seconds()

    heartbeat.seconds = read_later  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", draw(["ddp", "fsdp", "tp"], ("ddp", "tp")))
def test_others_are_blocked_for_as_long_as_one_is_late(layout: str, store: Path, tmp_path: Path) -> None:
    train(store, tmp_path, layout, *LITTLE, late=True)
    table = read_step_table(tmp_path)
    assert table is not None
    assert table.ranks == tuple(range(RANKS))
    # What is certain on a busy machine, too, where ranks also wait for those that have no processor.
    assert measure_work(table)[1].min() >= LATE
    assert np.delete(table.waits, 1, axis=0).max(axis=-1).min() >= LATE
    assert np.delete(measure_blocked(table), 1, axis=0).min() >= LATE
    losses = split_step(table)
    assert losses is not None
    assert np.prod(list(losses.efficiencies.values())) == pytest.approx(losses.useful / losses.total, rel=0.01)


@pytest.mark.parametrize("layout", draw(sorted(LAYOUTS), ("ddp", "fsdp")))
def test_recording_changes_no_number(layout: str, store: Path, tmp_path: Path) -> None:
    recorded = train(store, tmp_path / "a", layout, *LITTLE, "train.steps=5")
    assert recorded == train(store, tmp_path / "b", layout, *LITTLE, "train.steps=5", record=False)
    table = read_step_table(tmp_path / "a")
    assert table is not None
    parts = sum(table[name] for name in ("data", "forward", "backward", "clip", "update", "save"))
    assert (parts <= table["total"] * 1.001).all()
    assert (measure_blocked(table) <= table["total"]).all()
    assert (table["collectives"] > 0).all()
    assert np.isfinite(table["launch"]).any()
    assert (table["resident"] > 10).all()
    assert not (tmp_path / "b/logs/0/steps-node-0.bin").exists()


def test_a_wait_of_another_thread_does_not_count() -> None:
    import threading

    clock = HostClock()
    clock.begin()
    clock.enter(StepPart.BACKWARD)
    begun = clock.begin_wait()
    thread = threading.Thread(target=clock.end_wait, args=(begun,))
    thread.start()
    thread.join()
    clock.end()
    times = clock.take()()
    assert times is not None
    assert times.collectives == 0
    assert sum(times.blocked) == 0


def test_time_after_the_last_bucket_is_blocked() -> None:
    clock = HostClock()
    clock.begin()
    clock.enter(StepPart.BACKWARD)
    clock.mark_bucket()
    time.sleep(0.02)
    begun = clock.begin_wait()
    time.sleep(0.02)
    clock.end_wait(begun)
    clock.end_backward()
    clock.end()
    times = clock.take()()
    assert times is not None
    assert times.blocked[StepPart.BACKWARD] == pytest.approx(times.seconds[StepPart.BACKWARD], rel=0.1)


def test_marks_outside_a_step_are_ignored() -> None:
    clock = HostClock()
    clock.enter(StepPart.FORWARD)
    clock.end_wait(clock.begin_wait())
    clock.begin()
    clock.end()
    times = clock.take()()
    assert times is not None
    assert times.seconds[StepPart.FORWARD] == 0
    assert times.collectives == 0


def test_operations_are_counted() -> None:
    x = torch.ones(2, requires_grad=True)
    assert count_nodes([(x * 2 + 1).sum().grad_fn]) == 4  # sum, add, mul, and the leaf
    assert 1e-6 < measure_node_seconds(torch.device("cpu")) < 1e-2


def test_counters_of_the_node_are_read() -> None:
    found = read_node_counters()
    assert found["net_bytes"] >= 0
