"""`hpc-train bench checkpoint`: time saves, stalls, loads and verification, beside raw disk I/O and other libraries.

Starts the ranks for every directory and number of ranks, collects their times and summarises them by medians.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_train.bench.local_ranks import exit_on_sigterm, run_processes
from hpc_train.errors import EXIT_DONE, UserError

_SETTING_FILE = "setting.json"
_EXTRA_COPIES = 2
"""Maximum copies of the state in a directory at once, besides one for each side."""


def run_checkpoint_command(options: CheckpointBenchOptions, as_json: bool, plot: Path | None = None) -> int:
    """Measure and print. Returns the exit code; raises UserError for options that cannot be measured."""
    _check_options(options, plot)
    settings = []
    with exit_on_sigterm():
        for directory in options.directories:
            for ranks in options.ranks:
                setting = _run_ranks(options, Path(directory), ranks)
                if isinstance(setting, int):
                    return setting
                settings.append(setting)
    result = CheckpointBenchResult(options, settings, os.cpu_count() or 1)
    if plot is not None:
        from hpc_train.bench.checkpoint.checkpoint_output import plot_checkpoint_result

        plot_checkpoint_result(result, plot)
    if as_json:
        print(result.to_json())
    else:
        from hpc_train.bench.checkpoint.checkpoint_output import print_checkpoint_result

        print_checkpoint_result(result)
    return EXIT_DONE


def _check_options(options: CheckpointBenchOptions, plot: Path | None) -> None:
    if not 0 < options.gib < float("inf"):
        raise UserError(f"--gib {options.gib:g}: must be above 0")
    for name, values in (("ranks", options.ranks), ("rounds", (options.rounds,)), ("tensors", (options.tensors,))):
        for value in values:
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: must be at least 1")
    for name, given, allowed in (
        ("operations", options.operations, OPERATIONS),
        ("sides", options.sides, SIDES),
    ):
        if unknown := [choice for choice in given if choice not in allowed]:
            raise UserError(f"--{name} {unknown[0]}: is none of {', '.join(allowed)}")
    if set(options.operations) <= set(RESHARDINGS):
        if 1 in options.ranks:
            raise UserError(f"--ranks 1: has no other layout, for {options.operations[0]}; use 2 or more")
        if not {OUR_SIDE, DCP} & set(options.sides):
            raise UserError(f"--sides: only {OUR_SIDE} and {DCP} load in another layout; name one of them")
    for directory in map(Path, options.directories):
        if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
            raise UserError(f"--directory {directory}: not a directory that can be written to; make it first")
        free, need = shutil.disk_usage(directory).free, int((len(options.sides) + _EXTRA_COPIES) * options.gib * 2**30)
        if free < need:
            raise UserError(
                f"--directory {directory}: {free / 2**30:.1f} GiB are free and {need / 2**30:.1f} GiB are needed;"
                " choose another, or a smaller --gib"
            )
    if plot is not None and find_spec("matplotlib") is None:
        raise UserError("--plot: matplotlib is not installed; pip install 'hpc_train[plot]'")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: its folder is not there; make it first")


def _run_ranks(options: CheckpointBenchOptions, directory: Path, ranks: int) -> SettingResult | int:
    """Run the ranks and return their result, or their exit code if they failed; clean the directory up."""
    with (
        tempfile.TemporaryDirectory(prefix="hpc_train-bench-") as meeting,
        tempfile.TemporaryDirectory(prefix="hpc_train-bench-", dir=directory) as place,
    ):
        base = [sys.executable, "-m", "hpc_train.bench.checkpoint.rank"]
        rest = [str(ranks), json.dumps(asdict(options)), place, meeting]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        code = run_processes(([*base, str(rank), *rest], environment) for rank in range(ranks))
        return code or _parse_setting(json.loads((Path(meeting) / _SETTING_FILE).read_text()))


def _parse_setting(body: dict[str, object]) -> SettingResult:
    rows: list[dict[str, object]] = body.pop("lines")  # type: ignore[assignment]
    lines = []
    for row in rows:
        over: dict[str, dict[str, float]] = row.pop("over")  # type: ignore[assignment]
        lines.append(OperationResult(**row, over={base: SpeedRatio(**ratio) for base, ratio in over.items()}))  # type: ignore[arg-type]
    return SettingResult(**body, lines=lines)  # type: ignore[arg-type]


OUR_SIDE = "hpc_train"
RAW_DIRECT, RAW_BUFFERED, DCP = "raw_direct", "raw_buffered", "dcp"
BASE_SIDES = (RAW_DIRECT, RAW_BUFFERED, DCP)
SAVE, STALL, LOAD_COLD, LOAD_WARM, VERIFY = "save", "stall", "load_cold", "load_warm", "verify"
RESHARD_TO_MORE, RESHARD_TO_FEWER, RESHARD_COLUMNS = "reshard_1_to_n", "reshard_n_to_1", "reshard_columns"
RESHARDINGS = (RESHARD_TO_MORE, RESHARD_TO_FEWER, RESHARD_COLUMNS)
"""Loads in another layout: by all ranks what one saved; by one what all saved by rows; by columns what all saved."""
OPERATIONS = (SAVE, STALL, LOAD_COLD, LOAD_WARM, VERIFY, *RESHARDINGS)
SIDES = (OUR_SIDE, RAW_DIRECT, RAW_BUFFERED, "torch_save", "safetensors", DCP, "dcp_async", "dcp_async_cached")

Samples = NDArray[np.float64]
"""[rounds, 3]: wall seconds of the slowest rank, CPU seconds of all ranks, bytes read by all ranks."""
Measured = Mapping[str, Mapping[str, Samples]]
"""Samples by operation and side."""


@dataclass(frozen=True)
class CheckpointBenchOptions:
    """Options of `bench checkpoint`."""

    gib: float
    """GiB of state over all ranks."""
    ranks: tuple[int, ...]
    tensors: int | None
    """Number of tensors of equal size, over all ranks; None: those of a transformer with its AdamW state."""
    directories: tuple[str, ...]
    rounds: int
    operations: tuple[str, ...] = OPERATIONS
    sides: tuple[str, ...] = SIDES


@dataclass(frozen=True)
class SpeedRatio:
    """How many times as fast as another side: median and quartiles of the ratios of each round."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class OperationResult:
    """Result of one operation of one side."""

    operation: str
    side: str
    seconds: float
    """Seconds of the slowest rank, median over rounds."""
    quartiles: tuple[float, float]
    gib_per_second: float
    cpu_seconds_per_gib: float
    """CPU seconds of all ranks and threads per GiB."""
    over: dict[str, SpeedRatio]
    """Speed ratio to each base side: raw_direct, raw_buffered, dcp."""
    read: float | None = None
    """For resharding: bytes that all ranks read over bytes that they need."""


