"""Compare predictions with measured runs: errors of time and memory, and whether the planner would have picked well."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from hpc_train.errors import UserError
from hpc_train.planner.calibration.fit import (
    calibrate_constants,
    choose_calibration_runs,
    group_by_cluster,
    select_reported_memory,
)
from hpc_train.planner.calibration.run_table import MeasuredRun, RefusedRun, RunTable, jobs_from_runs
from hpc_train.planner.calibration.unstated import predict_spread
from hpc_train.planner.constants import Constants, without_residuals
from hpc_train.planner.model.inputs import RECOMPUTE
from hpc_train.planner.model.jobs import Jobs, replace_columns
from hpc_train.planner.model.memory import FITS, NO, YES, estimate_memory
from hpc_train.planner.model.step_time import estimate_step_time
from hpc_train.planner.search.top_candidates import EQUAL_TIME_TOLERANCE, layout_complexity

_P90 = NormalDist().inv_cdf(0.9)
BAND_FAMILY = 10
"""Least number of runs of a family of which a share is given."""
_LEAST_CONTEST = 2
"""Minimum number of configurations of one job that are compared: with fewer there is no choice to get wrong."""


@dataclass(frozen=True)
class PredictedRun:
    """One measured run and its prediction."""

    run: MeasuredRun
    seconds: float
    """Predicted step time."""
    memory: float
    """Predicted bytes, measured as the run did, on the rank that it reports (default: the one that needs most)."""
    fits: str
    ranked: float = 0.0
    """Step time without residuals, which is what a search sorts candidates by; 0: the same as `seconds`."""
    spread: float = 0.0
    """Standard deviation of log(measured / predicted) that the prediction states."""

    @property
    def ratio(self) -> float:
        """Predicted over measured time; NaN if no time is stated."""
        return self.seconds / self.run.seconds

    @property
    def memory_ratio(self) -> float:
        return self.memory / self.run.memory

    @property
    def inside(self) -> bool:
        """Whether the measured time is between p10 and p90; without meaning if no time is stated."""
        return abs(math.log(self.ratio)) <= _P90 * self.spread


@dataclass(frozen=True)
class ErrorStatistics:
    """Errors of predicted over measured values, as fractions of 1."""

    n: int
    mape: float
    median: float
    bias: float


@dataclass(frozen=True)
class MemoryErrors:
    """Errors of predicted memory, and of the prediction whether a run fits."""

    n: int
    mape: float
    oom_missed: int
    """Runs that ran out of memory but were predicted to fit."""
    false_oom: int
    """Runs that fitted but were predicted not to."""
    oom: int
    """Runs that ran out of memory."""
    maybe: float
    """Share of the runs that fitted for which the prediction was maybe."""


@dataclass(frozen=True)
class BandCoverage:
    """Share of the measured times that are between p10 and p90, which should be 80 %."""

    n: int
    inside: float
    families: dict[str, float]
    """By family, of those with at least BAND_FAMILY runs."""


@dataclass(frozen=True)
class Regret:
    """Slowdown of the configuration the planner picks relative to the fastest measured one, over groups."""

    n: int
    mean: float
    worst: float


@dataclass(frozen=True)
class Validation:
    """Result of comparing one table of runs with the predictions."""

    overall: ErrorStatistics
    families: dict[str, ErrorStatistics]
    memory: MemoryErrors
    regret: Regret
    band: BandCoverage
    refused: tuple[RefusedRun, ...]
    rows: tuple[PredictedRun, ...]


def validate_predictions(runs: RunTable, constants: Constants, calibrated: int = 0) -> Validation:
    """Predict every run that can be modelled, and compare.

    calibrated: number of runs of each cluster and software to calibrate its constants with; these runs are left out of
    the errors of time.
    """
    spare: set[str] = set()
    rows: list[PredictedRun] = []
    for members in group_by_cluster(runs.runs):
        some = choose_calibration_runs(members, calibrated) if calibrated else []
        spare |= {run.id for run in some}
        rows += predict_runs(members, calibrate_constants(some, constants))
    order = {run.id: place for place, run in enumerate(runs.runs)}
    # Back into the order of the table; they were predicted cluster by cluster.
    rows.sort(key=lambda row: order[row.run.id])
    timed = [row for row in rows if row.run.id not in spare]
    return summarise_rows(rows, timed, runs.refused)


def summarise_rows(
    rows: Sequence[PredictedRun], timed: Sequence[PredictedRun], refused: Sequence[RefusedRun]
) -> Validation:
    """Summarise the errors. timed: the rows whose time counts."""
    return Validation(
        overall=summarize_errors(row.ratio for row in timed),
        families=measure_errors_by_family(timed),
        memory=_summarize_memory(rows),
        regret=measure_regret(timed),
        band=measure_band(timed),
        refused=tuple(refused),
        rows=tuple(rows),
    )


def predict_runs(runs: Sequence[MeasuredRun], constants: Constants) -> list[PredictedRun]:
    """Predict all runs, one row per run."""
    if not runs:
        return []
    jobs = jobs_from_runs(runs)
    seconds, memory = (
        estimate_step_time(jobs, constants).step,
        estimate_memory(_assume_least_memory(jobs, runs), constants),
    )
    ranked = estimate_step_time(jobs, without_residuals(constants)).step
    spread = predict_spread(runs, constants)
    columns = zip(runs, seconds, select_reported_memory(runs, memory), memory.fits, ranked, spread, strict=True)
    return [
        PredictedRun(run, float(one), float(two), FITS[int(code)], float(key), float(deviation))
        for run, one, two, code, key, deviation in columns
    ]


def _assume_least_memory(jobs: Jobs, runs: Sequence[MeasuredRun]) -> Jobs:
    """Assume full recomputation where a run does not state any: it needs the least memory."""
    unknown = np.array(["recompute" in run.assumed for run in runs])
    return replace_columns(jobs, recompute=np.where(unknown, RECOMPUTE.index("full"), jobs.recompute))


def measure_errors_by_family(rows: Iterable[PredictedRun]) -> dict[str, ErrorStatistics]:
    """Return the errors of each family, sorted by name; runs without a stated time are left out."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if np.isfinite(row.ratio):
            ratios[row.run.family].append(row.ratio)
    return {name: summarize_errors(ratios[name]) for name in sorted(ratios)}


