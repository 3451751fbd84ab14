"""A step whose gradient overflows in fp16 is skipped in the open: an event says so, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_runs import metrics, run, small

from hpc_train.errors import EXIT_DONE
from hpc_train.parallel.precision import number_formats
from hpc_train.training.run_directory import locate_run_directory


def test_every_skipped_step_is_an_event(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(number_formats, "INITIAL_SCALE", 2.0**40)  # halved once per step, it overflows in all six
    config = small(store, tmp_path, "precision=fp16")
    assert [rank.code for rank in run(config)] == [EXIT_DONE] * 2
    events = [json.loads(line) for line in locate_run_directory(config).events.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "skipped"] == [1, 2, 3, 4, 5, 6]
    assert [norm for (norm,) in metrics(config, "grad_norm")] == [None] * 6


def test_without_an_overflow_there_is_none(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path, "precision=fp16")
    run(config)
    assert '"skipped"' not in locate_run_directory(config).events.read_text()
