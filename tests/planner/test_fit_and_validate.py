"""The fit finds what made the data, the split never moves, and `plan validate` reports what it should."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hpc_train.cli import main
from hpc_train.errors import UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibrate import calibrate, chosen, together
from hpc_train.planner.constants import MEMORY, Constants, bounds, default
from hpc_train.planner.fit import SPLIT, fit, fold_of, left_out, training
from hpc_train.planner.from_runs import Run, Runs, jobs_of, read_runs
from hpc_train.planner.measured import memory_of
from hpc_train.planner.memory import memory
from hpc_train.planner.step_time import time
from hpc_train.planner.validate import Row, errors, predict, regret, validate

SAMPLE = Path(__file__).with_name("published_sample.csv")
TRUTH = replace(
    Constants(), gemm_efficiency=0.72, link_efficiency=0.55, nic_efficiency=0.6, memory_efficiency=0.7, activations=1.1
)


@pytest.fixture(scope="module")
def sample() -> Runs:
    return read_runs(SAMPLE)


def measured_by(constants: Constants, runs: list[Run]) -> list[Run]:
    """The same runs as a machine with these constants would have measured them."""
    jobs = jobs_of(runs)
    held = memory_of(runs, memory(jobs, constants))
    steps = time(jobs, constants).step
    return [replace(run, seconds=float(t), memory=float(b)) for run, t, b in zip(runs, steps, held, strict=True)]


def varied(sample: Runs) -> list[Run]:
    """The sample's runs, and each with other batches and links, so that every constant shows."""
    found = []
    for run in sample.runs:
        for number, (batch, nic) in enumerate(((1, 1.0), (2, 0.5), (4, 2.0))):
            columns = {**run.columns, "micro_batch": batch, "nic_bandwidth": run.columns["nic_bandwidth"] * nic}
            found.append(replace(run, id=f"{run.id}-{number}", columns=columns, out_of_memory=False))
    return found


def test_the_fit_finds_the_constants_that_made_the_data(sample: Runs) -> None:
    runs = measured_by(TRUTH, varied(sample))
    found = fit(runs)
    assert np.abs(np.log(time(jobs_of(runs), found).step / [run.seconds for run in runs])).mean() < 0.02
    assert found.gemm_efficiency == pytest.approx(TRUTH.gemm_efficiency, rel=0.08)
    assert found.activations == pytest.approx(TRUTH.activations, rel=0.08)
    assert found == fit(runs), "the fit is deterministic"


def test_constants_stay_within_their_physical_bounds(sample: Runs) -> None:
    slow = [replace(run, seconds=run.seconds * 10) for run in sample.runs]
    found = asdict(fit(slow))
    assert all(low <= found[name] <= high for name, (low, high) in bounds().items())
    assert len(bounds()) <= 25
    assert set(MEMORY) < set(bounds())


def test_a_run_with_a_fault_moves_little(sample: Runs) -> None:
    runs = measured_by(TRUTH, varied(sample))
    spoilt = [replace(runs[0], seconds=runs[0].seconds * 5), *runs[1:]]
    one, other = (time(jobs_of(runs), fit(it)).step for it in (runs, spoilt))
    assert np.abs(np.log(one / other)).mean() < 0.03


def test_the_split_is_a_function_of_the_groups_name(sample: Runs) -> None:
    assert fold_of("sc21/GPT-39.1B/A100-80GB", 5) == 3
    kept = training(sample.runs)
    assert 0 < len(kept) < len(sample.runs)
    assert all(fold_of(run.group, SPLIT) for run in kept)
    assert {run.group for run in kept}.isdisjoint({run.group for run in sample.runs if run not in kept})


def test_cross_validation_never_sees_what_it_predicts(sample: Runs) -> None:
    """A family whose times are all tenfold is predicted as if they were not: its own runs told nothing."""
    runs = [run for run in sample.runs if run.family in ("zb", "sc21", "bloom")]
    spoilt = [replace(run, seconds=run.seconds * (10 if run.family == "zb" else 1)) for run in runs]
    clean, dirty = (left_out(it, lambda run: run.family) for it in (runs, spoilt))
    assert [{run.family for run in part.runs} for part in clean] == [{"bloom"}, {"sc21"}, {"zb"}]
    assert clean[2].constants == dirty[2].constants
    assert clean[1].constants != dirty[1].constants


