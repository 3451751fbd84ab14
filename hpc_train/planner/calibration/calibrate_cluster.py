"""Combine benchmarks and short runs of a cluster into one calibration file, and measure what it improves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hpc_train.cluster.calibration import Calibration, DeviceMeasurement, read_calibration, write_calibration
from hpc_train.errors import UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibration.fit import calibrate_constants, count_run_evidence
from hpc_train.planner.calibration.run_directories import read_cluster_names, read_run_directory
from hpc_train.planner.calibration.run_table import MeasuredRun
from hpc_train.planner.calibration.validate import ErrorStatistics, predict_runs, summarize_errors
from hpc_train.planner.constants import Constants


@dataclass(frozen=True)
class CalibrationSources:
    """Measurements to calibrate with; each may be missing."""

    device: DeviceMeasurement | None
    """Result of `bench gemm`."""
    collectives: Path | None
    """File of `bench collectives`."""
    runs: tuple[Path, ...]
    """Directories of short runs."""
    check_runs: tuple[Path, ...]
    """Runs that are only predicted, as a check."""


@dataclass(frozen=True)
class CalibrationReport:
    """Constants that changed, and prediction errors before and after."""

    moved: dict[str, tuple[float, float]]
    """Constant -> (before, after)."""
    runs: dict[str, dict[str, float]]
    """Run -> measured seconds, and those predicted before ("blind") and after ("calibrated")."""
    blind: ErrorStatistics
    """Errors without calibration: of the check runs, or of all runs if there are none."""
    calibrated: ErrorStatistics


def calibrate_cluster(sources: CalibrationSources, out: Path) -> tuple[Calibration, CalibrationReport]:
    """Write the calibration to `out`; return the benchmarks' part of it, and the report.

    Raises UserError for files that cannot be read or written, and for measurements of different clusters.
    """
    measured = _merge_benchmarks(sources)
    # Runs are read with the benchmarks' calibration, for which it has to be a file.
    benchmarks_file = out.with_name(f".{out.name}.part")
    try:
        write_calibration(benchmarks_file, measured)
        calibration = benchmarks_file if measured.levels or measured.device else None
        runs, check_runs = (
            [read_run_directory(path, calibration) for path in paths] for paths in (sources.runs, sources.check_runs)
        )
    finally:
        benchmarks_file.unlink(missing_ok=True)
    before = stored.apply_calibration(stored.default_constants(), measured)
    after = calibrate_constants(runs, before)
    old = stored.constant_values(before)
    moved = {name: (old[name], new) for name, new in stored.constant_values(after).items() if new != old[name]}
    planner = {name: new for name, (_, new) in moved.items()}
    evidence = count_run_evidence(runs) if runs else {}
    write_calibration(out, replace(measured, planner=planner, residuals=after.residuals, evidence=evidence))
    scored = check_runs or runs
    report = CalibrationReport(
        moved,
        _compare_step_times([*runs, *check_runs], before, after),
        _measure_errors(scored, before),
        _measure_errors(scored, after),
    )
    return measured, report


def _merge_benchmarks(sources: CalibrationSources) -> Calibration:
    """Merge device and network measurements. Raises UserError if runs and network are of different clusters."""
    names = read_cluster_names([*sources.runs, *sources.check_runs])
    if len(names) > 1:
        raise UserError(f"plan calibrate: runs of {', '.join(sorted(names))}; give those of one cluster")
    network = read_calibration(sources.collectives) if sources.collectives else None
    if network and names and network.cluster not in names:
        raise UserError(f"--collectives {sources.collectives}: of cluster {network.cluster}, the runs of {names.pop()}")
    cluster = network.cluster if network else next(iter(names), "")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    device = sources.device or (network.device if network else None)
    return Calibration(cluster, network.backend if network else "", date, network.levels if network else (), device)


def _compare_step_times(
    runs: Sequence[MeasuredRun], before: Constants, after: Constants
) -> dict[str, dict[str, float]]:
    rows = zip(runs, predict_runs(runs, before), predict_runs(runs, after), strict=True)
    return {run.id: {"measured": run.seconds, "blind": a.seconds, "calibrated": b.seconds} for run, a, b in rows}


def _measure_errors(runs: Sequence[MeasuredRun], constants: Constants) -> ErrorStatistics:
    return summarize_errors(row.ratio for row in predict_runs(runs, constants))
