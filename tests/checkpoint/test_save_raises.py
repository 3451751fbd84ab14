"""A save that did not commit raises, on every rank, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import alone, names, whole

from hpc_train.checkpoint import (
    CheckpointError,
    Saver,
    list_committed_steps,
    load_step,
    resume_from_checkpoint,
    save_step,
)
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

STATE = {"w": torch.arange(6.0), "b": torch.ones(2)}


def overlapping() -> list[TensorShard]:
    """Return two pieces of the same elements."""
    return [TensorShard("w", (6,), torch.float32, (at,), torch.ones(4)) for at in (0, 2)]


WRONG: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "a state dict": (lambda: dict(STATE), {}, "state dict"),
    "tensors": (lambda: list(STATE.values()), {}, "instead of a TensorShard"),
    "names": (lambda: list(STATE), {}, "instead of a TensorShard"),
    "overlapping pieces": (overlapping, {}, "overlap"),
    "a piece is missing": (lambda: [TensorShard("w", (6,), torch.float32, (0,), torch.ones(4))], {}, "in no piece"),
    "NaN in extra": (lambda: whole(STATE), {"loss": float("nan")}, "JSON"),
    "an object in extra": (lambda: whole(STATE), {"model": object()}, "JSON"),
    "a dtype that HDF5 lacks": (lambda: whole({"w": torch.empty(2, dtype=torch.bits8)}), {}, "bits8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_save_that_fails_raises(tmp_path: Path, name: str) -> None:
    make, extra, message = WRONG[name]
    with pytest.raises(CheckpointError, match=message):
        save_step(tmp_path, 1, make(), extra, alone())
    saver = Saver(tmp_path, alone())
    future = saver.save(1, make(), extra)
    with pytest.raises(CheckpointError, match=message):
        future.result(timeout=60)
    assert [saved.error is not None for saved in saver.wait()] == [True]
    assert list_committed_steps(tmp_path) == []
    assert not [it for it in names(tmp_path) if "step" in it]


def test_a_full_disk_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_step(tmp_path, 1, whole(STATE), {}, alone())
    with pytest.raises(CheckpointError, match="No space left"):
        Saver(tmp_path, alone()).save(1, whole(STATE), {}).result(timeout=60)


def _one_rank_fails(world: World, folder: str) -> list[str]:
    said = []
    for step in (1, 2):
        pieces: Any = whole(STATE) if world.rank == 0 else []
        try:
            if step == 1:
                save_step(Path(folder), step, STATE if world.rank == 1 else pieces, {}, world)
            else:
                Saver(Path(folder), world).save(step, STATE if world.rank == 1 else pieces, {}).result(60)  # type: ignore[arg-type]
        except CheckpointError as error:
            said.append(str(error))
    save_step(Path(folder), 3, whole(STATE) if world.rank == 0 else [], {}, world)  # and the ranks are still in step
    return said


def test_all_ranks_raise_the_same(tmp_path: Path) -> None:
    first, *others = run_ranks(lambda world: _one_rank_fails(world, str(tmp_path)), 3)
    assert len(first) == 2
    assert all("rank 1: it was given a state dict" in text for text in first)
    assert others == [first, first]
    assert list_committed_steps(tmp_path) == [3]


def test_a_save_that_is_committed_gives_what_it_wrote(tmp_path: Path) -> None:
    saved = Saver(tmp_path, alone()).save(1, whole(STATE), {"a": 1}).result(timeout=60)
    assert (saved.step, saved.error) == (1, None)
    assert saved.bytes > 0


def test_one_process_needs_no_world(tmp_path: Path) -> None:
    save_step(tmp_path, 1, whole(STATE), {"a": 1}, None)
    pieces = whole({name: torch.zeros_like(it) for name, it in STATE.items()})
    assert load_step(tmp_path, 1, pieces, None) == {"a": 1}
    assert {it.name: it.local.tolist() for it in pieces} == {name: it.tolist() for name, it in STATE.items()}
    assert resume_from_checkpoint(tmp_path, "auto", pieces, None) is not None