def test_calibration_learns_a_cluster_from_three_runs(sample: Runs) -> None:
    runs = [run for run in varied(sample) if run.family == "vtrain"]
    slower = replace(default(), gemm_efficiency=0.65, link_efficiency=0.5)
    runs = measured_by(slower, runs)
    some = chosen(runs, 3)
    assert len(some) == 3
    others = [run for run in runs if run not in some]
    before, after = (errors(row.ratio for row in predict(others, it)) for it in (default(), calibrate(some, default())))
    assert after.mape < before.mape / 2
    assert calibrate([], default()) == default()


def row(contest: str, tp: float, measured: float, predicted: float, sample: Runs) -> Row:
    run = sample.runs[0]
    run = replace(run, id=f"{contest}{tp}", contest=contest, seconds=measured, columns={**run.columns, "tp": tp})
    return Row(run, predicted, 0.0, "yes")


def test_regret_of_picks(sample: Runs) -> None:
    rows = [
        row("a", 1, 10, 9, sample),
        row("a", 2, 8, 10, sample),
        row("b", 1, 5, 5, sample),
        row("b", 2, 6, 7, sample),
    ]
    found = regret([*rows, row("alone", 1, 1, 1, sample)])
    assert found.n == 2
    assert found.mean == pytest.approx((10 / 8 - 1) / 2)
    assert found.worst == pytest.approx(10 / 8 - 1)
    twice = [row("c", 1, 10, 9, sample), row("c", 1, 12, 9, sample)]
    assert regret(twice).n == 0, "the same configuration measured twice is no choice"


def test_errors_of_ratios() -> None:
    found = errors([1.1, 0.8, float("nan"), 1.0])
    assert (found.n, found.mape, found.median) == (3, pytest.approx(0.1), pytest.approx(0.1))
    assert found.bias == pytest.approx(-0.1 / 3)
    assert errors([]).n == 0


def test_the_shipped_constants_on_the_sample(sample: Runs) -> None:
    found = validate(sample, default())
    assert found.overall.n == 19
    assert found.overall.mape < 0.11
    assert found.memory.mape < 0.1
    assert (found.memory.oom, found.memory.oom_missed, found.memory.false_oom) == (1, 0, 0)


def test_calibrated_runs_are_left_out(sample: Runs) -> None:
    found = validate(sample, default(), calibrated=1)
    timed = [members for members in together(sample.runs) if any(np.isfinite(run.seconds) for run in members)]
    assert found.overall.n == 19 - len(timed)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command_prints_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    first = told(capsys, "validate", str(SAMPLE), "--json", "--rows")
    answer = json.loads(first)
    assert set(answer) == {"overall", "families", "memory", "regret", "refused", "rows"}
    assert set(answer["overall"]) == {"n", "mape", "median", "bias"}
    assert set(answer["memory"]) >= {"n", "mape", "oom_missed", "false_oom"}
    assert set(answer["regret"]) >= {"n", "mean"}
    assert {"id", "why"} == set(answer["refused"][0])
    assert len(answer["rows"]) + len(answer["refused"]) == 24
    assert first == told(capsys, "validate", str(SAMPLE), "--json", "--rows"), "deterministic"


def test_the_command_prints_a_table_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "scatter.svg"
    text = told(capsys, "validate", str(SAMPLE), "--rows", "--plot", str(picture))
    assert all(what in text for what in ("overall", "Refused 1: mixture of experts", "sc21-t1-1.7B"))
    assert "<svg" in picture.read_text()


def test_the_fit_command_writes_constants(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    text = told(capsys, "fit", str(SAMPLE), "--output", str(path), "--folds", "2")
    assert all(what in text for what in ("held-out groups", "cross-validation over groups"))
    assert stored.read(path) != Constants()
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
        stored.read(path)
