"""Fit the planner's constants to measured runs, and report how well such a fit predicts runs that it has not seen.

Errors are given for the training groups, for held-out groups, by cross-validation over groups, and with each
cluster left out once, with and without a calibration by three of its own runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from hpc_train.planner.calibration.fit import (
    FOLDS,
    HeldOutFit,
    assign_fold,
    calibrate_constants,
    choose_calibration_runs,
    count_run_evidence,
    fit_constants,
    fit_leaving_out,
    group_by_cluster,
    select_training_runs,
)
from hpc_train.planner.calibration.run_table import MeasuredRun
from hpc_train.planner.calibration.validate import (
    ErrorStatistics,
    PredictedRun,
    measure_errors_by_family,
    predict_runs,
    summarize_errors,
)
from hpc_train.planner.constants import Constants, replace_values
from hpc_train.planner.model.inputs import DEEPSPEED, FSDP
from hpc_train.planner.model.layer.products import is_blackwell

A100_GPT = ("sc21", "korth", "megascale", "zb", "vtrain", "bloom", "mtnlg")
"""Families of dense GPTs on several nodes of A100."""


CALIBRATION_RUNS = 3
"""Runs of a cluster that it is calibrated with."""
CALIBRATION_CHOICES = 10
"""Number of choices of calibration runs over which errors are averaged, each from another half of a cluster's runs."""


@dataclass(frozen=True)
class FitOptions:
    """Options of `hpc-train plan fit`."""

    runs: tuple[str, ...]
    json: bool = False
    output: str | None = None
    folds: int = 5
    leave_out: bool = False


@dataclass(frozen=True)
class FitReport:
    """Errors of a fit on the runs it was fitted to and on held-out ones."""

    constants: Constants
    trained: ErrorStatistics
    """Errors on the groups it was fitted to."""
    held_out: ErrorStatistics
    """Errors on the held-out groups."""
    folds: dict[str, ErrorStatistics]
    """Errors by family and `overall`, by cross-validation over groups; empty: not requested."""
    clusters: dict[str, ErrorStatistics]
    """Errors by family with each cluster left out once."""
    calibrated: dict[str, ErrorStatistics]
    """The same after a calibration with three runs of the cluster, which do not count in the errors; averaged over
    several choices of the three."""


def fit_report(runs: Sequence[MeasuredRun], options: FitOptions) -> FitReport:
    """Fit the constants and validate them in every way that the options ask for."""
    trained = select_training_runs(runs)
    constants = replace(fit_constants(trained), evidence=count_run_evidence(trained))
    folds = (
        _predict_parts(fit_leaving_out(runs, lambda run: assign_fold(run.group, options.folds)))
        if options.folds > 1
        else []
    )
    constants = replace_values(constants, _fit_spreads(trained, folds, constants) if folds else {})
    clusters = fit_leaving_out(runs, lambda run: run.cluster) if options.leave_out else ()
    seen = {run.id for run in trained}
    ratios = _predict_ratios(runs, constants)
    return FitReport(
        constants,
        summarize_errors(ratio for run, ratio in zip(runs, ratios, strict=True) if run.id in seen),
        summarize_errors(ratio for run, ratio in zip(runs, ratios, strict=True) if run.id not in seen),
        measure_errors_by_kind(folds),
        measure_errors_by_kind(_predict_parts(clusters)),
        _average_errors(
            [measure_errors_by_kind(predict_calibrated(clusters, number)) for number in range(CALIBRATION_CHOICES)]
        ),
    )


def _predict_ratios(runs: Sequence[MeasuredRun], constants: Constants) -> list[float]:
    return [row.ratio for row in predict_runs(runs, constants)]


def _fit_spreads(
    trained: Sequence[MeasuredRun], folds: Sequence[PredictedRun], constants: Constants
) -> dict[str, float]:
    """Return the constants that say how wide bands are, from the runs that were fitted to alone.

    Each fifth of the sources is predicted by a fit to the others, as the runs to test are. PyTorch's stacks have too
    few sources for that: one has nearly all runs without tp, so that each fifth of its groups is predicted by a fit to
    the others; those with tp are predicted by the fit to all. folds: all runs, by fits that have not seen their groups.
    """
    seen = {run.id for run in trained}
    by_source = _predict_parts(fit_leaving_out(trained, lambda run: assign_fold(run.family, FOLDS)))
    predictions = {"spread_fsdp": folds, "spread_pytorch": predict_runs(trained, constants)}
    spreads: dict[str, float] = {}
    for name in ("spread", "spread_narrow", "spread_deepspeed", "spread_fsdp", "spread_pytorch", "spread_blackwell"):
        rows = [row for row in predictions.get(name, by_source) if row.run.id in seen and _name_spread(row.run) == name]
        rows = [row for row in rows if np.isfinite(row.ratio) and "vpp" not in row.run.assumed]
        spreads |= {name: measure_error_spread(rows)} if rows else {}
    return spreads


