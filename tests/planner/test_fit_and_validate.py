"""The fit finds what made the data, the split never moves, and `plan validate` reports what it should."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hpc_train.cli.main import main
from hpc_train.errors import UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibration.fit import (
    FOLDS,
    assign_fold,
    calibrate_constants,
    choose_calibration_runs,
    fit_constants,
    fit_leaving_out,
    group_by_cluster,
    select_reported_memory,
    select_training_runs,
)
from hpc_train.planner.calibration.run_table import MeasuredRun, RunTable, jobs_from_runs, read_runs
from hpc_train.planner.calibration.validate import (
    PredictedRun,
    measure_band,
    measure_regret,
    predict_runs,
    summarize_errors,
    validate_predictions,
)
from hpc_train.planner.constants import EXPERTS, MEMORY, PYTORCH, TIME, Constants, constant_bounds, default_constants
from hpc_train.planner.model.memory import estimate_memory
from hpc_train.planner.model.step_time import estimate_step_time

SAMPLE = Path(__file__).with_name("published_sample.csv")
TRUTH = replace(
    Constants(), gemm_efficiency=0.72, link_efficiency=0.55, nic_efficiency=0.6, memory_efficiency=0.7, activations=1.1
)


@pytest.fixture(scope="module")
def sample() -> RunTable:
    return read_runs(SAMPLE)


def measured_by(constants: Constants, runs: list[MeasuredRun]) -> list[MeasuredRun]:
    """The same runs as a machine with these constants would have measured them."""
    jobs = jobs_from_runs(runs)
    held = select_reported_memory(runs, estimate_memory(jobs, constants))
    steps = estimate_step_time(jobs, constants).step
    return [replace(run, seconds=float(t), memory=float(b)) for run, t, b in zip(runs, steps, held, strict=True)]


def varied(sample: RunTable) -> list[MeasuredRun]:
    """The sample's runs, and each with other batches and links, so that every constant shows."""
    found = []
    for run in sample.runs:
        for number, (batch, nic) in enumerate(((1, 1.0), (2, 0.5), (4, 2.0))):
            columns = {**run.columns, "micro_batch": batch, "nic_bandwidth": run.columns["nic_bandwidth"] * nic}
            found.append(replace(run, id=f"{run.id}-{number}", columns=columns, out_of_memory=False))
    return found


def test_the_fit_finds_the_constants_that_made_the_data(sample: RunTable) -> None:
    runs = measured_by(TRUTH, varied(sample))
    found = fit_constants(runs)
    assert (
        np.abs(np.log(estimate_step_time(jobs_from_runs(runs), found).step / [run.seconds for run in runs])).mean()
        < 0.02
    )
    assert found.gemm_efficiency == pytest.approx(TRUTH.gemm_efficiency, rel=0.08)
    assert found.activations == pytest.approx(TRUTH.activations, rel=0.08)
    assert found == fit_constants(runs), "the fit is deterministic"


def test_constants_stay_within_their_physical_bounds(sample: RunTable) -> None:
    slow = [replace(run, seconds=run.seconds * 10) for run in sample.runs]
    found = asdict(fit_constants(slow))
    assert all(low <= found[name] <= high for name, (low, high) in constant_bounds().items())
    assert len(constant_bounds(TIME)) + len(constant_bounds(MEMORY)) <= 27
    assert len(constant_bounds(EXPERTS)) <= 5
    assert len(constant_bounds(PYTORCH)) <= 4
    assert set(constant_bounds(MEMORY)) < set(constant_bounds())


def test_a_run_with_a_fault_moves_little(sample: RunTable) -> None:
    runs = measured_by(TRUTH, varied(sample))
    spoilt = [replace(runs[0], seconds=runs[0].seconds * 5), *runs[1:]]
    one, other = (estimate_step_time(jobs_from_runs(runs), fit_constants(it)).step for it in (runs, spoilt))
    assert np.abs(np.log(one / other)).mean() < 0.03


def test_the_split_is_a_function_of_the_groups_name(sample: RunTable) -> None:
    assert assign_fold("sc21/GPT-39.1B/A100-80GB", 5) == 3
    kept = select_training_runs(sample.runs)
    assert 0 < len(kept) < len(sample.runs)
    assert all(assign_fold(run.group, FOLDS) for run in kept)
    assert {run.group for run in kept}.isdisjoint({run.group for run in sample.runs if run not in kept})


def test_a_table_that_says_so_is_split_by_itself(sample: RunTable) -> None:
    runs = [replace(run, held_out=run.family == "zb") for run in sample.runs]
    assert {run.id for run in select_training_runs(runs)} == {run.id for run in runs if run.family != "zb"}
    spoilt = [replace(run, seconds=run.seconds * 10) if run.held_out else run for run in runs]
    clean, dirty = (fit_leaving_out(it, lambda run: run.family) for it in (runs, spoilt))
    assert [part.constants for part in clean] == [part.constants for part in dirty]


def test_the_band_has_about_four_fifths(sample: RunTable) -> None:
    rows = [replace(row("a", 1, 1.0, 1 + 0.01 * step, sample), spread=0.1) for step in range(-20, 21)]
    found = measure_band(rows)
    assert (found.n, found.families) == (41, {"sc21": found.inside})
    assert found.inside == pytest.approx(25 / 41, abs=0.03)


