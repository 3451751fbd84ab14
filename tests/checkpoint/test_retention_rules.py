"""What retention keeps beside the newest: every n-th, the best, and the one this run went on from."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, holds, names, whole
from drawn import draw_thirds
from faults import EVERY, at_call, disk_full, kill

from hpc_train.checkpoint import Saver, find_newest_verified, list_committed_steps, prune_steps
from hpc_train.checkpoint.format.manifest import read_manifest
from hpc_train.checkpoint.storage.retention import KeepRules

SMALL = {"w": torch.ones(2)}


def saved(directory: Path, losses: dict[int, float | None]) -> Path:
    saver = Saver(directory, alone())
    for step, loss in losses.items():
        saver.save(step, whole(SMALL), {}, validation_loss=loss)
        assert [it.error for it in saver.wait()] == [None]
    return directory


def test_every_nth_stays_for_good(tmp_path: Path) -> None:
    saved(tmp_path, dict.fromkeys(range(10, 90, 10)))
    assert prune_steps(tmp_path, 2, KeepRules(every=30)) == [10, 20, 40, 50]
    assert list_committed_steps(tmp_path) == [30, 60, 70, 80]
    assert prune_steps(tmp_path, 2, KeepRules(every=30)) == []


def test_the_best_by_validation_loss_stay(tmp_path: Path) -> None:
    saved(tmp_path, {1: 3.0, 2: 0.5, 3: None, 4: 0.7, 5: math.nan, 6: 0.9, 7: 8.0})
    assert read_manifest(tmp_path / "step-5", 5).validation_loss is None
    assert prune_steps(tmp_path, 1, KeepRules(best=2)) == [1, 3, 5, 6]
    assert list_committed_steps(tmp_path) == [2, 4, 7]
    assert prune_steps(saved(tmp_path, {8: 0.6}), 1, KeepRules(best=2)) == [4, 7]


def test_of_equally_good_ones_the_later(tmp_path: Path) -> None:
    assert prune_steps(saved(tmp_path, {1: 0.5, 2: 0.5, 3: 1.0}), 1, KeepRules(best=1)) == [1]


def test_the_one_this_run_went_on_from_stays(tmp_path: Path) -> None:
    saved(tmp_path, dict.fromkeys((500, 600, 700, 550, 560)))
    assert prune_steps(tmp_path, 1, KeepRules(always=frozenset({500}))) == [550, 600, 700]
    assert list_committed_steps(tmp_path) == [500, 560]


def test_all_rules_at_once_after_a_rollback(tmp_path: Path) -> None:
    """The order is that of commits, however the steps and the times of the files run."""
    saved(tmp_path, {100: 1.0, 200: 0.2, 300: 0.9, 150: 0.8, 160: 0.7})
    for step in (300, 200):
        later = time.time() + 3600
        os.utime(tmp_path / f"step-{step}", (later, later))
    assert prune_steps(tmp_path, 1, KeepRules(every=100, best=1, always=frozenset({100}))) == [150]
    assert list_committed_steps(tmp_path) == [100, 200, 300, 160]


def test_a_damaged_best_does_not_count(tmp_path: Path) -> None:
    saved(tmp_path, {1: 0.1, 2: 0.2, 3: 0.3})
    (tmp_path / "step-1" / "shards/000/000000.h5").write_bytes(b"")
    assert prune_steps(tmp_path, 1, KeepRules(best=1)) == [1]
    assert list_committed_steps(tmp_path) == [2, 3]


@pytest.mark.parametrize(("what", "third"), draw_thirds(["kill", "full"]))
def test_at_any_call_what_is_to_stay_stays(tmp_path: Path, what: str, third: int) -> None:
    also, number, more = KeepRules(every=3, best=1, always=frozenset({2})), 2 * third - 4, True

    def prune_at(directory: Path, number: int) -> None:
        with at_call(number, kill if what == "kill" else disk_full, EVERY, directory) as made:
            try:
                prune_steps(directory, 1, also)
            finally:
                os._exit(3 if len(made) >= number else 0)

    saved(tmp_path / "first", {1: 0.1, 2: 4.0, 3: 3.0, 4: 2.0, 5: 1.0})
    while more:
        number += 6
        directory = shutil.copytree(tmp_path / "first", tmp_path / str(number))
        process = multiprocessing.get_context("fork").Process(target=prune_at, args=(directory, number))
        process.start()
        process.join()
        more = process.exitcode != 0
        assert find_newest_verified(directory) == 5
        assert {1, 2, 3, 5} <= set(list_committed_steps(directory))
        assert all(holds(directory, step, SMALL) for step in list_committed_steps(directory)), "what is listed is whole"
        prune_steps(directory, 1, also)
        assert names(directory) == ["step-1", "step-2", "step-3", "step-5"]
    assert number > 10