def _name_spread(run: MeasuredRun) -> str:
    """Return the constant that says how wide the band of a run is (step_time.choose_spread); empty: none fitted."""
    columns = run.columns
    is_new = bool(is_blackwell(np.array(columns["peak_flops_attention"])))
    if columns["experts"] > 0 or columns["float8"] > 0:
        return ""
    if columns["stack"] == FSDP:
        # One source fits products_blackwell, and cross-validation leaves it out as a whole.
        return "spread_pytorch" if columns["tp"] > 1 else "" if is_new else "spread_fsdp"
    if is_new:
        return "spread_blackwell"
    if columns["stack"] == DEEPSPEED:
        return "spread_deepspeed"
    return "spread_narrow" if columns["peak_flops"] > columns["peak_flops_attention"] else "spread"


def measure_error_spread(rows: Sequence[PredictedRun]) -> float:
    """Return the standard deviation of log(measured / predicted), robust against outliers.

    The bound within which four fifths of the errors lie, divided by that of a standard normal variable.
    """
    within = float(np.quantile([abs(math.log(row.ratio)) for row in rows], 0.8))
    return round(within / NormalDist().inv_cdf(0.9), 4)


def _predict_parts(parts: Sequence[HeldOutFit]) -> list[PredictedRun]:
    return [row for part in parts for row in predict_runs(part.runs, part.constants)]


def predict_calibrated(clusters: Sequence[HeldOutFit], number: int = 0) -> list[PredictedRun]:
    """Predict each cluster's runs after a calibration with three others of its own.

    number: which choice of the three.
    """
    predicted = []
    for part in clusters:
        for members in group_by_cluster(part.runs):
            some = choose_calibration_runs(members, CALIBRATION_RUNS, select_half_of_runs(members, number))
            others = [run for run in members if run not in some]
            predicted += predict_runs(others, calibrate_constants(some, part.constants))
    return predicted


def select_half_of_runs(runs: Sequence[MeasuredRun], number: int) -> list[MeasuredRun]:
    """Return half of a cluster's timed runs, by a hash of name and `number`, but at least as many as are chosen."""
    timed = [run for run in runs if np.isfinite(run.seconds)]
    timed.sort(key=lambda run: hashlib.sha256(f"{number}/{run.id}".encode()).digest())
    return timed[: max(CALIBRATION_RUNS, math.ceil(len(timed) / 2))]


def _average_errors(tables: Sequence[dict[str, ErrorStatistics]]) -> dict[str, ErrorStatistics]:
    """Average the errors of the same groups over several tables."""
    averages = {}
    for name in tables[0]:
        same = [table[name] for table in tables if name in table]
        means = (
            float(np.mean([getattr(statistics, field) for statistics in same])) for field in ("mape", "median", "bias")
        )
        averages[name] = ErrorStatistics(same[0].n, *means)
    return averages


def measure_errors_by_kind(rows: Sequence[PredictedRun]) -> dict[str, ErrorStatistics]:
    """Return errors by kind of run: dense GPT on A100 without sharded parameters, with sharded ones, and by device."""
    if not rows:
        return {}
    errors = {**measure_errors_by_family(rows), "overall": summarize_errors(row.ratio for row in rows)}
    kinds: dict[str, Callable[[MeasuredRun], bool]] = {
        "A100 GPT": lambda run: run.family in A100_GPT and run.columns["zero"] < 3,
        "FSDP": lambda run: run.columns["zero"] == 3,
        "H100": lambda run: run.cluster.split("/")[1].startswith("H100"),
        "GB200": lambda run: run.cluster.endswith("/GB200"),
    }
    for name, has in kinds.items():
        some = summarize_errors(row.ratio for row in rows if has(row.run))
        errors |= {name: some} if some.n else {}
    return errors
