"""`hpc-train bench collectives`: measure the collectives of training and calibrate the fabric.

The command and its result. Rank 0 prints and writes. A calibration is written only if all received data was right.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpc_train.bench.collectives.options import CollectivesOptions
from hpc_train.cluster.calibration import Calibration, LevelConstants
from hpc_train.config.compose import compose
from hpc_train.config.parallel import resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import EXIT_DONE, EXIT_USER_ERROR, UserError
from hpc_train.garbage_collection import pause_gc
from hpc_train.runtime.identity import ProcessIdentity, identify_process

EXIT_WRONG_DATA = 1
"""Exit code if a rank received wrong values."""


def run_collectives_command(overrides: Sequence[str], options: CollectivesOptions) -> int:
    """Measure on local ranks, or as one rank of srun, torchrun or mpirun; returns the exit code."""
    identity = identify_process(os.environ)
    try:
        options.check()
        config = compose(overrides)
        if identity is None:
            return _start_ranks(config, ["bench", "collectives", *overrides, *options.words()])
        return _measure_as_rank(config, options, identity)
    except UserError:
        if identity is None or identity.process == 0:
            raise
        return EXIT_USER_ERROR  # process 0 prints the error for all


def _start_ranks(config: RunConfig, command: list[str]) -> int:
    from hpc_train.bench.local_ranks import run_local_ranks
    from hpc_train.launch.local.rank_pool import count_local_ranks, count_threads_per_rank

    if config.launch.kind != "local":
        raise UserError(
            f"launch={config.launch.kind}: bench runs where it is started; use srun hpc-train bench collectives"
        )
    ranks = count_local_ranks(config)
    resolve_degrees(config.parallel, ranks)
    if ranks < 2:
        raise UserError(f"launch.ranks={ranks}: one rank cannot communicate; set 2 or more")
    return run_local_ranks(command, ranks, count_threads_per_rank(config, ranks))


def _measure_as_rank(config: RunConfig, options: CollectivesOptions, identity: ProcessIdentity) -> int:
    with pause_gc(freeze=True):
        from hpc_train.bench.collectives.measure import measure_collectives

    result = measure_collectives(config, options)
    return report_result(result, options) if identity.process == 0 else choose_exit_code(result)


def report_result(result: CollectivesResult, options: CollectivesOptions) -> int:
    """Print and write the result, but no calibration if values were wrong; returns the exit code.

    Raises UserError if a calibration is asked for and no level could be fitted.
    """
    _print_result(result, options)
    _write_files(result, options)
    if result.wrong:
        print(f"hpc-train: bench collectives: {_describe_wrong(result)}", file=sys.stderr)
    return choose_exit_code(result)


def choose_exit_code(result: CollectivesResult) -> int:
    """Return EXIT_DONE if all received data was right, else EXIT_WRONG_DATA."""
    return EXIT_WRONG_DATA if result.wrong else EXIT_DONE


def _print_result(result: CollectivesResult, options: CollectivesOptions) -> None:
    if options.output == "json":
        print(result.to_json())
    elif options.output == "plain":
        from hpc_train.bench.collectives.collectives_output import format_nccl_tests

        print(format_nccl_tests(result))
    else:
        from hpc_train.bench.collectives.collectives_output import print_collectives_result

        print_collectives_result(result)


def _write_files(result: CollectivesResult, options: CollectivesOptions) -> None:
    if options.plot is not None:
        from hpc_train.bench.collectives.collectives_output import plot_bandwidths

        plot_bandwidths(result, Path(options.plot))
    if options.out is not None and not result.wrong:
        from hpc_train.cluster.calibration import write_calibration

        # A calibration is used by every later plan and placement, so wrong data must not make one.
        calibration = make_calibration(result)
        if not calibration.levels:
            raise UserError(
                f"--out {options.out}: no bandwidth can be fitted to times of these sizes; use a larger --max"
            )
        write_calibration(Path(options.out), calibration)


def _describe_wrong(result: CollectivesResult) -> str:
    """Describe the wrong results in one line."""
    rows = [row for row in result.measurements if row.wrong]
    names = ", ".join(dict.fromkeys(f"{row.operation} {row.algorithm} of {row.backend} on {row.axis}" for row in rows))
    return f"{result.wrong} wrong elements: {names or 'point to point messages'}; no calibration was written"


RESULT_VERSION = 1


@dataclass(frozen=True)
class Measurement:
    """Result of one operation of one size in all groups of one axis."""

    axis: str
    """Mesh axis, or world."""
    groups: int
    """Number of groups of the axis; they run at the same time."""
    ranks: int
    """Ranks of a group."""
    operation: str
    algorithm: str
    """library, or ring or tree, which are ours."""
    backend: str
    size: int
    """Bytes (see CollectiveShape)."""
    count: int
    """Elements (see CollectiveShape)."""
    type: str
    redop: str
    in_place: bool
    seconds: float
    """Seconds of the slowest rank of all groups, median over rounds."""
    quartiles: tuple[float, float]
    algbw: float
    """Algorithm bandwidth in 10^9 bytes/s."""
    busbw: float
    """Bus bandwidth in 10^9 bytes/s."""
    wrong: int
    """Number of wrong elements over all ranks."""


@dataclass(frozen=True)
class LevelFit:
    """Latency and bandwidth of one level with one backend."""

    level: str
    backend: str
    pairs: int
    """Pairs of ranks that exchanged messages at once across the border of a group."""
    sizes: tuple[int, ...]
    """Bytes of a message."""
    seconds: tuple[float, ...]
    latency: float | None
    """Seconds; None, like the bandwidth, if the times do not determine it."""
    bandwidth: float | None
    """Bytes/s out of a group, of all pairs together."""
    error: float | None
    """Maximum relative difference of latency + pairs x size / bandwidth from the measured times."""


@dataclass(frozen=True)
class CollectivesResult:
    """The result that `bench collectives --json` prints."""

    cluster: str
    device: str
    ranks: int
    nodes: int
    degrees: dict[str, int]
    placement: str
    """How ranks were placed on nodes."""
    rounds: int
    date: str
    """ISO 8601, UTC."""
    measurements: tuple[Measurement, ...]
    fits: tuple[LevelFit, ...]
    wrong: int
    """Number of wrong elements of all measurements and probes."""
    notes: tuple[str, ...]
    """Cases that were left out, and the reasons."""

    def to_json(self) -> str:
        return json.dumps({"version": RESULT_VERSION, **asdict(self)}, indent=1)


def make_calibration(result: CollectivesResult) -> Calibration:
    """Return the fitted levels of the first backend, as a calibration."""
    backend = result.fits[0].backend if result.fits else ""
    levels = tuple(
        LevelConstants(fit.level, fit.latency, fit.bandwidth)
        for fit in result.fits
        if fit.backend == backend and fit.latency is not None and fit.bandwidth is not None
    )
    return Calibration(result.cluster, backend, result.date, levels)
