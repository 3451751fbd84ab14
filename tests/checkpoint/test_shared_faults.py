"""One rank of a shared file fails, dies or hangs: nothing is committed, all are told, and the next save is whole."""

from __future__ import annotations

import errno
import os
import time
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from checkpoint_helpers import holds, names, save_alone, sharded, state
from drawn import draw
from faults import Fault, at_call, disk_full, fails, kill, of_descriptor, torn
from power_loss import Disk, Operation, recorded, violations
from sharing import LARGE, on_nodes

from hpc_train.checkpoint import Saver, find_newest_verified, list_committed_steps, verify_step
from hpc_train.checkpoint.save.writer_group import WriterSharing
from hpc_train.interfaces import World
from hpc_train.testing import RankFailure, run_ranks

OLD, NEW = state(1), state(2)
TWO_A_FILE = WriterSharing(ranks_per_file=2, writers_per_node=2)


def save(saver: Saver, step: int) -> list[str]:
    saver.save(step, sharded(LARGE, 0, saver.world.rank, saver.world.size), {})
    return [str(it.error or "") for it in saver.wait()]


KILLED = ((0, "pwrite"), (1, "pwrite"), (3, "fsync"), (2, "open"))


@pytest.mark.parametrize("place", draw(KILLED, [(0, "pwrite"), (3, "fsync")]))
def test_a_rank_killed_while_it_writes(tmp_path: Path, place: tuple[int, str]) -> None:
    rank, call = place
    save_alone(tmp_path, 1, OLD)

    def die(world: World) -> None:
        with at_call(1 if world.rank == rank else 0, kill, (call,), tmp_path):
            save(Saver(tmp_path, world, sharing=TWO_A_FILE), 2)

    with pytest.raises(RankFailure, match=r"died without a word|gone, or did not come"):
        run_ranks(die, 4)
    assert list_committed_steps(tmp_path) == [1]
    assert find_newest_verified(tmp_path) == 1
    assert holds(tmp_path, 1, OLD)
    run_ranks(lambda world: save(Saver(tmp_path, world, sharing=TWO_A_FILE), 3), 4)
    assert find_newest_verified(tmp_path) == 3
    assert holds(tmp_path, 3, LARGE)
    assert names(tmp_path) == ["step-1", "step-3"]


FAULTS: dict[str, Fault] = {"ENOSPC": disk_full, "EIO": fails(errno.EIO), "torn": torn}


@pytest.mark.parametrize("name", draw(FAULTS, ["ENOSPC", "torn"]))
def test_a_call_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path, name: str) -> None:
    """Any kind of call, on the first rank of a file and on another; the save after it finds nothing amiss."""
    fault = FAULTS[name]
    save_alone(tmp_path, 1, OLD)
    places = [(rank, call) for rank in (2, 3) for call in ("pwrite", "fsync", "open")]

    def work(world: World) -> list[list[str]]:
        saver, said = Saver(tmp_path, world, sharing=TWO_A_FILE), []
        for rank, call in places:
            with at_call(1 if world.rank == rank else 0, fault, (call,), tmp_path):
                said.append(save(saver, 2))
        return [*said, save(saver, 3)]

    told = run_ranks(work, 4)
    assert told[0] == told[1] == told[2] == told[3]
    for (rank, _), (error,) in zip(places, told[0], strict=False):
        assert error.count("rank") == 1, "it is named once"
        assert f"rank {rank}: [Errno " in error
        assert "\n" not in error
    assert told[0][-1] == [""]
    assert list_committed_steps(tmp_path) == [1, 3]
    assert verify_step(tmp_path, 3) == []
    assert holds(tmp_path, 3, LARGE)


def test_direct_writes_that_are_refused_are_done_without(tmp_path: Path) -> None:
    def work(world: World) -> list[str]:
        with at_call(1 if world.rank else 0, fails(errno.EINVAL), ("pwrite",), tmp_path):
            return save(Saver(tmp_path, world, sharing=WriterSharing(0)), 1)

    assert run_ranks(work, 2) == [[""]] * 2
    assert verify_step(tmp_path, 1) == []
    assert holds(tmp_path, 1, LARGE)


