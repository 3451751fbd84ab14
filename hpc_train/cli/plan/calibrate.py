"""`hpc-train plan calibrate`: what benchmarks and short runs tell of a cluster, as one file for cluster.calibration.

With --suggest it only prints which short runs to make: of the layouts that the planner would take, those that
tell most.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hpc_train.bench.gemm import read_gemm_result
from hpc_train.cluster.calibration import Calibration, DeviceMeasurement, read_calibration, write_calibration
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibration.fit import calibrate_constants
from hpc_train.planner.calibration.run_directories import cluster_names, read_run_directory
from hpc_train.planner.calibration.run_table import MeasuredRun
from hpc_train.planner.calibration.suggest_runs import suggest_runs
from hpc_train.planner.calibration.validate import ErrorStatistics, error_statistics, predict_runs
from hpc_train.planner.constants import Constants


@dataclass(frozen=True)
class CalibrateOptions:
    """Of the command."""

    out: str
    gemm: str | None = None
    collectives: str | None = None
    runs: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    """Runs that are predicted, and that nothing is learnt from."""
    json: bool = False


@dataclass(frozen=True)
class CalibrationReport:
    """What a calibration is worth."""

    moved: dict[str, tuple[float, float]]
    """Constant -> (before, after)."""
    runs: dict[str, dict[str, float]]
    """Run -> measured seconds, and those predicted before and after."""
    blind: ErrorStatistics
    """Of the runs that nothing was learnt from, or of all where there are none: before."""
    calibrated: ErrorStatistics


def calibrate_command(options: CalibrateOptions) -> int:
    """Write the file, and print what it changes. Raises UserError for files that cannot be read or written."""
    if not (options.gemm or options.collectives or options.runs):
        raise UserError("plan calibrate: nothing to learn from; give --gemm FILE, --collectives FILE or --runs DIR ...")
    path = Path(options.out)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--out {path}: name a file in a folder that exists")
    measured = _read_benchmarks(options)
    learnt = _calibrate_from_runs(options, measured, path)
    if options.json:
        print(json.dumps(asdict(learnt), indent=1))
    else:
        _print_calibration(measured, learnt, options)
    return EXIT_DONE


def _read_benchmarks(options: CalibrateOptions) -> Calibration:
    """The benchmarks' part."""
    folders = [Path(name) for name in (*options.runs, *options.against)]
    names = cluster_names(folders)
    if len(names) > 1:
        raise UserError(f"plan calibrate: runs of {', '.join(sorted(names))}; give those of one cluster")
    network = read_calibration(Path(options.collectives)) if options.collectives else None
    if network and names and network.cluster not in names:
        raise UserError(f"--collectives {options.collectives}: of cluster {network.cluster}, the runs of {names.pop()}")
    cluster = network.cluster if network else next(iter(names), "")
    date = datetime.now(UTC).isoformat(timespec="seconds")
    device = _device(Path(options.gemm)) if options.gemm else network.device if network else None
    return Calibration(cluster, network.backend if network else "", date, network.levels if network else (), device)


def _device(path: Path) -> DeviceMeasurement:
    found = read_gemm_result(path)
    return DeviceMeasurement(found.device, {name: it.tflops for name, it in found.best().items()}, found.copy_gb_s)


def _calibrate_from_runs(options: CalibrateOptions, measured: Calibration, path: Path) -> CalibrationReport:
    """Write what the benchmarks tell, read the runs with it, and write what these tell besides."""
    beside = path.with_name(f".{path.name}.part")
    try:
        write_calibration(beside, measured)
        runs, others = (
            [read_run_directory(Path(name), beside if measured.levels or measured.device else None) for name in names]
            for names in (options.runs, options.against)
        )
    finally:
        beside.unlink(missing_ok=True)
    before = stored.apply_calibration(stored.default_constants(), measured)
    after = calibrate_constants(runs, before)
    known = stored.constant_values(before)
    moved = {
        name: (known[name], value) for name, value in stored.constant_values(after).items() if value != known[name]
    }
    planner = {name: value for name, (_, value) in moved.items()}
    write_calibration(path, replace(measured, planner=planner, residuals=after.residuals))
    scored = others or runs
    return CalibrationReport(
        moved, _step_times([*runs, *others], before, after), _errors_with(scored, before), _errors_with(scored, after)
    )


def _step_times(runs: Sequence[MeasuredRun], before: Constants, after: Constants) -> dict[str, dict[str, float]]:
    rows = zip(runs, predict_runs(runs, before), predict_runs(runs, after), strict=True)
    return {run.id: {"measured": run.seconds, "blind": a.seconds, "calibrated": b.seconds} for run, a, b in rows}


def _errors_with(runs: Sequence[MeasuredRun], constants: Constants) -> ErrorStatistics:
    return error_statistics(row.ratio for row in predict_runs(runs, constants))


def _print_calibration(measured: Calibration, learnt: CalibrationReport, options: CalibrateOptions) -> None:
    if measured.device:
        speeds = ", ".join(f"{name} {value:.4g}" for name, value in measured.device.tflops.items())
        print(f"device: {measured.device.name}: TFLOP/s {speeds}; copy {measured.device.memory_gb_s:.4g} GB/s")
    for it in measured.levels:
        print(f"level {it.level}: {it.latency * 1e6:.3g} us + bytes / {it.bandwidth / 1e9:.4g} GB/s")
    for name, (before, after) in learnt.moved.items():
        print(f"  {name:18s} {before:10.4g} -> {after:.4g}")
    for name, run in learnt.runs.items():
        told = f"measured {run['measured']:.4g} s, blind {run['blind']:.4g} s, calibrated {run['calibrated']:.4g} s"
        print(f"{name}: {told}{'' if name in options.runs else ' (not learnt from)'}")
    if learnt.runs:
        kind = "runs not learnt from" if options.against else "runs, all learnt from"
        print(f"{learnt.blind.n} {kind}: MAPE blind {learnt.blind.mape:.1%}, calibrated {learnt.calibrated.mape:.1%}")
    print(f"written: cluster.calibration={options.out}")


def suggest_command(overrides: Sequence[str], as_json: bool) -> int:
    """Print them as commands."""
    found = suggest_runs(overrides)
    if as_json:
        print(json.dumps([{"overrides": list(it.overrides), "told": it.description} for it in found], indent=1))
        return EXIT_DONE
    for it in found:
        print(f"# {it.description}\nhpc-train submit {shlex.join(it.overrides)}")
    folders = " ".join(f"runs/calibrate-{number}" for number in range(1, len(found) + 1))
    print(f"# when they are done\nhpc-train plan calibrate --runs {folders} --out calibration.json")
    return EXIT_DONE
