"""Elastic: a run that goes on at other world sizes and layouts is the run that one process did in one go."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Job, Workshop, numbers, parameters, saved_steps

from hpc_train.errors import EXIT_DONE, EXIT_REQUEUE
from hpc_train.training.records.run_records import read_metrics

TOLERANCE = 1e-9
GLOBAL_BATCH = 8
RUN = (
    "model=llama_tiny",
    "model.hidden=32",
    "model.kv_heads=2",
    "model.feed_forward=48",
    "precision=fp64",
    f"train.global_batch={GLOBAL_BATCH}",
    "train.eval_every=4",
    "train.eval_batches=2",
    "checkpoint.every=4",
    "checkpoint.keep=9",
    "optim.schedule.name=constant",  # any other depends on train.steps, which the legs raise
    "optim.schedule.warmup_steps=3",
    "optim.eps=1e-6",  # keeps AdamW from blowing up the rounding of gradients that are zero
)
STAGES = ("launch.ranks=2", "parallel.pp=2", "train.steps=4")
SHARDED = ("launch.ranks=2", "parallel=fsdp", "train.steps=12", "train.micro_batch=4")
CONTEXT = ("launch.ranks=2", "parallel.cp=2", "train.steps=12")
ALONE = ("launch.ranks=1", "train.steps=12")
PARAMETERS = 39_200


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: Path) -> tuple[Path, Path, list[str]]:
    """(twelve steps by one process, the same in three legs, what the terminal showed of each leg)."""
    place = Workshop(tmp_path_factory.mktemp("elastic"), store)
    try:
        assert place.train("straight", *RUN, *ALONE).code == EXIT_DONE
        shown = [_leg(place, *STAGES), _stopped_leg(place, *SHARDED), _leg(place, *CONTEXT)]
    finally:
        place.clean()
    return place.folder / "straight", place.folder / "legs", shown


def _leg(place: Workshop, *layout: str) -> str:
    ended = place.train("legs", *RUN, *layout)
    assert ended.code == EXIT_DONE, ended
    return ended.out


def _stopped_leg(place: Workshop, *layout: str) -> str:
    """Told to stop while its ranks are still starting: it does one step."""
    job: Job = place.start("legs", *RUN, *layout)
    job.controller()
    job.popen.send_signal(signal.SIGTERM)
    ended = job.ended()
    assert ended.code == EXIT_REQUEUE, ended
    return ended.out


def test_every_step_is_there_once_with_the_numbers_of_one_process(runs: tuple[Path, Path, list[str]]) -> None:
    straight, legs, _ = runs
    assert [line[0] for line in numbers(legs)] == list(range(1, 13))
    np.testing.assert_allclose(numbers(legs), numbers(straight), rtol=TOLERANCE)
    validation, wanted = (_validation(run) for run in (legs, straight))
    assert validation.keys() == wanted.keys() == {4, 8, 12}
    np.testing.assert_allclose(list(validation.values()), list(wanted.values()), rtol=TOLERANCE)


def _validation(run: Path) -> dict[int, float]:
    records = read_metrics(run / "metrics.jsonl")
    return {record["step"]: record["validation_loss"] for record in records if "validation_loss" in record}


def test_the_legs_ran_where_they_were_meant_to(runs: tuple[Path, Path, list[str]]) -> None:
    """And each went on from what the one before had saved, after as many samples as its steps have taken."""
    _, legs, shown = runs
    begun = [event for event in _lines(legs / "events.jsonl") if event["event"] in ("start", "resume")]
    assert [(event["world"], event["step"]) for event in begun] == [(2, 0), (2, 4), (2, 5)]
    assert "stopped at step 5, saved" in shown[1]
    assert saved_steps(legs) == [4, 5, 8, 12]
    for step in saved_steps(legs):
        extra = json.loads((legs / f"checkpoints/step-{step}/manifest.json").read_text())["extra"]
        assert extra["consumed_samples"] == step * GLOBAL_BATCH


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_they_end_with_the_same_parameters_and_optimizer_state(runs: tuple[Path, Path, list[str]]) -> None:
    straight, legs, _ = runs
    wanted, got = parameters(straight), parameters(legs)
    assert got.keys() == wanted.keys()
    assert any("optim.exp_avg_sq." in name for name in wanted)
    for name, array in wanted.items():
        assert np.linalg.norm(got[name] - array) <= TOLERANCE * np.linalg.norm(array), name


def test_the_terminal_says_what_ran_on_which_axis_and_how_large_the_whole_model_is(
    runs: tuple[Path, Path, list[str]],
) -> None:
    wanted = [
        ["2 ranks (pp 2)", "pipeline: 1f1b over pp=2"],
        ["2 ranks (dp_shard 2)", "fully_shard: zero3, dp_shard=2"],
        ["2 ranks (cp 2)", "context: balanced ring attention in 4 modules over cp=2", "dp_replicate=1, cp=2"],
    ]
    for text, words in zip(runs[2], wanted, strict=True):
        assert f"llama_tiny: {PARAMETERS:,} parameters, fp64" in text
        assert [word for word in words if word not in text] == [], text
