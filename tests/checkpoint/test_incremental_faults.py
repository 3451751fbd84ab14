"""Faults in a save that shares files with the step before: the new step is there whole, or the old one still is."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import State, alone, holds, names, save_alone, sharded, whole
from drawn import draw, draw_thirds
from faults import CALLS, EVERY, Fault, at_call, disk_full, fails, is_killed, kill, torn
from incremental_helpers import SMALL, check, saver, steps_of
from power_loss import Disk, Operation, recorded, violations

from hpc_train.checkpoint import Saver, find_newest_verified, list_committed_steps, prune_steps, verify_step
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter
from hpc_train.interfaces import World
from hpc_train.testing import RankFailure, run_ranks

MAKES = (*CALLS, "link")
OLD: State = {"frozen": torch.arange(60.0).reshape(10, 6), "still": torch.arange(9.0), "trained": torch.arange(8.0)}
NEW: State = {**OLD, "trained": torch.arange(8.0) + 1}
NEXT: State = {**OLD, "trained": torch.arange(8.0) + 2}


def on_two(directory: Path, world: World) -> Saver:
    return Saver(directory, world, background=False, incremental=IncrementalWriter(SMALL))


def shares(directory: Path) -> Saver:
    """A saver that has saved OLD as step 1."""
    of = saver(directory)
    of.save(1, whole(OLD), {})
    of.wait()[0].wait()
    return of


def old_or_new(directory: Path) -> str:
    found = find_newest_verified(directory)
    if found == 2 and holds(directory, 2, NEW):
        return "new"
    assert found == 1
    assert holds(directory, 1, OLD)
    return "old"


@pytest.mark.parametrize("third", draw(range(3), [1]))
def test_killed_at_any_call(tmp_path: Path, third: int) -> None:
    outcomes, number, killed = [], third - 2, True
    while killed:
        number += 3
        directory = tmp_path / str(number)
        of = shares(directory)

        def save_and_die(of: Saver = of, at: int = number, directory: Path = directory) -> None:
            with at_call(at, kill, EVERY, directory):
                of.save(2, whole(NEW), {})

        killed = is_killed(save_and_die)
        outcomes.append(old_or_new(directory))
        save_alone(directory, 3, NEXT)
        assert [name for name in names(directory) if ".tmp-" in name or ".trash-" in name] == []
        assert holds(directory, 3, NEXT)
        assert holds(directory, 1, OLD), "whatever became of the names that its file got"
    assert set(outcomes) == {"old", "new"}
    assert steps_of(directory, 2) == [1, None]
    assert number > 30


def test_killed_at_any_call_of_two(tmp_path: Path) -> None:
    def save_both(world: World, directory: Path, number: int, rank: int) -> list[str]:
        of = on_two(directory, world)
        of.save(1, sharded(OLD, 0, world.rank, 2), {})
        of.wait()
        with at_call(number if rank == world.rank else 0, kill, MAKES, directory) as made:
            of.save(2, sharded(NEW, 0, world.rank, 2), {})
            of.wait()[0].wait()
        return made

    calls = run_ranks(save_both, 2, tmp_path / "trial", 0, 0)
    assert all(made.count("link") == 2 for made in calls), "the file and its digests"
    for rank in (0, 1):
        linked = calls[rank].index("link") + 1
        for number in (linked, linked + 1, linked + 2):
            directory = tmp_path / f"{rank}-{number}"
            with pytest.raises(RankFailure, match=r"died without a word|gone, or did not come"):
                run_ranks(save_both, 2, directory, number, rank)
            assert old_or_new(directory) == "old"
            save_alone(directory, 3, NEXT)
            check(directory, 1, OLD)


FAULTS: dict[str, tuple[Fault, int]] = {"ENOSPC": (disk_full, 2), "EIO": (fails(errno.EIO), 3), "torn": (torn, 4)}
"""Each at every second, third or fourth call."""


@pytest.mark.parametrize(("name", "third"), draw_thirds(FAULTS))
def test_any_call_that_fails(tmp_path: Path, name: str, third: int) -> None:
    """And the same process goes on saving: it shares what it knows to be committed, and nothing else."""
    fault, every = FAULTS[name]
    outcomes, number, made = [], 1 + (third - 3) * every, [""]
    while len(made) >= number:
        number += 3 * every
        directory = tmp_path / str(number)
        of = shares(directory)
        with at_call(number, fault, EVERY, directory) as made:
            of.save(2, whole(NEW), {})
            (it,) = of.wait()
        outcomes.append(old_or_new(directory))
        assert (outcomes[-1] == "new") == (it.error is None), (number, made[number - 1], it.error)
        of.save(3, whole(NEXT), {})
        of.wait()[0].wait()
        assert holds(directory, 1, OLD)
        assert holds(directory, 3, NEXT)
        assert [name for name in names(directory) if ".tmp-" in name or ".trash-" in name] == []
    assert set(outcomes) == {"old", "new"}


def test_a_link_that_fails_is_no_failed_save(tmp_path: Path) -> None:
    for number, error in enumerate((errno.ENOENT, errno.EIO, errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.ESTALE)):
        of = shares(tmp_path / str(number))
        with at_call(1 + number % 2, fails(error), ("link",)):
            of.save(2, whole(NEW), {})
            (it,) = of.wait()
        assert (it.error, it.shared) == (None, 0)
        check(tmp_path / str(number), 2, NEW)


def test_one_rank_that_fails_and_what_the_ranks_share_then(tmp_path: Path) -> None:
    def save_three(world: World) -> list[str]:
        of, told = on_two(tmp_path, world), []
        for step, tensors, number in ((1, OLD, 0), (2, NEW, 3), (3, NEXT, 0)):
            with at_call(number if world.rank == 1 else 0, disk_full, CALLS):
                of.save(step, sharded(tensors, 0, world.rank, 2), {})
                told += [str(it.error) for it in of.wait()]
        return told

    first, second = run_ranks(save_three, 2)
    assert first == second
    assert [error == "None" for error in first] == [True, False, True]
    assert list_committed_steps(tmp_path) == [1, 3]
    assert steps_of(tmp_path, 3) == [1, None, 1, None]
    check(tmp_path, 3, NEXT)
    assert prune_steps(tmp_path, keep=1) == [1]
    check(tmp_path, 3, NEXT)


def operations_of(directory: Path, ranks: int) -> tuple[Disk, list[Operation]]:
    """The disk after a first save, and what a second that shares with it does."""

    def save_twice(world: World) -> tuple[Disk, list[Operation]]:
        of = on_two(directory, world)
        of.save(1, sharded(OLD, 0, world.rank, ranks), {})
        of.wait()[0].wait()
        if ranks > 1:
            torch.distributed.barrier()
        before = Disk.holding(directory)
        if ranks > 1:
            torch.distributed.barrier()
        with recorded(directory) as seen:
            of.save(2, sharded(NEW, 0, world.rank, ranks), {})
            of.wait()[0].wait()
        return before, seen

    every = [save_twice(alone())] if ranks == 1 else run_ranks(save_twice, ranks)
    return every[0][0], sorted((it for _, seen in every for it in seen), key=lambda it: it.at)


def problem(directory: Path, returned: bool) -> str | None:
    steps = list_committed_steps(directory)
    damaged = [it for it in steps if verify_step(directory, it)]
    if damaged:
        return f"step {damaged} is there and damaged"
    is_new = steps[-1:] == [2] and holds(directory, 2, NEW)
    if returned and not is_new:
        return "the save has returned, and its step is not there"
    return None if is_new or (steps == [1] and holds(directory, 1, OLD)) else f"neither old nor new: {steps}"


@pytest.mark.parametrize("ranks", draw([1, 2], [1]))
def test_the_power_fails_while_a_step_is_saved_that_shares(tmp_path: Path, ranks: int) -> None:
    before, operations = operations_of(tmp_path / "c", ranks)
    assert sum(it.name == "link" for it in operations) == 2 * ranks
    assert violations(before, operations, problem, tmp_path, 40 // ranks) == []


def test_the_model_sees_links_that_are_not_synchronised(tmp_path: Path) -> None:
    before, operations = operations_of(tmp_path / "c", 1)
    mutant = [it for it in operations if not (it.name == "fsync" and it.path.name == "000")]
    assert len(mutant) == len(operations) - 1
    assert violations(before, mutant, problem, tmp_path, 40, last=2)


def test_the_model_sees_a_link_that_comes_too_late(tmp_path: Path) -> None:
    """After the commit: readers would find a step without one of its files."""
    before, operations = operations_of(tmp_path / "c", 1)
    late: Sequence[Operation] = [it for it in operations if it.name == "link"]
    moved = [it for it in operations if it.name != "link"]
    final = tmp_path / "c/step-2"
    for it in late:
        assert it.other is not None
        moved.append(replace(it, other=final / "shards/000" / it.other.name))
    assert violations(before, moved, problem, tmp_path, 40, last=4)


@pytest.mark.parametrize("fault", [kill, fails(errno.EIO)], ids=["kill", "EIO"])
def test_old_steps_go_while_the_last_needs_their_files(tmp_path: Path, fault: Fault) -> None:
    number, made = 0, [""]
    while len(made) >= number:
        number += 5
        directory = tmp_path / str(number)
        of = shares(directory)
        of.save(2, whole(NEW), {})
        of.wait()[0].wait()

        def remove(directory: Path = directory, at: int = number) -> list[str]:
            with at_call(at, fault, EVERY, directory) as calls, suppress(OSError):
                prune_steps(directory, keep=1)
            return calls

        made = remove() if fault is not kill else [""] * (number * is_killed(remove))
        check(directory, 2, NEW)
        of.save(3, whole(NEXT), {})
        of.wait()[0].wait()
        check(directory, 3, NEXT)
