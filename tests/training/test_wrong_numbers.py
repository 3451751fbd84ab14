"""NaN in one rank's activations: no rank updates, the step is recorded, and a run with that list ends bit-identical."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from drawn import draw
from torch import Tensor, nn
from training_runs import metrics, small

from hpc_train.config.resilience import NumbersConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.interfaces import StepBatch, Sums, World
from hpc_train.resilience.exclusion import read_strikes
from hpc_train.runtime.stop_request import StopRequest
from hpc_train.testing import run_ranks
from hpc_train.training.assemble import assemble_run
from hpc_train.training.factory import make_engine, make_model, open_data
from hpc_train.training.loop import run_training
from hpc_train.training.numerics.anomalies import SkipList, UpdateGuard, read_skip_list
from hpc_train.training.optimizer import require_determinism
from hpc_train.training.run_directory import RunDirectory, locate_run_directory, make_attempt, prepare_run_directory
from hpc_train.training.training_run import TrainingRun

POISONED_STEP = 3
LAYOUTS = {
    "ddp": ("parallel.strategy=ddp",),
    "zero3": ("parallel.strategy=zero3",),
    "tp": ("parallel.tp=2", "model.kv_heads=2"),
    "pp": ("parallel.pp=2",),
}


@dataclass(frozen=True)
class Outcome:
    """How one rank has ended."""

    code: int
    finite: bool
    state: dict[str, npt.NDArray[Any]]


def train(config: RunConfig, poison: int | None = None, times: int = 9) -> list[Outcome]:
    """Train on two ranks; poison: the step whose activations are NaN on the last rank, the first `times` times."""
    folder = locate_run_directory(config)
    prepare_run_directory(folder, config)
    return run_ranks(_rank, 2, config, folder, make_attempt(folder), poison, times, parallel=config.parallel)


def _rank(
    world: World, config: RunConfig, folder: RunDirectory, attempt: int, poison: int | None, times: int
) -> Outcome:
    require_determinism()
    engine = make_engine(config, world, make_model(config))
    run = assemble_run(config, world, folder, attempt, StopRequest(), open_data(config, world), engine)
    if poison is not None and world.rank == world.size - 1:
        _poison(run, poison, times)
    if world.rank == 0:
        ranks = [{"rank": rank, "host": f"node{rank}"} for rank in range(world.size)]
        folder.rank_map.write_text(json.dumps({"ranks": ranks}))
    try:
        code = run_training(run)
        state = {shard.name: shard.local.detach().cpu().numpy().copy() for shard in engine.shards()}
        return Outcome(code, run.numbers.finite_since_save and run.numbers.lost_since is None, state)
    finally:
        run.close()


def _poison(run: TrainingRun, step: int, times: int) -> None:
    """Make what the innermost modules of this rank return NaN in one step, the first times that it is computed."""
    computed, forward_backward = 0, run.engine.forward_backward

    def count(batch: StepBatch) -> Sums:
        nonlocal computed
        computed += run.step + 1 == step
        return forward_backward(batch)

    run.engine.forward_backward = count  # type: ignore[method-assign]

    def spoil(_module: nn.Module, _inputs: object, output: object) -> object:
        if run.step + 1 == step and computed <= times and isinstance(output, Tensor) and output.requires_grad:
            return output * float("nan")
        return output

    for module in (module for part in run.engine.parts for module in part.modules()):
        if not list(module.children()):
            module.register_forward_hook(spoil)


def events(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in locate_run_directory(config).events.read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def assert_equal(one: list[Outcome], other: list[Outcome]) -> None:
    for a, b in zip(one, other, strict=True):
        assert a.state.keys() == b.state.keys()
        assert [name for name in a.state if not np.array_equal(a.state[name], b.state[name])] == []


@pytest.mark.parametrize("layout", draw(LAYOUTS, ("ddp", "tp")))
def test_a_run_with_the_same_skip_list_is_bit_identical(store: Path, tmp_path: Path, layout: str) -> None:
    hit = small(store, tmp_path / "hit", *LAYOUTS[layout])
    recovered = train(hit, POISONED_STEP)
    assert [(rank.code, rank.finite) for rank in recovered] == [(EXIT_DONE, True)] * 2
    assert [skipped for (skipped,) in metrics(hit, "skipped")] == [None, None, True, None, None, None]
    (event,) = events(hit, "skipped")
    assert (event["step"], event["first_sample"], event["samples"]) == (POISONED_STEP, 16, 8)
    listed = locate_run_directory(hit).skipped
    clean = small(store, tmp_path / "clean", *LAYOUTS[layout], f"resilience.numbers.skip_list={listed}")
    assert_equal(recovered, train(clean))
    assert [loss for (loss,) in metrics(clean, "loss")][POISONED_STEP - 1] is not None


@pytest.mark.parametrize("layout", draw(LAYOUTS, ("zero3", "pp")))
def test_a_step_that_is_good_the_second_time_is_as_if_nothing_had_been(
    store: Path, tmp_path: Path, layout: str
) -> None:
    hit = small(store, tmp_path / "hit", *LAYOUTS[layout])
    assert_equal(train(small(store, tmp_path / "clean", *LAYOUTS[layout])), train(hit, POISONED_STEP, times=1))
    assert events(hit, "skipped") == []
    (event,) = events(hit, "transient")
    # With tensor parallelism both ranks have the whole loss; of stages, only the last has one.
    at_fault = {"tp": [0, 1], "pp": []}.get(layout, [1])
    assert (event["step"], event["ranks"]) == (POISONED_STEP, at_fault)
    assert event["why"].startswith("the loss is nan, but 5.")
    strikes = read_strikes(locate_run_directory(hit).path)
    assert [(strike.host, strike.weight) for strike in strikes] == ([("node1", 1)] if at_fault == [1] else [])


def test_a_step_that_is_bad_again_says_so(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path, "parallel.strategy=ddp")
    train(config, POISONED_STEP, times=2)
    assert [event["why"] for event in events(config, "skipped")] == ["the loss is nan, also when computed again"]
    assert events(config, "transient") == []


def test_a_step_is_not_computed_again_where_that_is_off(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path, "parallel.strategy=ddp", "resilience.numbers.replay=false")
    train(config, POISONED_STEP, times=1)
    assert [event["why"] for event in events(config, "skipped")] == ["the loss is nan"]


def test_the_list_goes_on_after_a_resume(store: Path, tmp_path: Path) -> None:
    words = ("parallel.strategy=ddp", "checkpoint.every=4")
    first = small(store, tmp_path / "run", *words)
    train(first, POISONED_STEP)
    before = read_skip_list(locate_run_directory(first).skipped)
    longer = small(store, tmp_path / "run", *words, "train.steps=8")
    train(longer, 7)
    after = read_skip_list(locate_run_directory(longer).skipped)
    assert [entry.first_step for entry in before.entries] == [3]
    assert [entry.first_step for entry in after.entries] == [3, 7]


def test_without_acting_the_update_is_made(store: Path, tmp_path: Path) -> None:
    config = small(store, tmp_path, "resilience=off")
    assert [rank.finite for rank in train(config, POISONED_STEP)] == [False] * 2
    assert [event["step"] for event in events(config, "nonfinite")] == [3, 4, 5, 6]
    assert events(config, "skipped") == []
    assert not locate_run_directory(config).skipped.exists()


def test_steps_in_a_row_are_one_entry() -> None:
    skipped = SkipList()
    for step in (3, 4, 9):
        skipped.add(step, 8 * (step - 1), 8, f"at {step}")
    assert [(e.first_step, e.last_step, e.first_sample, e.samples) for e in skipped.entries] == [
        (3, 4, 16, 16),
        (9, 9, 64, 8),
    ]
    assert [skipped.covers(sample) for sample in (15, 16, 31, 32, 64)] == [False, True, True, False, True]


@pytest.mark.parametrize(("spikes", "skip"), [("warn", False), ("skip", True)])
def test_a_spike_is_a_loss_far_above_the_latest(spikes: str, skip: bool) -> None:
    guard = UpdateGuard(NumbersConfig(spike_window=16, spikes=spikes), act=True, can_skip=True)
    for step in range(16):
        assert guard.judge(2.0 + 0.1 * (step % 2), 1.0, 8 * step)[0] is None
    assert guard.judge(2.3, 1.0, 128)[0] is None
    kind, reason, skipped = guard.judge(9.0, 1.0, 136)
    assert (kind, skipped) == ("spike", skip)
    assert reason is not None
    assert "the loss is 9" in reason
    assert (9.0 in guard.window.losses) is not skip


@pytest.mark.parametrize("text", ["{", "3", '[{"step": 1}]', "[1]"])
def test_a_skip_list_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "skipped.json"
    path.write_text(text)
    with pytest.raises(UserError, match="not a list of skipped steps"):
        read_skip_list(path)
    with pytest.raises(UserError, match=r"give the skipped\.json"):
        read_skip_list(tmp_path / "absent.json")
