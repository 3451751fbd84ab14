"""The power fails at any moment of a save: what the disk may hold then is the old state or the new, never a mixture.

Also shown: the model sees a protocol that leaves out any one fsync.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from checkpoint_helpers import alone, holds, save_alone, sharded, state
from drawn import draw
from power_loss import Disk, Operation, put, recorded
from power_loss import violations as all_violations

from hpc_train.checkpoint import list_committed_steps, prune_steps, save_step, verify_step
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

OLD, NEW = state(1), state(2)
MAX_STATES = 40
"""States a moment, where there are more."""
SAVES = {"next step": (2, 1), "the same step again": (1, 1), "next step of two": (2, 2), "the same step of two": (1, 2)}
"""(step, ranks)."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_alone(tmp_path / "checkpoints", 1, OLD)
    return tmp_path / "checkpoints"


def operations_of_a_save(directory: Path, step: int, ranks: int = 1) -> list[Operation]:
    def save_new(world: World) -> list[Operation]:
        with recorded(directory) as seen:
            save_step(directory, step, sharded(NEW, 0, world.rank, world.size), {}, world).wait()
        return seen

    every = [save_new(alone())] if ranks == 1 else run_ranks(save_new, ranks)
    return sorted((it for of_rank in every for it in of_rank), key=lambda it: it.at)


def violations(before: Disk, operations: Sequence[Operation], step: int, scratch: Path, last: int = 1000) -> list[str]:
    def problem_of_step(directory: Path, returned: bool) -> str | None:
        return problem(directory, step, returned)

    return all_violations(before, operations, problem_of_step, scratch, MAX_STATES, last)


def problem(directory: Path, step: int, returned: bool) -> str | None:
    """Why this is neither the old state nor the new one; after the save has returned it must be the new one."""
    steps = list_committed_steps(directory)
    damaged = [it for it in steps if verify_step(directory, it)]
    if damaged:
        return f"step {damaged} is there and damaged"
    is_new = steps[-1:] == [step] and holds(directory, step, NEW)
    if returned and not is_new:
        return "the save has returned, and its step is not there"
    return None if is_new or (steps == [1] and holds(directory, 1, OLD)) else f"neither old nor new: {steps}"


@pytest.mark.parametrize("name", draw(SAVES, ["the same step again", "next step of two"]))
def test_the_power_fails_while_a_step_is_saved(directory: Path, name: str) -> None:
    step, ranks = SAVES[name]
    before = Disk.holding(directory)
    operations = operations_of_a_save(directory, step, ranks)
    assert sum(it.name == "fsync" for it in operations) >= 6 + 2 * ranks
    assert violations(before, operations, step, directory.parent) == []


def without_fsync(operations: Iterable[Operation], of: str) -> list[Operation]:
    """A protocol that leaves one out."""
    return [it for it in operations if not (it.name == "fsync" and it.path.name.partition(".tmp")[0] == of)]


@pytest.mark.parametrize(
    "of", ["000000.h5", "000000.h5.digests", "manifest.json", "000", "shards", "step-2", "checkpoints"]
)
def test_the_model_sees_a_missing_fsync(directory: Path, of: str) -> None:
    before = Disk.holding(directory)
    operations = operations_of_a_save(directory, 2)
    mutant = without_fsync(operations, of)
    assert len(mutant) < len(operations)
    assert violations(before, mutant, 2, directory.parent, last=2)


def test_the_model_sees_a_manifest_that_is_synchronised_before_it_is_written(directory: Path) -> None:
    """As torch.distributed.checkpoint does it: fsync while the bytes are still in the library's buffer."""
    before = Disk.holding(directory)
    operations = operations_of_a_save(directory, 2)
    late = [it for it in operations if it.path.name == "manifest.json" and it.name == "pwrite"]
    at = next(n for n, it in enumerate(operations) if it.path.name == "manifest.json" and it.name == "fsync")
    mutant = [it for it in operations if it not in late]
    mutant[at - len(late) + 1 : at - len(late) + 1] = late
    assert violations(before, mutant, 2, directory.parent, last=2)


def test_the_power_fails_while_old_steps_are_removed(directory: Path) -> None:
    for step in (2, 3):
        save_alone(directory, step, NEW)
    before = Disk.holding(directory)
    with recorded(directory) as operations:
        assert prune_steps(directory, keep=1) == [1, 2]
    drawn, seen = random.Random(1), set()
    for operation in operations:
        before.apply(operation)
        for found in before.states(MAX_STATES, drawn):
            names = frozenset(name for name in found if ".trash-" not in name)
            if names not in seen:  # only names go: contents are those from before
                seen.add(names)
                at = put(found, directory.parent / f"found-{len(seen)}")
                assert list_committed_steps(at)[-1] == 3
                assert holds(at, 3, NEW)
                assert [step for step in list_committed_steps(at) if verify_step(at, step)] == [], (
                    "what has its name has its files"
                )
    assert len(seen) == 3, "none is removed, the first, or both"


def test_the_first_save_makes_its_directory_last(tmp_path: Path) -> None:
    """Directories above that are missing are on the disk as well, when the save returns."""
    before = Disk.holding(tmp_path)
    with recorded(tmp_path) as operations:
        save_alone(tmp_path / "run" / "checkpoints", 1, NEW)
    for operation in operations:
        before.apply(operation)
    (found,) = {tuple(sorted(it.items())) for it in before.states(MAX_STATES, random.Random(1))}
    there = put(dict(found), tmp_path / "found")
    assert holds(there / "run" / "checkpoints", 1, NEW)


def test_what_is_found_can_be_loaded_and_saved_over(directory: Path) -> None:
    """The next run, after the power is back: it goes on, and takes away what was left."""
    before = Disk.holding(directory)
    operations = operations_of_a_save(directory, 2)
    for number, operation in enumerate(operations):
        before.apply(operation)
        if number % 4 == 0:
            found = random.Random(number).choice(list(before.states(MAX_STATES, random.Random(number))))
            at = put(found, directory.parent / f"found-{number}")
            save_alone(at, 3, NEW)
            assert holds(at, 3, NEW)
            assert list_committed_steps(at)[-1] == 3