@dataclass(frozen=True)
class SettingResult:
    """Results of one directory and number of ranks."""

    directory: str
    file_system: str
    ranks: int
    tensors: int
    """Number of tensors over all ranks."""
    gib: float
    lines: list[OperationResult]
    missing: dict[str, str]
    """Sides that cannot be measured here, and the reasons."""
    load_average: tuple[float, float]
    """Load average of the last minute, before and after the measurement."""


@dataclass(frozen=True)
class CheckpointBenchResult:
    """The result that `bench checkpoint --json` prints."""

    options: CheckpointBenchOptions
    settings: list[SettingResult]
    cpus: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def summarise_operations(measured: Measured, gib: float) -> list[OperationResult]:
    """Summarise samples by medians, quartiles and ratios, with the sides of an operation sorted by speed."""
    operations = []
    for operation, sides in measured.items():
        rows = [_summarise_side(operation, side, sides, gib) for side in sides]
        operations += sorted(rows, key=lambda row: row.seconds)
    return operations


def _summarise_side(operation: str, side: str, sides: Mapping[str, Samples], gib: float) -> OperationResult:
    wall, cpu, read = sides[side].T
    low, median, high = (float(value) for value in np.quantile(wall, (0.25, 0.5, 0.75)))
    over = {base: _compute_ratio(sides[base][:, 0] / wall) for base in BASE_SIDES if base in sides and base != side}
    times = float(np.median(read)) / 2**30 / gib if operation in RESHARDINGS else None
    return OperationResult(
        operation=operation,
        side=side,
        seconds=median,
        quartiles=(low, high),
        gib_per_second=gib / median,
        cpu_seconds_per_gib=float(np.median(cpu)) / gib,
        over=over,
        read=times,
    )


def _compute_ratio(samples: Samples) -> SpeedRatio:
    low, median, high = (float(value) for value in np.quantile(samples, (0.25, 0.5, 0.75)))
    return SpeedRatio(median, low, high)


def read_load_average() -> float:
    """Return the load average of the last minute; above the number of CPUs other work used the machine too."""
    return os.getloadavg()[0]
