"""Copy a save's tensors as late as possible: while the training waits for the copies, before it changes anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from hpc_train.checkpoint import Saver
from hpc_train.checkpoint.save.tensor_copy import TensorCopy
from hpc_train.interfaces import Engine, StepBatch, World

STEPS, RATE, MAX_NORM = 2, 1e-2, 0.05
MakeEngine = Callable[[World], Engine]
MakeBatch = Callable[[World, int], StepBatch]


@contextmanager
def latest() -> Iterator[list[int]]:
    """Make every copy late; yields the number of tensors of each copy that was."""
    late: list[int] = []
    complete, wait = TensorCopy.complete, TensorCopy.wait

    def reached(copying: TensorCopy) -> threading.Event:
        event: threading.Event = copying.__dict__.setdefault("reached", threading.Event())
        return event

    def waited(copying: TensorCopy) -> float:
        reached(copying).set()
        return wait(copying)

    def completed(copying: TensorCopy) -> None:
        if copying._later:
            assert reached(copying).wait(60), "nobody waits for the copy"
            late.append(len(copying._later))
        complete(copying)

    with patch.object(TensorCopy, "complete", completed), patch.object(TensorCopy, "wait", waited):
        yield late


def save_both_ways(world: World, make: MakeEngine, batch: MakeBatch, folder: Path) -> tuple[list[str], int]:
    """Train, and save every step both at once and beside the next one. Returns the errors, and how many tensors came
    late.
    """
    engine = make(world)
    at_once, beside = Saver(folder / "once", world, background=False), Saver(folder / "beside", world, overlap=True)
    ended = []
    with latest() as late:
        for step in range(STEPS):
            engine.forward_backward(batch(world, step))
            beside.wait_for_copy()
            engine.clip(MAX_NORM)
            engine.update(RATE)
            pieces = list(engine.shards())
            at_once.save(step, pieces, {})
            beside.save(step, pieces, {})
        ended = at_once.wait() + beside.wait()
    return [str(save.error) for save in ended if save.error is not None], sum(late)


def assert_same(folder: Path) -> None:
    """Check that every file of tensors is equal byte for byte, and that the steps differ from one another."""
    shards = []
    for step in range(STEPS):
        names = [file[0] for file in json.loads((folder / f"once/step-{step}/manifest.json").read_text())["files"]]
        once, beside = (
            [(folder / way / f"step-{step}" / name).read_bytes() for name in names] for way in ("once", "beside")
        )
        assert once == beside
        shards.append(once)
    assert all(shards[step] != shards[step + 1] for step in range(STEPS - 1))