def test_the_power_fails_while_ranks_write_a_file_together(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save_alone(directory, 1, OLD)
    before = Disk.holding(directory)

    def work(world: World) -> list[Operation]:
        saver = Saver(directory, world, sharing=WriterSharing(0))
        with recorded(directory) as seen:
            saver.save(2, sharded(NEW, 0, world.rank, world.size), {})
            assert [it.error for it in saver.wait()] == [None]
        return seen

    def problem(found: Path, returned: bool) -> str | None:
        steps = list_committed_steps(found)
        if any(verify_step(found, step) for step in steps):
            return "a step is there and damaged"
        return None if (steps == [1, 2] and holds(found, 2, NEW)) or (steps == [1] and not returned) else f"{steps}"

    operations = sorted((it for seen in run_ranks(work, 2) for it in seen), key=lambda it: it.at)
    made = [it for it in operations if (it.path.name, it.name) == ("000000-000001.h5", "fsync")]
    assert len(made) == 3, "the structure, and a section of each"
    assert violations(deepcopy(before), operations, problem, tmp_path, 40) == []
    mutant = [it for it in operations if it not in made[1:]]
    assert violations(before, mutant, problem, tmp_path, 40, last=2), "the model sees that these are missing"


@pytest.mark.parametrize("sharing", draw([(1, 1), (1, 0), (2, 0)], [(1, 1), (2, 0)]))
def test_so_many_of_a_node_write_at_a_time(tmp_path: Path, sharing: tuple[int, int]) -> None:
    """Two nodes of three ranks."""
    writers, ranks_per_file = sharing

    def work(world: World) -> tuple[float, float]:
        moments, real = [], os.pwrite

        def pwrite(descriptor: int, data: Any, offset: int) -> int:
            begun = time.monotonic()
            time.sleep(0.02)  # long enough for the others to come, if they may
            written = real(descriptor, data, offset)
            path = of_descriptor(descriptor)
            if "shards" in path.parts and path.suffix == ".h5" and (offset or ranks_per_file == 1):  # no structure
                moments.extend((begun, time.monotonic()))
            return written

        saver = Saver(tmp_path, on_nodes(world, 2), sharing=WriterSharing(ranks_per_file, writers))
        with patch.object(os, "pwrite", pwrite):
            assert save(saver, 1) == [""]
        return moments[0], moments[-1]

    spans = run_ranks(work, 6)
    for node in (spans[:3], spans[3:]):
        for begin, _ in node:
            assert sum(other <= begin < end for other, end in node) <= writers
    assert holds(tmp_path, 1, LARGE)


def test_a_rank_that_hangs_in_its_turn_stops_no_later_save(tmp_path: Path) -> None:
    """The one after it waits for its turn no longer than the timeout; then all make a new start."""
    save_alone(tmp_path, 1, OLD)

    def work(world: World) -> list[list[str]]:
        limit = timedelta(seconds=4)
        saver, go = Saver(tmp_path, world, sharing=WriterSharing(0, 1), timeout=limit), tmp_path / "go"
        real = os.fsync

        def fsync(descriptor: int) -> None:
            while world.rank == 1 and not go.exists():
                time.sleep(0.01)
            real(descriptor)

        with patch.object(os, "fsync", fsync):
            said = [save(saver, 2)]
            go.touch()
            while saver._pending is not None and saver._pending.thread.is_alive():
                time.sleep(0.01)
        return [*said, save(saver, 3)]

    told = run_ranks(work, 3)
    assert all(said[0][0] for said in told)
    assert "did not come in time" in told[2][0][0]
    assert [said[1][-1] for said in told] == [""] * 3
    assert list_committed_steps(tmp_path) == [1, 3]
    assert holds(tmp_path, 3, LARGE)