def test_cross_validation_never_sees_what_it_predicts(sample: RunTable) -> None:
    """A family whose times are all tenfold is predicted as if they were not: its own runs told nothing."""
    runs = [run for run in sample.runs if run.family in ("zb", "sc21", "bloom")]
    spoilt = [replace(run, seconds=run.seconds * (10 if run.family == "zb" else 1)) for run in runs]
    clean, dirty = (fit_leaving_out(it, lambda run: run.family) for it in (runs, spoilt))
    assert [{run.family for run in part.runs} for part in clean] == [{"bloom"}, {"sc21"}, {"zb"}]
    assert clean[2].constants == dirty[2].constants
    assert clean[1].constants != dirty[1].constants


def test_calibration_learns_a_cluster_from_three_runs(sample: RunTable) -> None:
    runs = [run for run in varied(sample) if run.family == "vtrain"]
    slower = replace(default_constants(), gemm_efficiency=0.65, link_efficiency=0.5)
    runs = measured_by(slower, runs)
    some = choose_calibration_runs(runs, 3)
    assert len(some) == 3
    others = [run for run in runs if run not in some]
    before, after = (
        summarize_errors(row.ratio for row in predict_runs(others, it))
        for it in (default_constants(), calibrate_constants(some, default_constants()))
    )
    assert after.mape < before.mape / 2
    assert calibrate_constants([], default_constants()) == default_constants()


def row(contest: str, tp: float, measured: float, predicted: float, sample: RunTable) -> PredictedRun:
    run = sample.runs[0]
    run = replace(run, id=f"{contest}{tp}", contest=contest, seconds=measured, columns={**run.columns, "tp": tp})
    return PredictedRun(run, predicted, 0.0, "yes")


def test_regret_of_picks(sample: RunTable) -> None:
    rows = [
        row("a", 1, 10, 9, sample),
        row("a", 2, 8, 10, sample),
        row("b", 1, 5, 5, sample),
        row("b", 2, 6, 7, sample),
    ]
    found = measure_regret([*rows, row("alone", 1, 1, 1, sample)])
    assert found.n == 2
    assert found.mean == pytest.approx((10 / 8 - 1) / 2)
    assert found.worst == pytest.approx(10 / 8 - 1)
    twice = [row("c", 1, 10, 9, sample), row("c", 1, 12, 9, sample)]
    assert measure_regret(twice).n == 0, "the same configuration measured twice is no choice"


def test_errors_of_ratios() -> None:
    found = summarize_errors([1.1, 0.8, float("nan"), 1.0])
    assert (found.n, found.mape, found.median) == (3, pytest.approx(0.1), pytest.approx(0.1))
    assert found.bias == pytest.approx(-0.1 / 3)
    assert summarize_errors([]).n == 0


def test_the_shipped_constants_on_the_sample(sample: RunTable) -> None:
    found = validate_predictions(sample, default_constants())
    assert found.overall.n == 19
    assert found.overall.mape < 0.11
    assert found.memory.mape < 0.1
    assert (found.memory.oom, found.memory.oom_missed, found.memory.false_oom) == (1, 0, 0)


def test_calibrated_runs_are_left_out(sample: RunTable) -> None:
    found = validate_predictions(sample, default_constants(), calibrated=1)
    timed = [members for members in group_by_cluster(sample.runs) if any(np.isfinite(run.seconds) for run in members)]
    assert found.overall.n == 19 - len(timed)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_prints_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    first = told(capsys, "validate", str(SAMPLE), "--json", "--rows")
    answer = json.loads(first)
    assert set(answer) == {"overall", "families", "memory", "regret", "band", "refused", "rows"}
    assert set(answer["overall"]) == {"n", "mape", "median", "bias"}
    assert set(answer["memory"]) >= {"n", "mape", "oom_missed", "false_oom"}
    assert set(answer["regret"]) >= {"n", "mean"}
    assert {"id", "why"} == set(answer["refused"][0])
    assert len(answer["rows"]) + len(answer["refused"]) == 24
    assert first == told(capsys, "validate", str(SAMPLE), "--json", "--rows"), "deterministic"


def test_the_command_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "scatter.svg"
    text = told(capsys, "validate", str(SAMPLE), "--rows", "--plot", str(picture))
    assert all(what in text for what in ("overall", "Refused 1: not stated: top_k", "sc21-t1-1.7B"))
    assert "<svg" in picture.read_text()


def test_the_fit_command_writes_constants(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    text = told(capsys, "fit", str(SAMPLE), "--output", str(path), "--folds", "2")
    assert all(what in text for what in ("held-out groups", "cross-validation over groups"))
    assert stored.read_constants(path) != Constants()
    told(capsys, "validate", str(SAMPLE), "--constants", str(path), "--calibrate", "1")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["validate", "none.csv"], "No such file"),
        (["validate", str(SAMPLE), "--constants", __file__], "not constants"),
        (["validate", str(SAMPLE), "--plot", "x.unknown"], "give a file .png"),
        (["validate", str(SAMPLE), "--calibrate", "-1"], "number of runs"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert what in error
    assert error.count("\n") == 1


def test_constants_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"version": 0, "constants": {}}')
    with pytest.raises(UserError, match="another version"):
        stored.read_constants(path)
