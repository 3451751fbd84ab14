"""`hpc-train plan calibrate`: turn benchmarks and short runs of a cluster into one file for cluster.calibration.

With --suggest it only prints which short runs would calibrate the planner's likely layouts best.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.bench.gemm import read_gemm_result
from hpc_train.cluster.calibration import Calibration, DeviceMeasurement
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.planner.calibration.calibrate_cluster import CalibrationReport, CalibrationSources, calibrate_cluster
from hpc_train.planner.calibration.suggest_runs import suggest_runs


@dataclass(frozen=True)
class CalibrateOptions:
    """Files and run directories given on the command line."""

    out: str
    gemm: str | None = None
    collectives: str | None = None
    runs: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    """Runs that are only predicted, as a check."""
    json: bool = False


def calibrate_command(options: CalibrateOptions) -> int:
    """Write the calibration and print what it changes. Raises UserError for files that cannot be read or written."""
    if not (options.gemm or options.collectives or options.runs):
        raise UserError("plan calibrate: no measurements; give --gemm FILE, --collectives FILE or --runs DIR ...")
    path = Path(options.out)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--out {path}: name a file in a folder that exists")
    sources = CalibrationSources(
        device=_read_device(Path(options.gemm)) if options.gemm else None,
        collectives=Path(options.collectives) if options.collectives else None,
        runs=tuple(map(Path, options.runs)),
        check_runs=tuple(map(Path, options.against)),
    )
    measured, report = calibrate_cluster(sources, path)
    if options.json:
        print(json.dumps(asdict(report), indent=1))
    else:
        _print_calibration(measured, report, options)
    return EXIT_DONE


def _read_device(path: Path) -> DeviceMeasurement:
    result = read_gemm_result(path)
    best = {precision: product.tflops for precision, product in result.best().items()}
    return DeviceMeasurement(result.device, best, result.copy_gb_s)


def _print_calibration(measured: Calibration, report: CalibrationReport, options: CalibrateOptions) -> None:
    if measured.device:
        speeds = ", ".join(f"{name} {value:.4g}" for name, value in measured.device.tflops.items())
        print(f"device: {measured.device.name}: TFLOP/s {speeds}; copy {measured.device.memory_gb_s:.4g} GB/s")
    for level in measured.levels:
        print(f"level {level.level}: {level.latency * 1e6:.3g} us + bytes / {level.bandwidth / 1e9:.4g} GB/s")
    for name, (before, after) in report.moved.items():
        print(f"  {name:18s} {before:10.4g} -> {after:.4g}")
    for name, run in report.runs.items():
        times = f"measured {run['measured']:.4g} s, predicted {run['blind']:.4g}, calibrated {run['calibrated']:.4g}"
        print(f"{name}: {times}{'' if name in options.runs else ' (check only)'}")
    if report.runs:
        kind = "check runs" if options.against else "runs, all used for the calibration"
        print(
            f"{report.blind.n} {kind}: MAPE {report.blind.mape:.1%} before, "
            f"{report.calibrated.mape:.1%} after calibration"
        )
    print(f"written: cluster.calibration={options.out}")


def suggest_command(overrides: Sequence[str], as_json: bool) -> int:
    """Print the suggested runs as commands to submit."""
    suggestions = suggest_runs(overrides)
    if as_json:
        print(
            json.dumps(
                [{"overrides": list(run.overrides), "description": run.description} for run in suggestions], indent=1
            )
        )
        return EXIT_DONE
    for run in suggestions:
        print(f"# {run.description}\nhpc-train submit {shlex.join(run.overrides)}")
    folders = " ".join(f"runs/calibrate-{number}" for number in range(1, len(suggestions) + 1))
    print(f"# when they are done\nhpc-train plan calibrate --runs {folders} --out calibration.json")
    return EXIT_DONE
