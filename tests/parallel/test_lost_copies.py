"""Copies of the model that are killed: the others go on as a plain loop in which they stop taking part."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from drawn import draw
from loose_reference import make_batch, train_copies
from plain_setup import share
from test_loose_sync import EVERY, RATES, STEPS, cut_names, gather_shards, join_shards, make_config, make_engine
from torch import Tensor

from hpc_train.config.run import RunConfig
from hpc_train.errors import LostRanksError
from hpc_train.interfaces import Engine, World
from hpc_train.parallel.data_parallel import copy_group
from hpc_train.parallel.data_parallel.copy_group import CopyGroup, LostCopy
from hpc_train.parallel.engines.loose_engine import LooseEngine
from hpc_train.runtime.store.client import JobStore
from hpc_train.runtime.store.server import StoreServer
from hpc_train.testing import run_ranks

LOST_AFTER = "parallel.sync.lost_after_seconds=60"
SECRET = b"a secret of sixteen bytes or more"


def serve_store(world: World) -> World:
    """Give the ranks a store as jobs have it, which notices the end of a process."""
    assert world.store is not None
    server = StoreServer("127.0.0.1", SECRET, world.size) if world.rank == 0 else None
    if server is not None:
        world.store.set("port", str(server.address[1]))
    address = ("127.0.0.1", int(world.store.get("port")))
    return replace(world, store=JobStore(address, SECRET, world.store.timeout, server))


def kill_this_rank() -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Outcome:
    """What a rank that goes on has seen."""

    steps: list[tuple[float, float]]
    shards: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]]
    lost: list[LostCopy]
    ranks_left: int
    seconds: float


Fault = Callable[[int, int, Engine], None]
"""(rank, step that begins, engine)."""


def run(world: World, config: RunConfig, fault: Fault) -> Outcome:
    """Train, with a fault before each step."""
    world = serve_store(world)
    engine, steps, begun = make_engine(config, world), [], time.monotonic()
    assert isinstance(engine, LooseEngine)
    assert engine.copy_group is not None
    for step in range(STEPS):
        fault(world.rank, step + 1, engine)
        sums = engine.forward_backward(replace(share(make_batch(step + 1), world, "two"), step=step))
        norm = engine.clip(1.0)
        engine.update(RATES[step])
        engine.copy_group.meet()
        steps.append((float(sums.loss) / sums.tokens, float(norm)))
    left = engine.copy_group.world.size
    return Outcome(steps, gather_shards(engine), engine.copy_group.take_lost_copies(), left, time.monotonic() - begun)


def compare(found: list[Outcome], config: RunConfig, copies: int, ends: dict[int, float]) -> None:
    """Check steps, anchors, outer momentum and each copy's own parameters against the plain loop."""
    expected = train_copies(config, copies, cut_names(config.parallel.sync.fragments), RATES, ends)
    for outcome in found:
        torch.testing.assert_close(outcome.steps, expected.steps, rtol=1e-10, atol=0)
    whole = join_shards([outcome.shards for outcome in found])
    tensors = dict(expected.anchor)
    tensors |= {f"optim.outer_momentum.{name}": value for name, value in expected.momentum.items()}
    for index, copy in enumerate(copy for copy in range(copies) if copy not in ends):  # numbered without gaps
        tensors |= {f"optim.copy{index}_parameter.{name}": value for name, value in expected.copies[copy].items()}
    assert set(tensors) <= set(whole)
    assert not [name for name in whole if name.startswith(f"optim.copy{copies - len(ends)}_")]
    for name, value in tensors.items():
        error = (whole[name] - value).norm() / value.norm().clamp(min=1e-12)
        assert error < 1e-10, (name, error)


@pytest.mark.parametrize("way", [pytest.param((), marks=pytest.mark.long), ("parallel.sync.fragments=3",)])
def test_a_copy_that_is_killed_between_exchanges_is_left_behind(way: tuple[str, ...]) -> None:
    def fault(rank: int, step: int, _: Engine) -> None:
        if (rank, step) == (1, 6):
            kill_this_rank()

    config = make_config("3 copies", EVERY, LOST_AFTER, *way)
    found = run_ranks(run, 3, config, fault, parallel=config.parallel, lost={1})
    compare(found, config, 3, {1: 5})
    for outcome in found:
        assert outcome.lost == [LostCopy(1, (1,), "its process has ended")]
        assert outcome.ranks_left == 2
        assert outcome.seconds < 30, "the end of a process is noticed without waiting for a timeout"


