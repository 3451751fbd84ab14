"""run_ranks: a function on several ranks costs a test no more than a call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hpc_train import testing
from hpc_train.config.parallel import ParallelConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.testing import RankFailure, run_ranks


def children() -> set[str]:
    """Processes that this one has started and that are not gone, zombies counted."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def rank_sum(world: World, start: float) -> float:
    values = torch.tensor([start + world.rank])
    dist.all_reduce(values)
    return float(values)


def test_every_rank_takes_part_in_collectives_and_gets_the_arguments() -> None:
    assert run_ranks(rank_sum, 3, 0.5) == [4.5, 4.5, 4.5]


def test_results_come_in_rank_order_whoever_is_first() -> None:
    def slow_first(world: World) -> int:
        time.sleep(0.1 * (2 - world.rank))
        return world.rank

    assert run_ranks(slow_first, 3) == [0, 1, 2]


def test_a_closure_sees_what_surrounds_it_and_changes_a_copy() -> None:
    seen = [17]

    def append(world: World) -> list[int]:
        seen.append(world.rank)
        return seen

    assert run_ranks(append, 2) == [[17, 0], [17, 1]]
    assert seen == [17]


def test_ranks_that_are_to_die_do_not_end_the_others() -> None:
    def die(world: World) -> int:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return world.rank

    assert run_ranks(die, 3, lost={1}) == [0, 2]


def test_the_mesh_is_that_of_the_parallel_config() -> None:
    def sizes(world: World) -> tuple[int, ...]:
        return tuple(world.mesh.shape)

    assert run_ranks(sizes, 2) == [(1, 2, 1, 1, 1)] * 2
    assert run_ranks(sizes, 2, parallel=ParallelConfig(strategy="zero3")) == [(1, 1, 2, 1, 1)] * 2


@pytest.fixture(autouse=True)
def _no_rank_outlives_its_test() -> Iterator[None]:
    before = children()  # other tests of this process may have started helpers of Python's own
    yield
    assert children() <= before


def test_ranks_run_on_the_cpu() -> None:
    assert run_ranks(lambda world: world.device.type, 2) == ["cpu", "cpu"]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_first_error_wins_with_its_traceback(culprit: int) -> None:
    def fail(world: World) -> None:
        if world.rank == culprit:
            raise ValueError("the cause")
        dist.barrier()  # fails when the culprit is gone

    with pytest.raises(RankFailure, match=f"(?s)^rank {culprit} failed:.*in fail.*ValueError: the cause"):
        run_ranks(fail, 3)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_dies_is_named(culprit: int) -> None:
    def die(world: World) -> None:
        if world.rank == culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)  # so that the death itself has to be noticed

    with pytest.raises(RankFailure, match=f"^rank {culprit} died without a word"):
        run_ranks(die, 2)


def test_a_rank_that_hangs_is_named_and_ended() -> None:
    def hang(world: World) -> None:
        if world.rank == 1:
            time.sleep(600)

    with pytest.raises(RankFailure, match=r"^ranks \[1\] did not finish within 5 s"):
        run_ranks(hang, 2, timeout=5)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RankFailure, match=r"(?s)^rank 0 failed:.*pickle"):
        run_ranks(lambda world: lambda: world, 1)


def test_degrees_that_do_not_fit_are_the_ranks_error() -> None:
    with pytest.raises(RankFailure, match=r"tp 3 .* 2 ranks do not divide by 3"):
        run_ranks(rank_sum, 2, 0.0, parallel=ParallelConfig(tp=3))


def test_ranks_within_ranks_are_refused() -> None:
    with pytest.raises(RankFailure, match="this process is a rank already"):
        run_ranks(lambda world: run_ranks(rank_sum, 2, 0.0), 2)


def test_nothing_is_left_open() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    run_ranks(rank_sum, 2, 0.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def _server_ends() -> Iterator[None]:
    """End the server of ranks and what Python starts beside it; Python has no public way."""
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("_server_ends")
def test_ranks_on_gpus_come_from_a_server_and_get_closures_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they compute on the CPU; all but the device is as on GPUs."""
    monkeypatch.setattr(testing, "_choose_process", lambda: testing.prepare_gpu_process)
    seen = [17]

    def append(world: World) -> tuple[list[int], float]:
        seen.append(world.rank)
        return seen, rank_sum(world, 0.5)

    assert run_ranks(append, 2) == [([17, 0], 2.0), ([17, 1], 2.0)]
    assert seen == [17]


@pytest.mark.parametrize(
    ("device", "says"), [("cuda", "torch sees no GPU here"), ("gpu", "HPC_TRAIN_TEST_DEVICE=gpu: choose cpu or cuda")]
)
def test_a_device_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch, device: str, says: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setenv(testing.DEVICE_VARIABLE, device)
    with pytest.raises(UserError, match=says):
        run_ranks(rank_sum, 2, 0.5)
