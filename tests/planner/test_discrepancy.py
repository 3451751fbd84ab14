"""What runs tell beyond all constants: of settings like theirs, and of no others; and which runs tell most."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planner_runs import asked

from hpc_train.cli.main import main
from hpc_train.cluster.calibration import Calibration, StepResidual, read_calibration, write_calibration
from hpc_train.config.compose import compose
from hpc_train.errors import UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibration.fit import calibrate_constants, choose_calibration_runs, choose_informative_jobs
from hpc_train.planner.calibration.run_table import MeasuredRun, jobs_from_runs, read_runs
from hpc_train.planner.constants import (
    RESIDUAL_DEVIATION,
    RESIDUAL_LENGTH,
    RESIDUAL_SETTINGS,
    Constants,
    default_constants,
    error_correlation,
    fit_residuals,
    residual_factor,
)
from hpc_train.planner.model.from_config import jobs_from_config as job_of
from hpc_train.planner.model.jobs import Jobs, replace_columns
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.plan import make_plan

SAMPLE = Path(__file__).with_name("published_sample.csv")
LLAMA = (
    "model=llama_7b", "cluster=dgx_a100", "precision=bf16", "train.global_batch=256", "cluster.nodes=4",
    "parallel.cp=1", "parallel.pipeline.schedule=1f1b",
)  # fmt: skip
"""One schedule and no context parallelism make the search smaller."""


def grid() -> list[MeasuredRun]:
    """One run of the sample, with other degrees and batches: 3 x 3 x 3 settings."""
    one = next(run for run in read_runs(SAMPLE).runs if run.family == "vtrain")
    found = []
    for tp in (1, 2, 8):
        for pp in (1, 2, 8):
            for micro in (1, 4, 16):
                columns = {**one.columns, "tp": tp, "pp": pp, "micro_batch": micro, "layers": 32}
                found.append(replace(one, id=f"t{tp}p{pp}m{micro}", columns=columns))
    return found


def took(runs: list[MeasuredRun], constants: Constants, slow: dict[str, float]) -> list[MeasuredRun]:
    """The runs as a machine takes them, some for longer than any constant says."""
    steps = estimate_step_time(jobs_from_runs(runs), constants).step
    return [replace(run, seconds=float(t) * slow.get(run.id, 1.0)) for run, t in zip(runs, steps, strict=True)]


def test_a_run_speaks_for_settings_like_its_own_only() -> None:
    runs = took(grid(), default_constants(), {"t8p1m16": 1.15})
    three = [run for run in runs if run.id in ("t8p1m16", "t1p8m1", "t1p1m4")]
    found = calibrate_constants(three, default_constants())
    before, after = (estimate_step_time(jobs_from_runs(runs), it).step for it in (default_constants(), found))
    ratio = {run.id: float(b / a) for run, a, b in zip(runs, before, after, strict=True)}
    assert ratio["t8p1m16"] == pytest.approx(1.15, abs=0.06)
    assert ratio["t8p1m16"] > ratio["t8p2m16"] > ratio["t8p8m16"], "less and less for what is less and less alike"
    assert ratio["t1p8m1"] == pytest.approx(1.0, abs=0.02)
    unexplained = replace(found, residuals=())
    assert estimate_step_time(jobs_from_runs(runs[:1]), unexplained).step == pytest.approx(before[:1], rel=0.06), (
        "constants moved little"
    )


def test_what_is_left_of_runs_is_given_back_at_their_settings() -> None:
    jobs, errors = jobs_from_runs(grid()), np.linspace(-0.2, 0.3, 27)
    assert np.log(residual_factor(jobs, fit_residuals(jobs, errors))) == pytest.approx(errors, abs=1e-3)
    assert residual_factor(jobs, ()) == 1.0
    far = replace_columns(jobs, hidden=jobs.hidden * 2**12)
    assert residual_factor(far, fit_residuals(jobs, errors)) == pytest.approx(1.0, abs=1e-6)


def test_likeness_falls_with_each_doubling() -> None:
    jobs = jobs_from_runs(grid())
    found = error_correlation(jobs, jobs)
    assert found == pytest.approx(found.T)
    assert np.diag(found) == pytest.approx(1.0)
    assert found[0, 9] == pytest.approx(np.exp(-0.5 / RESIDUAL_LENGTH**2)), "tp twice as large"
    assert np.linalg.eigvalsh(found).min() > -1e-9, "a covariance"


def test_the_same_settings_twice_are_no_trouble() -> None:
    runs = took(grid()[:1] * 3, default_constants(), {"t1p1m1": 1.2})
    found = calibrate_constants(runs, default_constants())
    assert estimate_step_time(jobs_from_runs(runs), found).step == pytest.approx(
        [run.seconds for run in runs], rel=0.03
    )


def test_a_second_calibration_adds_to_the_first() -> None:
    runs = took(grid(), default_constants(), {"t8p1m16": 1.1, "t1p8m1": 0.9})
    first = calibrate_constants(runs[:3], default_constants())
    again = calibrate_constants([run for run in runs if run.id == "t1p8m1"], first)
    assert again.residuals[: len(first.residuals)] == first.residuals
    assert len(again.residuals) == 4


def test_it_broadcasts_as_a_search_asks() -> None:
    jobs = jobs_from_runs(grid())
    known = fit_residuals(jobs, np.linspace(-0.2, 0.3, 27))
    down = replace_columns(jobs, **{name: getattr(jobs, name)[:, None] for name in RESIDUAL_SETTINGS}, layers=32.0)
    assert residual_factor(down, known).shape == (27, 1)
    assert residual_factor(down, known)[:, 0] == pytest.approx(residual_factor(jobs, known))


def variance(jobs: Jobs, rows: list[int]) -> float:
    """Mean variance of what is left to guess after these rows: the textbook's Gaussian process, by an inverse."""
    prior = RESIDUAL_DEVIATION**2 * error_correlation(jobs, jobs) + 0.05**2
    told = prior[np.ix_(rows, rows)] + 0.05**2 * np.eye(len(rows))
    return float(np.mean(np.diag(prior - prior[:, rows] @ np.linalg.inv(told) @ prior[rows])))


