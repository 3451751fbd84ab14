"""Errors while a checkpoint is looked for and loaded: the newest, an older one, or a loud error; never nothing."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
from checkpoint_helpers import alone, blank, holds, names, same_pieces, save_alone, sharded, state, whole
from drawn import draw, draw_thirds
from faults import EVERY, Fault, at_call, fails, kill

from hpc_train.checkpoint import (
    CheckpointError,
    find_newest_verified,
    list_committed_steps,
    prune_steps,
    resume_from_checkpoint,
    save_step,
)
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

STATES = {1: state(1), 2: state(2)}
ERRORS = ("EIO", "ESTALE", "ENOENT", "EACCES")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for step, tensors in STATES.items():
        save_alone(tmp_path, step, tensors)
    return tmp_path


def loaded(directory: Path, world: World, number: int, fault: Fault) -> tuple[int | str, int]:
    """(step or the error of resume=auto, calls made). What is loaded is what was saved at that step, bit for bit."""
    pieces = blank(sharded(STATES[1], 0, world.rank, world.size))
    with at_call(number, fault, EVERY, directory) as made:
        try:
            resumed = resume_from_checkpoint(directory, "auto", pieces, world)
        except CheckpointError as error:
            assert "\n" not in str(error)  # noqa: PT017
            return str(error), len(made)
    assert resumed is not None, "that there is nothing to go on from must not be a guess"
    assert same_pieces(pieces, sharded(STATES[resumed.step], 0, world.rank, world.size))
    return resumed.step, len(made)


@pytest.mark.parametrize(("name", "third"), draw_thirds(ERRORS))
def test_any_call_that_fails_alone(directory: Path, name: str, third: int) -> None:
    outcomes, number, made = [], third - 2, 1
    while made >= number:
        number += 3
        outcome, made = loaded(directory, alone(), number, fails(getattr(errno, name)))
        outcomes.append(outcome)
    assert {1, 2} <= set(outcomes)
    assert number > 15


@pytest.mark.parametrize("third", draw(range(3), [1]))
def test_any_call_that_fails_on_one_of_two_ranks(directory: Path, third: int) -> None:
    def load_everywhere(world: World, failing: int) -> list[int | str]:
        outcomes: list[int | str] = []
        name = random.Random(failing)
        for number in range(1 + third, 41, 3):
            fault = fails(getattr(errno, name.choice(ERRORS)))
            outcomes.append(loaded(directory, world, number if world.rank == failing else 0, fault)[0])
        return outcomes

    for failing in (0, 1):
        first, second = run_ranks(load_everywhere, 2, failing)
        assert first == second, "all ranks load the same step"
        assert {1, 2} <= set(first)


def test_a_directory_that_is_not_there_for_a_moment_is_no_empty_one(directory: Path) -> None:
    with (
        at_call(1, fails(errno.ENOENT), ("scandir",), directory),
        pytest.raises(CheckpointError, match="No such file"),
    ):
        resume_from_checkpoint(directory, "auto", blank(whole(STATES[1])), alone())


@pytest.mark.parametrize("name", ERRORS)
def test_any_call_that_fails_while_old_ones_are_removed(tmp_path: Path, name: str) -> None:
    """What cannot be read just now is neither counted nor removed."""
    for step in (1, 2, 3):
        save_alone(tmp_path / "first", step, STATES[1 + step % 2])
    number, made = -ERRORS.index(name), [""] * 3
    while len(made) >= number:
        number += 3
        directory = shutil.copytree(tmp_path / "first", tmp_path / str(number))
        with at_call(number, fails(getattr(errno, name)), EVERY, directory) as made:
            try:
                prune_steps(directory, keep=1)
            except OSError as error:
                assert error.errno == getattr(errno, name)  # noqa: PT017
        steps = list_committed_steps(directory)
        assert len(steps) >= 1
        assert find_newest_verified(directory) == steps[-1]
        assert name == "ENOENT" or steps[-1] == 3, "an error that may pass costs no checkpoint"
        save_alone(directory, 4, STATES[1])
        assert prune_steps(directory, keep=1) == steps
        assert names(directory) == ["step-4"]


def test_a_manifest_that_cannot_be_read_just_now_keeps_its_place_in_the_order(directory: Path) -> None:
    """After a rollback the order of commits is not that of steps: the number of what cannot be read is not reused."""
    for step in (9, 5):
        save_alone(directory, step, STATES[1])
    hidden = directory / "step-9" / "manifest.json"

    def no_nine(call: str, args: tuple[object, ...]) -> None:
        if str(args[0]) == str(hidden):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    (directory / "step-5").rename(directory / "away")
    with at_call(1, no_nine, ("io.open",), directory, lasting=True):
        save_step(directory, 4, whole(STATES[2]), {}, alone()).wait()
    assert list_committed_steps(directory)[-2:] == [9, 4]
    assert read_manifest(directory / "step-4", 4).sequence > read_manifest(directory / "step-9", 9).sequence


@pytest.mark.parametrize("content", [b"", b"step-9", b"1\n", b"../../etc"])
def test_latest_is_derived_whatever_a_file_of_that_name_says(directory: Path, content: bytes) -> None:
    for name in ("LATEST", "latest", "latest_checkpointed_iteration.txt"):
        (directory / name).write_bytes(content)
    assert find_newest_verified(directory) == 2
    assert loaded(directory, alone(), 0, kill)[0] == 2
    assert holds(directory, 2, STATES[2])


def test_shards_of_two_ranks_that_changed_places(tmp_path: Path) -> None:
    """Equal in size and layout: only their content tells."""

    def save_both(world: World) -> None:
        for step in (1, 2):
            pieces = sharded({"w": state(step)["blocks.0.weight"][:6]}, 0, world.rank, world.size)
            save_step(tmp_path, step, pieces, {}, world).wait()

    run_ranks(save_both, 2)
    one, other = (tmp_path / "step-2" / "shards/000" / name for name in ("000000.h5", "000001.h5"))
    assert one.stat().st_size == other.stat().st_size
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    assert find_newest_verified(tmp_path) == 1
    for suffix in ("", ".digests"):  # and with their digests
        (one.parent / f"{one.name}{suffix}").write_bytes((other.parent / f"{other.name}{suffix}").read_bytes())
    assert find_newest_verified(tmp_path) == 1
