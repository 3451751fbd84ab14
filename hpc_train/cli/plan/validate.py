"""`hpc-train plan validate RUNS.csv`: compare the planner's predictions with measured runs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from hpc_train.errors import UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibration.run_table import read_runs
from hpc_train.planner.calibration.validate import ErrorStatistics, PredictedRun, Validation, validate_predictions
from hpc_train.units import join_first


@dataclass(frozen=True)
class ValidateOptions:
    """Options of `plan validate`."""

    runs: str
    json: bool = False
    plot: str | None = None
    rows: bool = False
    constants: str | None = None
    calibrate: int = 0


def validate_command(options: ValidateOptions) -> int:
    """Print the prediction errors; returns 0 however large they are."""
    if options.calibrate < 0:
        raise UserError(f"--calibrate {options.calibrate}: give a number of runs, such as 3, or 0 for none")
    constants = stored.read_constants(Path(options.constants)) if options.constants else stored.default_constants()
    validation = validate_predictions(read_runs(Path(options.runs)), constants, options.calibrate)
    if options.json:
        print(json.dumps(validation_to_json(validation, options.rows), indent=1))
    else:
        _print_validation(validation, options.rows)
    if options.plot:
        from hpc_train.planner.calibration.validate import draw_validation

        draw_validation(validation, Path(options.plot))
    return 0


def validation_to_json(validation: Validation, rows: bool) -> dict[str, object]:
    """Return the JSON of `plan validate --json`; errors are fractions of 1."""
    result: dict[str, object] = {
        "overall": _round_values(asdict(validation.overall)),
        "families": {name: _round_values(asdict(errors)) for name, errors in validation.families.items()},
        "memory": _round_values(asdict(validation.memory)),
        "regret": _round_values(asdict(validation.regret)),
        "band": {**_round_values(asdict(validation.band)), "families": _round_values(validation.band.families)},
        "refused": [asdict(run) for run in validation.refused],
    }
    if rows:
        result["rows"] = [_row_to_json(row) for row in validation.rows]
    return result


def _round_values(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in values.items()}


def _row_to_json(row: PredictedRun) -> dict[str, object]:
    measured = row.run.seconds if np.isfinite(row.run.seconds) else None
    memory_gib = row.run.memory / 2**30 if np.isfinite(row.run.memory) else None
    return {
        "id": row.run.id,
        "measured_seconds": measured,
        "predicted_seconds": float(f"{row.seconds:.5g}"),
        "measured_gib": memory_gib and round(memory_gib, 2),
        "predicted_gib": round(row.memory / 2**30, 2),
        "fits": row.fits,
        "assumed": list(row.run.assumed),
    }


def _print_validation(validation: Validation, rows: bool) -> None:
    console = Console(highlight=False)
    table = Table("family", "runs", "MAPE", "median", "bias", box=None)
    for name, errors in [*validation.families.items(), ("overall", validation.overall)]:
        table.add_row(name, *_format_error_cells(errors))
    console.print("Step time, predicted over measured:")
    console.print(table)
    memory, regret = validation.memory, validation.regret
    console.print(f"Memory: {memory.n} runs, MAPE {memory.mape:.1%}; {memory.maybe:.1%} of the runs that fit: maybe.")
    console.print(
        f"Out of memory: {memory.oom_missed} of {memory.oom} runs were predicted to fit; "
        f"{memory.false_oom} runs that fit were predicted not to."
    )
    console.print(
        f"Regret (measured time of the recommended layout over the fastest, less 1): {regret.mean:.1%} mean over "
        f"{regret.n} groups, {regret.worst:.1%} worst."
    )
    band = validation.band
    shares = ", ".join(f"{name} {share:.0%}" for name, share in band.families.items())
    families = f" ({shares})" if shares else ""
    console.print(f"Between p10 and p90: {band.inside:.0%} of {band.n} runs{families}; 80% is meant.")
    _print_refused(console, validation)
    if rows:
        _print_rows(console, validation)


def _format_error_cells(errors: ErrorStatistics) -> tuple[str, ...]:
    return str(errors.n), f"{errors.mape:.1%}", f"{errors.median:.1%}", f"{errors.bias:+.1%}"


def _print_refused(console: Console, validation: Validation) -> None:
    reasons: dict[str, list[str]] = {}
    for run in validation.refused:
        reasons.setdefault(run.why, []).append(run.id)
    for reason, ids in reasons.items():
        console.print(f"Refused {len(ids)}: {reason} ({join_first(ids, 3)})", markup=False)


def _print_rows(console: Console, validation: Validation) -> None:
    table = Table("run", "measured s", "predicted s", "error", "fits", box=None)
    timed = [row for row in validation.rows if np.isfinite(row.ratio)]
    for row in sorted(timed, key=lambda row: -abs(np.log(row.ratio))):
        error = f"{row.ratio - 1:+.1%}"
        table.add_row(row.run.id, f"{row.run.seconds:.4g}", f"{row.seconds:.4g}", error, row.fits)
    console.print(table)