def test_chosen_runs_leave_least_to_guess() -> None:
    jobs = jobs_from_runs(grid())
    rows = choose_informative_jobs(jobs, 3, range(27))
    assert len(set(rows)) == 3
    assert rows[:1] == min(([row] for row in range(27)), key=lambda it: variance(jobs, it))
    assert variance(jobs, rows) == min(variance(jobs, [*rows[:2], row]) for row in range(27) if row not in rows[:2])
    rng = np.random.default_rng(0)
    others = [variance(jobs, rng.choice(27, 3, replace=False).tolist()) for _ in range(200)]
    assert variance(jobs, rows) < np.quantile(others, 0.05)
    assert set(choose_informative_jobs(jobs, 3, [4, 9])) == {4, 9}


def test_the_choice_looks_at_no_time() -> None:
    runs = took(grid(), default_constants(), {})
    slower = [replace(run, seconds=run.seconds * (1 + number % 7)) for number, run in enumerate(runs)]
    assert [run.id for run in choose_calibration_runs(runs, 3)] == [
        run.id for run in choose_calibration_runs(slower[::-1], 3)
    ]
    half = runs[::2]
    assert {run.id for run in choose_calibration_runs(runs, 3, half)} <= {run.id for run in half}
    assert choose_calibration_runs([replace(run, seconds=float("nan")) for run in runs], 3) == []


def test_what_is_left_of_runs_changes_times_and_no_order() -> None:
    """However much it says against the settings of the best."""
    plain = asked(*LLAMA)
    assert plain.best is not None
    assert plain.best.step is not None
    job = job_of(plain.best.config, plain.best.ranks)
    at = replace_columns(job, **{name: [getattr(job, name)] for name in (*RESIDUAL_SETTINGS, "layers")})
    told = replace(default_constants(), residuals=fit_residuals(at, np.array([0.3])))
    found = make_plan(plain.request, 10, constants=told)
    assert [it.settings for it in found.candidates] == [it.settings for it in plain.candidates]
    assert found.best is not None
    assert found.best.step is not None
    assert found.best.step.p50 == pytest.approx(plain.best.step.p50 * np.exp(0.3), rel=1e-3)


def test_a_calibration_file_carries_what_is_left(tmp_path: Path) -> None:
    settings = dict.fromkeys(RESIDUAL_SETTINGS, 2.0)
    told = Calibration("here", "", "", (), residuals=(StepResidual(settings, 0.1),))
    write_calibration(tmp_path / "a.json", told)
    assert read_calibration(tmp_path / "a.json") == told
    assert stored.apply_calibration(default_constants(), told).residuals == told.residuals
    other = replace(told, residuals=(StepResidual({"tp": 2.0}, 0.1),))
    with pytest.raises(UserError, match="another version"):
        stored.apply_calibration(default_constants(), other)
    for wrong in ({"settings": {"tp": 0}, "weight": 1}, {"settings": settings, "weight": "much"}, {"weight": 1}):
        content = json.loads((tmp_path / "a.json").read_text()) | {"residuals": [wrong]}
        (tmp_path / "b.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="not a calibration"):
            read_calibration(tmp_path / "b.json")


def test_three_runs_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    """Each can be run as it is printed, and no two are alike."""
    assert main(["plan", "calibrate", "--suggest", *LLAMA, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    jobs = [job_of(compose(it["overrides"]), 32) for it in found]
    assert len(found) == 3
    assert len({tuple(float(getattr(it, name)) for name in RESIDUAL_SETTINGS) for it in jobs}) == 3
    assert main(["plan", "calibrate", "--suggest", *LLAMA]) == 0
    text = capsys.readouterr().out
    assert text.count("hpc-train submit model=llama_7b") == 3
    assert "plan calibrate --runs runs/calibrate-1 runs/calibrate-2 runs/calibrate-3" in text


def test_nothing_to_suggest_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama_405b", "cluster=dgx_a100", "cluster.nodes=1", "precision=bf16"]
    for what, arguments in {"nothing fits": ["--suggest", *words], "give --out": ["--runs", "x"]}.items():
        assert main(["plan", "calibrate", *arguments]) == 2
        error = capsys.readouterr().err
        assert what in error
        assert error.count("\n") == 1
