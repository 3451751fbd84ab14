"""A rank or a disk that hangs fails its save; the training goes on, and so do the saves that come later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import alone, holds, names, save_alone, sharded, state, whole

from hpc_train.checkpoint import Saver, SaveResult, find_newest_verified, list_committed_steps, verify_step
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

LIMIT = timedelta(seconds=5)


@contextmanager
def held_back(go: Path, call: str = "fsync", of: str = "") -> Iterator[None]:
    """A call of the disk on a file of that name returns once `go` is there."""
    real = getattr(os, call)

    def wait(descriptor: int, *args: int) -> None:
        while of in os.readlink(f"/proc/self/fd/{descriptor}") and not go.exists():  # noqa: PTH115
            time.sleep(0.01)
        real(descriptor, *args)

    with patch.object(os, call, wait):
        yield


def train_on(world: World) -> float:
    """A collective of the training."""
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total) / world.size


def errors(saved: list[SaveResult]) -> list[tuple[int, str]]:
    return [(it.step, str(it.error or "")) for it in saved]


def late_end(saver: Saver) -> list[tuple[int, str]]:
    """What becomes of a save that was given up."""
    while not (told := errors(saver.take_finished())):
        time.sleep(0.01)
    return told


def save(saver: Saver, step: int) -> None:
    saver.save(step, sharded(state(step), 0, saver.world.rank, saver.world.size), {})


def test_a_rank_that_hangs_in_its_write(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, state(1))

    def train(world: World) -> list[list[tuple[int, str]]]:
        saver, told = Saver(tmp_path, world, timeout=LIMIT), []
        go = tmp_path / "go"
        with held_back(go if world.rank == 1 else tmp_path, of=".h5"):
            save(saver, 2)
            assert train_on(world) == 1
            told.append(errors(saver.wait()))
            save(saver, 3)
            told.append(errors(saver.take_finished()))
            assert train_on(world) == 1
            dist.barrier()
            go.touch()
            told.append(late_end(saver) if world.rank == 1 else [])
        dist.barrier()
        save(saver, 4)
        told.append(errors(saver.wait()))
        return told

    first, second = run_ranks(train, 2)
    assert "did not come in time" in first[0][0][1]
    assert "has not ended in time" in second[0][0][1]
    assert "the save before it has not ended, a rank or its disk hangs" in first[1][0][1]
    assert first[1] == second[1]
    assert "a rank is gone" in second[2][0][1]
    assert first[3] == second[3] == [(4, "")]
    assert [step for told in (first, second) for it in told for step, _ in it] == [2, 3, 4, 2, 3, 2, 4]
    assert list_committed_steps(tmp_path) == [1, 4]
    assert holds(tmp_path, 4, state(4))


def test_rank_0_hangs_while_it_commits(tmp_path: Path) -> None:
    """It commits late and can tell nobody: what is there is whole, and the saves go on."""
    save_alone(tmp_path, 1, state(1))

    def train(world: World) -> list[list[tuple[int, str]]]:
        saver, go = Saver(tmp_path, world, timeout=LIMIT), tmp_path / "go"
        with held_back(go, of="manifest"):
            save(saver, 2)
            told = [errors(saver.wait())]
            dist.barrier()
            go.touch()
            told.append(late_end(saver) if world.rank == 0 else [])
        dist.barrier()
        save(saver, 3)
        return [*told, errors(saver.wait())]

    first, second = run_ranks(train, 2)
    assert all(error for told in (first, second) for _, error in told[0])
    assert "did not come in time" in second[0][0][1]
    assert first[2] == second[2] == [(3, "")]
    assert [verify_step(tmp_path, step) for step in list_committed_steps(tmp_path)] in ([[], []], [[], [], []])
    assert holds(tmp_path, 3, state(3))


def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    def train(world: World) -> list[tuple[int, str]]:
        saver = Saver(tmp_path, world)
        with patch.object(os, "fsync", lambda descriptor: time.sleep(0.3 * world.rank)):
            save(saver, 1)
            return errors(saver.wait())

    assert run_ranks(train, 2) == [[(1, "")]] * 2
    assert holds(tmp_path, 1, state(1))


@pytest.mark.parametrize("background", [True, False])
def test_one_process_whose_disk_hangs(tmp_path: Path, background: bool) -> None:
    """What was copied may still be committed; what is copied while it is written may have changed since."""
    saver, go = Saver(tmp_path, alone(), background=background, timeout=timedelta(seconds=0.3)), tmp_path / "go"
    with held_back(go, of="000000.h5"):
        saver.save(1, whole(state(1)), {})
        ((step, why),) = errors(saver.wait())
        assert (step, "has not ended in time" in why) == (1, True)
        saver.save(2, whole(state(2)), {})
        ((step, why),) = errors(saver.take_finished())
        assert (step, "the save before it has not ended" in why) == (2, True)
        go.touch()
        ((step, why),) = late_end(saver)
        assert (step, "was given up" in why) == (1, not background)
    saver.save(3, whole(state(3)), {})
    assert errors(saver.wait()) == [(3, "")]
    assert find_newest_verified(tmp_path) == 3
    assert names(tmp_path) == ["go", *(["step-1"] if background else []), "step-3"]