def summarize_errors(ratios: Iterable[float]) -> ErrorStatistics:
    """Summarise errors; NaN are left out."""
    off = np.array([ratio - 1 for ratio in ratios if np.isfinite(ratio)])
    if not len(off):
        return ErrorStatistics(0, 0.0, 0.0, 0.0)
    return ErrorStatistics(len(off), float(np.abs(off).mean()), float(np.median(np.abs(off))), float(off.mean()))


def _summarize_memory(rows: Sequence[PredictedRun]) -> MemoryErrors:
    errors = summarize_errors(row.memory_ratio for row in rows)
    ran = [row for row in rows if not row.run.out_of_memory and _was_on_device(row.run)]
    out = [row for row in rows if row.run.out_of_memory]
    return MemoryErrors(
        n=errors.n,
        mape=errors.mape,
        oom_missed=sum(row.fits == FITS[YES] for row in out),
        false_oom=sum(row.fits == FITS[NO] for row in ran),
        oom=len(out),
        maybe=sum(row.fits == "maybe" for row in ran) / max(len(ran), 1),
    )


def _was_on_device(run: MeasuredRun) -> bool:
    """Return whether the run was really measured: one computed on paper may need more memory than the device has."""
    return np.isfinite(run.seconds) or (np.isfinite(run.memory) and run.memory < run.columns["memory_bytes"])


def measure_band(rows: Iterable[PredictedRun]) -> BandCoverage:
    """Count how many measured times are between p10 and p90 of their predictions."""
    inside: dict[str, list[bool]] = defaultdict(list)
    for row in rows:
        if np.isfinite(row.ratio):
            inside[row.run.family].append(row.inside)
    every = [flag for flags in inside.values() for flag in flags]
    families = {name: float(np.mean(inside[name])) for name in sorted(inside) if len(inside[name]) >= BAND_FAMILY}
    return BandCoverage(len(every), float(np.mean(every)) if every else 0.0, families)


def measure_regret(rows: Iterable[PredictedRun]) -> Regret:
    """Compute the regret over contests: the same model, device, GPUs, batch and precision in several configurations.

    Runs that are equal to the planner (other versions of the software) count as one configuration of their mean time.
    """
    contests: dict[str, dict[tuple[float, ...], list[PredictedRun]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if np.isfinite(row.ratio):
            contests[row.run.contest][tuple(row.run.columns.values())].append(row)
    regrets = [_compute_regret(list(runs.values())) for runs in contests.values() if len(runs) >= _LEAST_CONTEST]
    return Regret(len(regrets), float(np.mean(regrets)) if regrets else 0.0, max(regrets, default=0.0))


def _compute_regret(configurations: Sequence[Sequence[PredictedRun]]) -> float:
    measured = [float(np.mean([row.run.seconds for row in rows])) for rows in configurations]
    return measured[_pick_as_planner([rows[0] for rows in configurations])] / min(measured) - 1


def _pick_as_planner(configurations: Sequence[PredictedRun]) -> int:
    """Choose as `hpc-train plan` does: the simplest of the candidates equal to the fastest."""
    limit = min(map(_get_ranked_seconds, configurations)) * (1 + EQUAL_TIME_TOLERANCE)
    near_best = [place for place, row in enumerate(configurations) if _get_ranked_seconds(row) <= limit]
    return min(
        near_best,
        key=lambda place: (
            _compute_complexity(configurations[place].run),
            _get_ranked_seconds(configurations[place]),
            place,
        ),
    )


def _compute_complexity(run: MeasuredRun) -> float:
    columns = {name: np.atleast_1d(np.float64(value)) for name, value in run.columns.items()}
    return float(layout_complexity({**columns, "recompute_every": np.ones(1)})[0])


def _get_ranked_seconds(row: PredictedRun) -> float:
    return row.ranked or row.seconds


def draw_validation(validation: Validation, path: Path) -> None:
    """Plot predicted over measured step time to a file.

    Raises UserError without matplotlib, without a run to draw, or if the file cannot be written.
    """
    rows = [row for row in validation.rows if np.isfinite(row.ratio)]
    if not rows:
        raise UserError("--plot: nothing to draw: no run states a time and can be modelled")
    try:
        import matplotlib
    except ImportError:
        raise UserError("--plot: needs matplotlib; pip install 'hpc_train[plot]'") from None
    # Agg draws without a display.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 6.0), layout="constrained")
    for name, errors in validation.families.items():
        points = [(row.run.seconds, row.seconds) for row in rows if row.run.family == name]
        axes.plot(*zip(*points, strict=True), "o", markersize=4, alpha=0.7, label=f"{name} ({errors.mape:.1%})")
    ends = np.array([min(row.run.seconds for row in rows) / 1.5, max(row.run.seconds for row in rows) * 1.5])
    axes.plot(ends, ends, color="0.3", linewidth=1)
    axes.fill_between(ends, ends * 0.9, ends * 1.1, color="0.85", zorder=0, label="within 10 %")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured seconds per step", ylabel="predicted")
    axes.set_title(f"{validation.overall.n} runs, mean error {validation.overall.mape:.1%}")
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}; give a file .png, .svg or .pdf in a folder that exists") from None
    finally:
        pyplot.close(figure)
