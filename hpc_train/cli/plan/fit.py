"""`hpc-train plan fit RUNS.csv`: fit the planner's constants to measured runs, and cross-validate the fit."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from hpc_train.errors import UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibration.fit import FOLDS, select_training_runs
from hpc_train.planner.calibration.fit_report import (
    CALIBRATION_CHOICES,
    CALIBRATION_RUNS,
    FitOptions,
    FitReport,
    fit_report,
)
from hpc_train.planner.calibration.run_table import read_runs
from hpc_train.planner.calibration.validate import ErrorStatistics
from hpc_train.planner.constants import constant_values


def fit_command(options: FitOptions) -> int:
    """Fit to the training split, report, and write the constants where asked."""
    runs = [run for path in options.runs for run in read_runs(Path(path)).runs]
    if not select_training_runs(runs):
        raise UserError("plan fit: no run that can be modelled; `hpc-train plan validate` says why each is refused")
    report = fit_report(runs, options)
    if options.output:
        stored.write_constants(Path(options.output), report.constants, **_list_provenance(options, report))
    if options.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        _print_fit(report)
    return 0


def _list_provenance(options: FitOptions, report: FitReport) -> dict[str, object]:
    return {
        "data": [Path(path).name for path in options.runs],
        "trained_on": "fitted to the runs that a table's column held_out leaves in; without such a column to the "
        f"groups (family/model/device) whose CRC-32 is not a multiple of {FOLDS}",
        "trained": asdict(report.trained),
        "held_out": asdict(report.held_out),
    }


def _print_fit(report: FitReport) -> None:
    print("constants:")
    for name, value in constant_values(report.constants).items():
        print(f"  {name:18s} {value:.4g}")
    print(f"training groups: {_format_errors(report.trained)}")
    print(f"held-out groups: {_format_errors(report.held_out)}")
    tables = {
        "cross-validation over groups": report.folds,
        "each cluster left out once": report.clusters,
        f"each cluster left out, then calibrated with {CALIBRATION_RUNS} runs (mean over "
        f"{CALIBRATION_CHOICES} choices)": report.calibrated,
    }
    for title, table in tables.items():
        if table:
            print(f"{title}:")
        for name, statistics in table.items():
            print(f"  {name:12s} {_format_errors(statistics)}")


def _format_errors(statistics: ErrorStatistics) -> str:
    mape, median, bias = statistics.mape, statistics.median, statistics.bias
    return f"{statistics.n:4d} runs, MAPE {mape:6.1%}, median {median:6.1%}, bias {bias:+6.1%}"
