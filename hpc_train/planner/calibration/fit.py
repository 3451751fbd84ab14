"""Fit the planner's constants to measured runs: the constants of the package, and those of one cluster.

fit_constants makes the constants that the package ships. It is deterministic, stays within physical bounds, and has no
constant that is for a single row of the table. calibrate_constants adapts them to a few runs of one cluster, moving
them no further than the runs require; errors that remain become residuals for similar settings (constants.py).
"""

from __future__ import annotations

import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hpc_train.planner.calibration.run_table import MeasuredRun, jobs_from_runs, measured_seconds
from hpc_train.planner.constants import (
    EXPERTS,
    MEMORY,
    PYTORCH,
    RESIDUAL_DEVIATION,
    TIME,
    Constants,
    constant_bounds,
    error_correlation,
    fit_residuals,
    replace_values,
)
from hpc_train.planner.evidence import count_evidence
from hpc_train.planner.model.inputs import FSDP
from hpc_train.planner.model.jobs import Jobs, job_columns
from hpc_train.planner.model.memory import Memory, estimate_memory
from hpc_train.planner.model.step_time import estimate_step_time


def select_reported_memory(runs: Sequence[MeasuredRun], memory: Memory) -> NDArray[np.float64]:
    """Return the predicted bytes as each run measured its memory, [runs].

    memory: of the runs' jobs, one row per run.
    """
    stages = {"device": memory.stages, "reserved": memory.reserved, "allocated": memory.allocated}
    reported = np.zeros(len(runs))
    for place, run in enumerate(runs):
        column = stages[run.memory_of][:, place]
        reported[place] = column[0] if run.first_stage else column.max()
    return reported


Floats = NDArray[np.float64]

_PRIOR = 0.03
"""Weight that pulls a constant to its start value, per share of its range, so that it stays there without data."""
_TOLERATED = 0.15
"""Runs with a larger error of log(time) get less weight: some published runs have errors that no model explains."""
FOLDS = 5
"""Number of groups of runs; one is held out from the fit of the shipped constants."""


def assign_fold(group: str, folds: int) -> int:
    """Return the fold of a group of runs: a hash (CRC-32) of its name, so that it is the same in every table."""
    return zlib.crc32(group.encode()) % folds