def test_a_copy_that_is_killed_in_an_exchange_is_not_averaged() -> None:
    def fault(rank: int, step: int, engine: Engine) -> None:
        if (rank, step) == (2, 4):
            die_in_sum(engine, at=3)  # the loss, the norm, and then the exchange

    config = make_config("4 copies", EVERY, LOST_AFTER)
    found = run_ranks(run, 4, config, fault, parallel=config.parallel, lost={2})
    compare(found, config, 4, {2: 3.5})


def die_in_sum(engine: Engine, at: int) -> None:
    """Kill this rank in place of the next sum but so many."""
    assert isinstance(engine, LooseEngine)
    assert engine.copy_group is not None
    count, sum_values = 0, engine.copy_group.sum

    def count_and_die(values: Tensor) -> Tensor:
        nonlocal count
        count += 1
        if count == at:
            kill_this_rank()
        return sum_values(values)

    engine.copy_group.sum = count_and_die  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "way", [pytest.param((), marks=pytest.mark.long), ("parallel.sync.compression=int8", "parallel.sync.block=16")]
)
def test_an_exchange_that_one_copy_has_completed_counts_for_all(way: tuple[str, ...]) -> None:
    """Copy 2 dies after the exchange; copy 0 has its result, and copy 1 has an error."""
    name = "_gather" if way else "_sum"

    def fault(rank: int, step: int, _: Engine) -> None:
        if step != 4 or rank == 0:
            return
        exchange, count = getattr(copy_group, name), 0

        def fail_after(*arguments: object) -> Tensor:
            nonlocal count
            result: Tensor = exchange(*arguments)
            count += 1
            if count == (1 if way else 3):
                time.sleep(0.5)  # so that copy 0 has the result, too
                if rank == 2:
                    kill_this_rank()
                raise RuntimeError("connection closed by peer")
            return result

        setattr(copy_group, name, fail_after)

    config = make_config("3 copies", EVERY, LOST_AFTER, *way)
    found = run_ranks(run, 3, config, fault, parallel=config.parallel, lost={2})
    if not way:
        compare(found, config, 3, {2: 4})
    one, other = ({n: v for n, *_, v in outcome.shards if not n.startswith("optim.copy")} for outcome in found)
    assert {n: v.tobytes() for n, v in one.items()} == {n: v.tobytes() for n, v in other.items()}
    assert [outcome.lost[0].copy for outcome in found] == [2, 2]


@pytest.mark.parametrize("layout", draw(["2 copies x zero3 2", "2 copies x tp 2"], ["2 copies x zero3 2"]))
def test_a_copy_is_lost_with_one_of_its_ranks(layout: str) -> None:
    def fault(rank: int, step: int, engine: Engine) -> None:
        if (rank, step) == (lost[-1], 6):
            kill_this_rank()

    config = make_config(layout, EVERY, LOST_AFTER)
    lost = (2, 3)
    found = run_ranks(run, 4, config, fault, parallel=config.parallel, lost=lost)
    compare(found, config, 2, {1: 5})
    assert [outcome.lost for outcome in found] == [[LostCopy(1, lost, "its process has ended")]] * 2
    assert [outcome.ranks_left for outcome in found] == [2, 2]


def test_two_copies_are_lost_one_after_the_other() -> None:
    def fault(rank: int, step: int, _: Engine) -> None:
        if (rank, step) in {(1, 3), (2, 7)}:
            kill_this_rank()

    config = make_config("3 copies", EVERY, LOST_AFTER)
    (found,) = run_ranks(run, 3, config, fault, parallel=config.parallel, lost={1, 2})
    compare([found], config, 3, {1: 2, 2: 6})
    assert found.ranks_left == 1


def sum_until_lost(world: World, who: int, act: Callable[[], None], seconds: float) -> str:
    """Add up until this copy cannot go on; return why, or how many copies the last of 20 sums was of."""
    world = serve_store(world)
    copies = CopyGroup(world, replace(world, rank=0, size=1), seconds)
    try:
        for number in range(20):
            if world.rank == who and number == 10:
                act()
            copies.sum(torch.ones(3))
    except LostRanksError as error:
        return str(error)
    return str(copies.counted)


def test_no_copy_goes_on_without_that_of_rank_0() -> None:
    for why in run_ranks(sum_until_lost, 3, 0, kill_this_rank, 60.0, lost={0}):
        assert why.startswith("rank 0, or process 0 with the job's store, is lost")


def test_a_copy_that_answers_too_late_ends_and_the_others_go_on() -> None:
    found = run_ranks(sum_until_lost, 3, 2, lambda: time.sleep(8), 2.0)
    assert found == ["2", "2", "this copy of the model answered too late: the others go on without it"]
