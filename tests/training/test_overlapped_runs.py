"""A run whose saves copy beside its next step leaves, bit by bit, the checkpoints of one whose saves copy first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drawn import draw
from training_runs import assert_same_bits, metrics, run, small

from hpc_train.checkpoint.format.manifest import read_manifest

EVERY_STEP = ("checkpoint.every=1", "checkpoint.keep=20", "checkpoint.weights_every=2", "model.dropout=0.1")
COLUMNS = ("step", "loss", "grad_norm")


def shards(path: Path, step: int) -> list[bytes]:
    """All files of tensors of a step."""
    return [(path / file.name).read_bytes() for file in read_manifest(path, step).files]


@pytest.mark.parametrize("parallel", draw(("ddp", "fsdp"), ("fsdp",)))
def test_every_step_of_a_run(store: Path, tmp_path: Path, parallel: str) -> None:
    first, beside = (
        small(store, tmp_path / how, f"parallel={parallel}", f"checkpoint.overlap={how}", *EVERY_STEP)
        for how in ("never", "always")
    )
    assert_same_bits(run(first), run(beside))
    assert metrics(first, *COLUMNS) == metrics(beside, *COLUMNS)
    for folder, steps in (("checkpoints", range(1, 7)), ("checkpoints/weights", (2, 4, 6))):
        for step in steps:
            never, always = (shards(tmp_path / how / folder / f"step-{step}", step) for how in ("never", "always"))
            assert never == always


@pytest.mark.parametrize("overlap", ["always", "never"])
def test_the_parts_of_a_save_are_told(store: Path, tmp_path: Path, overlap: str) -> None:
    run(small(store, tmp_path, "checkpoint.every=3", f"checkpoint.overlap={overlap}"))
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "checkpoint"]
    assert [event["step"] for event in saves] == [3, 6]
    for event in saves:
        parts = [event[part] for part in ("copy", "prepare", "write", "agree", "commit")]
        assert all(part >= 0 for part in parts)
        assert 0 < sum(parts) <= event["seconds"]
        assert event["stall"] <= event["seconds"]
