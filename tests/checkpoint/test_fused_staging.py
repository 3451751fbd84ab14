"""Saves that copy tensors while the file is written make the same files as other saves, to the last byte."""

from __future__ import annotations

import math
import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import State, alone, whole

from hpc_train.checkpoint import Saver, list_committed_steps, save_step, verify_step
from hpc_train.checkpoint.format.manifest import read_manifest


def odd(seed: int) -> State:
    """Larger than a chunk, smaller than a page, of no elements, and in every order of sizes."""
    made = torch.Generator().manual_seed(seed)
    sizes = {"a": 5_000_003, "b": 3, "c": 1, "d": 70_001, "e": 0, "f": 4_300_000}
    state = {name: torch.randn(size, generator=made) for name, size in sizes.items()}
    half = torch.randn(999_999, generator=made).bfloat16()
    return {**state, "half": half, "numbers": torch.arange(300_001), "wide": half[:77].double(), "flag": half[:9] > 0}


def shards(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((directory / "step-1" / "shards").rglob("*")) if path.is_file()]


def test_the_files_are_those_of_a_save_that_copies_first(tmp_path: Path) -> None:
    state = odd(1)
    save_step(tmp_path / "filled", 1, whole(state), {}, alone()).wait()
    first = Saver(tmp_path / "copied", alone())
    first.save(1, whole(state), {})
    first.wait()[0].wait()
    assert shards(tmp_path / "filled") == shards(tmp_path / "copied")
    assert verify_step(tmp_path / "filled", 1) == []


def test_what_is_not_contiguous_is_copied_first(tmp_path: Path) -> None:
    state = odd(1)
    state["a"] = torch.randn(3000, 1500).t()
    save_step(tmp_path, 1, whole(state), {}, alone()).wait()
    save_step(tmp_path / "same", 1, whole({**state, "a": state["a"].contiguous()}), {}, alone()).wait()
    assert shards(tmp_path) == shards(tmp_path / "same")


@pytest.mark.parametrize("name", ["a", "b", "half", "wide"])
def test_the_last_element_is_looked_at(tmp_path: Path, name: str) -> None:
    state = odd(1)
    save_step(tmp_path, 1, whole(state), {}, alone()).wait()
    state[name][-1] = math.nan
    save_step(tmp_path, 2, whole(state), {}, alone()).wait()
    assert [read_manifest(tmp_path / f"step-{step}", step).finite for step in (1, 2)] == [True, False]


def test_a_mask_is_no_poison(tmp_path: Path) -> None:
    mask = torch.full((2048, 2048), -math.inf).triu(1)
    save_step(tmp_path, 1, whole({**odd(1), "mask": mask}), {}, alone()).wait()
    assert read_manifest(tmp_path / "step-1", 1).finite


def test_once_nobody_waits_nothing_is_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces change as soon as the call returns, and the disk comes back too late."""
    free, real = threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        assert free.wait(60)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    saver = Saver(tmp_path, alone(), background=False, timeout=timedelta(seconds=0.3))
    pieces = whole(odd(1))
    saver.save(1, pieces, {})
    for piece in pieces:
        piece.local.zero_()
    free.set()
    assert saver._pending is not None
    saver._pending.thread.join(60)
    assert list_committed_steps(tmp_path) == []
    assert [saved.error is not None for saved in saver.take_finished()] == [True]
