"""Saves beside the training: what is saved is what was there when `save` was called, and one at a time."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import alone, blank, names, same_pieces, sharded, state, whole
from faults import at_call, disk_full

from hpc_train.checkpoint import Saver, SaveResult, find_newest_verified, load_step
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk takes nothing until this is set."""
    free, real = threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        assert free.wait(60)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return free


def change(pieces: list[TensorShard]) -> None:
    for piece in pieces:
        piece.local.zero_()


def test_the_pieces_may_change_at_once(tmp_path: Path, held_back: threading.Event) -> None:
    saver, pieces = Saver(tmp_path, alone()), whole(state(1))
    saver.save(1, pieces, {"consumed_samples": 8})
    assert saver.take_finished() == []
    change(pieces)
    held_back.set()
    (saved,) = saver.wait()
    saved.wait()
    assert (saved.step, saved.path) == (1, tmp_path / "step-1")
    assert 0 < saved.stall < saved.seconds
    found = blank(whole(state(1)))
    assert load_step(tmp_path, 1, found, alone()) == {"consumed_samples": 8}
    assert same_pieces(found, whole(state(1)))
    assert saver.wait() == [], "told once"


def test_the_next_save_waits_for_the_one_before(
    tmp_path: Path, held_back: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(tmp_path, alone())
    saver.save(1, whole(state(1)), {})
    threading.Timer(1.5, held_back.set).start()
    with caplog.at_level(logging.WARNING):
        saver.save(2, whole(state(2)), {})
    assert find_newest_verified(tmp_path) == 1, "the first was committed before the second began"
    assert "step 2: waited" in caplog.text, "more than a second is worth a warning"
    assert [saved.step for saved in saver.wait()] == [1, 2]
    assert find_newest_verified(tmp_path) == 2


def test_a_layout_that_changes_between_saves(tmp_path: Path) -> None:
    saver = Saver(tmp_path, alone())
    for step, tensors in ((1, state(1)), (2, {"w": state(2)["blocks.0.weight"]}), (3, state(3))):
        saver.save(step, whole(tensors), {})
        found = blank(whole(tensors))
        saver.wait()
        load_step(tmp_path, step, found, alone())
        assert same_pieces(found, whole(tensors))


def test_a_failure_is_told_and_the_next_save_works(tmp_path: Path) -> None:
    saver = Saver(tmp_path, alone())
    with at_call(7, disk_full):
        saver.save(1, whole(state(1)), {})
        (saved,) = saver.wait()
    assert "No space left on device" in str(saved.error)
    assert names(tmp_path) == []
    saver.save(2, whole(state(2)), {})
    assert [it.error for it in saver.wait()] == [None]
    assert find_newest_verified(tmp_path) == 2


def test_in_the_foreground_the_outcome_is_known_at_once(tmp_path: Path) -> None:
    saver = Saver(tmp_path, alone(), background=False)
    saver.save(1, whole(state(1)), {})
    assert find_newest_verified(tmp_path) == 1
    assert [saved.step for saved in saver.take_finished()] == [1]


def test_what_follows_a_commit_runs_on_rank_0_after_it(tmp_path: Path) -> None:
    def two_saves(world: World) -> tuple[list[Any], list[int]]:
        seen: list[Any] = []

        def after(saved: SaveResult) -> None:
            seen.append((saved.step, saved.path.is_dir()))

        saver = Saver(tmp_path, world, on_commit=after)
        for step in (1, 2):
            pieces = sharded(state(step), 0, world.rank, world.size)
            saver.save(step, pieces, {})
            change(pieces)
        return seen, [saved.step for saved in saver.wait() if saved.error is None]

    answers = run_ranks(two_saves, 2)
    assert answers == [([(1, True), (2, True)], [1, 2]), ([], [1, 2])]
    found = blank(whole(state(2)))
    load_step(tmp_path, 2, found, alone())
    assert same_pieces(found, whole(state(2)))


def test_one_rank_that_fails_fails_the_save_on_all_and_nobody_hangs(tmp_path: Path) -> None:
    def save_and_fail(world: World) -> list[str | None]:
        saver = Saver(tmp_path, world)
        told = []
        for step, number in ((1, 4), (2, 0)):
            with at_call(number if world.rank == 1 else 0, disk_full):
                saver.save(step, sharded(state(step), 0, world.rank, world.size), {})
                told += [str(saved.error) if saved.error else None for saved in saver.wait()]
        return told

    first, second = run_ranks(save_and_fail, 2)
    assert first == second
    assert "rank 1: [Errno 28] No space left on device" in str(first[0])
    assert first[1] is None
    assert names(tmp_path) == ["step-2"]