def select_training_runs(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """Return the runs that the shipped constants are fitted to.

    A table with a column `held_out` says so itself, by source; of others, a fifth of the groups is held out.
    """
    return [run for run in runs if not (assign_fold(run.group, FOLDS) == 0 if run.held_out is None else run.held_out)]


def fit_constants(runs: Sequence[MeasuredRun]) -> Constants:
    """Fit the constants of time to runs with a stated time, and those of memory to runs with stated memory."""
    constants = Constants()
    timed = [run for run in runs if np.isfinite(run.seconds)]
    with_memory = [run for run in runs if np.isfinite(run.memory)]
    dense, mixed = (
        [run for run in timed if (run.columns["experts"] > 0) == with_experts] for with_experts in (False, True)
    )
    # First what all have in common, from dense models; then what only PyTorch's stacks and mixtures of experts have.
    pytorch = [run for run in dense if run.columns["stack"] == FSDP]
    sizes = Counter(run.family for run in timed)
    if common := [run for run in dense if run not in pytorch or run.columns["tp"] == 1]:
        constants = _fit_time(common, constants, sizes, TIME, PYTORCH)
    if pytorch:
        constants = _fit_time(pytorch, constants, sizes, PYTORCH)
    if mixed:
        constants = _fit_time(mixed, constants, sizes, EXPERTS)
    return _fit_memory(with_memory, constants) if with_memory else constants


def _fit_time(runs: Sequence[MeasuredRun], start: Constants, family_sizes: Mapping[str, int], *kinds: str) -> Constants:
    jobs, measured = jobs_from_runs(runs), measured_seconds(runs)

    def errors(constants: Constants) -> Floats:
        log_errors: Floats = np.log(estimate_step_time(jobs, constants).step / measured)
        return log_errors

    return _solve(list(constant_bounds(*kinds)), start, errors, weight_runs(runs, family_sizes))


def _fit_memory(runs: Sequence[MeasuredRun], start: Constants) -> Constants:
    jobs, measured = jobs_from_runs(runs), np.array([run.memory for run in runs])

    def errors(constants: Constants) -> Floats:
        log_errors: Floats = np.log(select_reported_memory(runs, estimate_memory(jobs, constants)) / measured)
        return log_errors

    return _solve(list(constant_bounds(MEMORY)), start, errors, weight_runs(runs, Counter(run.family for run in runs)))


def weight_runs(runs: Sequence[MeasuredRun], family_sizes: Mapping[str, int]) -> Floats:
    """Weight runs so that a family of n runs counts as n^(1/4): a long table must not dominate the fit.

    family_sizes: runs of each family, of which `runs` may have some only.
    """
    # Weighted errors are squared: n runs of this weight count as n x n^-0.75 together.
    return np.array([family_sizes[run.family] ** -0.375 for run in runs])


def _solve(names: Sequence[str], start: Constants, errors: Callable[[Constants], Floats], weights: Floats) -> Constants:
    """Minimise squared errors with a robust loss, within bounds."""
    limits = constant_bounds()
    low, high = (np.array([limits[name][side] for name in names]) for side in (0, 1))
    begin = np.array([getattr(start, name) for name in names])
    weights = weights / np.sqrt(np.sum(weights**2) / len(weights))
    pull = _PRIOR * np.sqrt(len(weights))

    def residuals(share: Floats) -> Floats:
        constants = replace_values(start, dict(zip(names, low + share * (high - low), strict=True)))
        return np.concatenate([_soft_l1_root(errors(constants)) * weights, pull * (share - first)])

    # In shares of the constants' ranges, so that seconds and factors weigh alike; begun a little inside the bounds, at
    # which trf shortens its steps.
    first = (begin - low) / (high - low)
    solution = least_squares(
        residuals, np.clip(first, 1e-3, 1 - 1e-3), bounds=(0, 1), method="trf", xtol=1e-5, ftol=1e-6
    )
    values = low + solution.x * (high - low)
    # Four digits: further ones would differ between machines, and say nothing.
    return replace_values(start, {name: float(f"{value:.4g}") for name, value in zip(names, values, strict=True)})


def _soft_l1_root(errors: Floats) -> Floats:
    """Return the root of the soft-L1 loss: linear beyond the tolerance (Triggs et al. 2000, section 2.2)."""
    scaled = (errors / _TOLERATED) ** 2
    root: Floats = np.sign(errors) * _TOLERATED * np.sqrt(2 * (np.sqrt(1 + scaled) - 1))
    return root


@dataclass(frozen=True)
class HeldOutFit:
    """Runs held out from a fit, and the fit's constants."""

    runs: tuple[MeasuredRun, ...]
    constants: Constants


def count_run_evidence(runs: Sequence[MeasuredRun]) -> dict[str, int]:
    """Count the timed runs that had each technique."""
    timed = [run for run in runs if np.isfinite(run.seconds)]
    return count_evidence(job_columns(jobs_from_runs(timed))) if timed else {}


def fit_leaving_out(runs: Sequence[MeasuredRun], key: Callable[[MeasuredRun], object]) -> tuple[HeldOutFit, ...]:
    """For each group of timed runs with the same key, fit the constants of time to all other runs."""
    timed = [run for run in runs if np.isfinite(run.seconds)]
    parts: dict[str, list[MeasuredRun]] = {}
    for run in timed:
        parts.setdefault(str(key(run)), []).append(run)
    fits = []
    for name in sorted(parts):
        others = [run for run in timed if str(key(run)) != name and not run.held_out]
        fits.append(HeldOutFit(tuple(parts[name]), fit_constants([replace(run, memory=math.nan) for run in others])))
    return tuple(fits)


_ERROR = 0.05
"""Scale of the error of log(time) of a single run. It is Cauchy distributed, so that a disturbed run hardly counts if
the others agree."""
_WIDTH = 0.2
"""Standard deviation of a constant between clusters, as a share of its range."""
_SCALE_DEVIATION = 0.05
"""Scale of log(Constants.scale) between clusters. Cauchy distributed, because some clusters are outliers."""


def calibrate_constants(runs: Sequence[MeasuredRun], constants: Constants) -> Constants:
    """Adapt the constants to the cluster that measured `runs`, and keep the remaining errors as residuals.

    The result is the maximum a posteriori estimate, with the distributions above as prior. Runs without a time are left
    out; if none has one, the constants are returned unchanged.
    """
    timed = [run for run in runs if np.isfinite(run.seconds)]
    if not timed:
        return constants
    jobs, measured = jobs_from_runs(timed), measured_seconds(timed)
    kinds = [EXPERTS] if jobs.has_experts else []
    kinds += [PYTORCH] if np.any(jobs.stack == FSDP) else []
    limits = constant_bounds(TIME, *kinds)
    root, count = _matrix_root(RESIDUAL_DEVIATION**2 * error_correlation(jobs, jobs)), len(limits)

    # The unknowns, each in units of its standard deviation: all constants, log(scale), and an error for each run that
    # is correlated between similar settings (root @ ...).
    def moved(step: Floats) -> Constants:
        values = {}
        for (name, (low, high)), by in zip(limits.items(), step, strict=False):
            before = getattr(constants, name)  # what was measured may lie outside of what is usual
            limit = min(low, before), max(high, before)
            values[name] = float(np.clip(before + by * _WIDTH * (high - low), *limit))
        return replace_values(
            constants, {**values, "scale": constants.scale * float(np.exp(step[count] * _SCALE_DEVIATION))}
        )

    def unexplained(step: Floats) -> Floats:
        errors: Floats = np.log(estimate_step_time(jobs, moved(step)).step / measured) + root @ step[count + 1 :]
        return _cauchy_root(errors / _ERROR)

    def cost(step: Floats) -> Floats:
        return np.concatenate(
            [unexplained(step), step[:count], _cauchy_root(step[count : count + 1]), step[count + 1 :]]
        )

    start = np.zeros(count + 1 + len(timed))
    start[count] = -np.median(np.log(estimate_step_time(jobs, constants).step / measured)) / _SCALE_DEVIATION
    best = least_squares(cost, start, max_nfev=30).x
    return replace(moved(best), residuals=constants.residuals + fit_residuals(jobs, root @ best[count + 1 :]))


def _matrix_root(matrix: Floats) -> Floats:
    """Return a square root of a covariance matrix. A Cholesky factor would fail: equal settings make it singular."""
    values, vectors = np.linalg.eigh(matrix)
    root: Floats = vectors * np.sqrt(np.maximum(values, 0))
    return root


def _cauchy_root(errors: Floats) -> Floats:
    """Return the square roots of the Cauchy loss, which least_squares squares again."""
    root: Floats = np.sign(errors) * np.sqrt(np.log1p(errors**2))
    return root


def choose_calibration_runs(
    runs: Sequence[MeasuredRun], count: int, among: Sequence[MeasuredRun] | None = None
) -> list[MeasuredRun]:
    """Choose the `count` timed runs of a cluster whose settings tell most about all its runs.

    among: runs to choose from; None: all. The choice depends on settings only, not on times, and is deterministic.
    """
    timed = sorted((run for run in runs if np.isfinite(run.seconds)), key=lambda run: run.id)
    rows = [row for row, run in enumerate(timed) if among is None or run in among]
    return [timed[row] for row in choose_informative_jobs(jobs_from_runs(timed), count, rows)] if timed else []


def choose_informative_jobs(jobs: Jobs, count: int, among: Sequence[int]) -> list[int]:
    """Choose `count` of the rows `among`, one by one, each time the one that leaves least uncertainty about all jobs.

    Uncertainty is the sum of the variances of the jobs' errors and of a scale that all share, given the rows chosen
    before (A-optimality: Chaloner and Verdinelli 1995, Bayesian Experimental Design, Statistical Science 10(3)).
    """
    variance = _SCALE_DEVIATION**2 + RESIDUAL_DEVIATION**2 * error_correlation(jobs, jobs)
    chosen: list[int] = []
    for _ in range(min(count, len(among))):
        # How much the sum of all variances shrinks if the row is measured with noise _ERROR.
        gain = (variance**2).sum(axis=0) / (np.diag(variance) + _ERROR**2)
        place = max((row for row in among if row not in chosen), key=lambda row: (gain[row], -row))
        chosen.append(place)
        column = variance[:, place]
        variance = variance - np.outer(column, column) / (column[place] + _ERROR**2)
    return chosen


def group_by_cluster(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """Group runs by cluster and software, in order."""
    groups: dict[tuple[str, str], list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        groups[run.cluster, run.software].append(run)
    return list(groups.values())
