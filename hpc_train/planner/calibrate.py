"""A cluster's own constants from a few of its runs: those of the package, moved no further than the runs ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hpc_train.planner.constants import MEMORY, Constants, bounds, with_numbers
from hpc_train.planner.discrepancy import DEVIATION, likeness, residuals
from hpc_train.planner.from_runs import Run, jobs_of, seconds_of
from hpc_train.planner.jobs import Jobs
from hpc_train.planner.step_time import time

Floats = NDArray[np.float64]

_ERROR = 0.05
"""Of log(time) of a run by itself; what is far beyond it hardly counts (a Cauchy distribution): of three runs that two
agree on, the third was disturbed."""
_WIDTH = 0.2
"""How far from cluster to cluster a constant is expected to differ, in shares of its range (standard deviation)."""
_SCALE = 0.05
"""The same of log(scale), what none of them explains; a Cauchy distribution too, so that a cluster may be far off."""


def calibrate(runs: Sequence[Run], constants: Constants) -> Constants:
    """The most probable constants of the cluster that measured `runs`, if constants differ from cluster to cluster as
    above (maximum a posteriori), and what is left over of each run, for settings like it (discrepancy). Runs without a
    time are left out; without any, the constants as they are."""
    timed = [run for run in runs if np.isfinite(run.seconds)]
    if not timed:
        return constants
    limits = {name: it for name, it in bounds().items() if name not in MEMORY}
    jobs, measured = jobs_of(timed), seconds_of(timed)
    root, count = _root(DEVIATION**2 * likeness(jobs, jobs)), len(limits)

    def moved(step: Floats) -> Constants:
        values = {}
        for (name, (low, high)), by in zip(limits.items(), step, strict=False):
            before = getattr(constants, name)  # what was measured may lie outside of what is usual
            limit = min(low, before), max(high, before)
            values[name] = float(np.clip(before + by * _WIDTH * (high - low), *limit))
        return with_numbers(constants, {**values, "scale": constants.scale * float(np.exp(step[count] * _SCALE))})

    def unexplained(step: Floats) -> Floats:
        found: Floats = np.log(time(jobs, moved(step)).step / measured) + root @ step[count + 1 :]
        return _heavy(found / _ERROR)

    def cost(step: Floats) -> Floats:
        return np.concatenate([unexplained(step), step[:count], _heavy(step[count : count + 1]), step[count + 1 :]])

    start = np.zeros(count + 1 + len(timed))
    start[count] = -np.median(np.log(time(jobs, constants).step / measured)) / _SCALE
    found = least_squares(cost, start, max_nfev=30).x
    return replace(moved(found), residuals=constants.residuals + residuals(jobs, root @ found[count + 1 :]))


def _root(matrix: Floats) -> Floats:
    """A root of a symmetric matrix that may be singular, as that of runs with the same settings is."""
    values, vectors = np.linalg.eigh(matrix)
    found: Floats = vectors * np.sqrt(np.maximum(values, 0))
    return found


def _heavy(errors: Floats) -> Floats:
    """Roots of the Cauchy distribution's loss."""
    found: Floats = np.sign(errors) * np.sqrt(np.log1p(errors**2))
    return found


def chosen(runs: Sequence[Run], count: int, among: Sequence[Run] | None = None) -> list[Run]:
    """`count` of a cluster's timed runs, or of those `among` them: the ones whose settings tell most of all others'.
    Deterministic; looks at settings only."""
    timed = sorted((run for run in runs if np.isfinite(run.seconds)), key=lambda run: run.id)
    rows = [row for row, run in enumerate(timed) if among is None or run in among]
    return [timed[row] for row in informative(jobs_of(timed), count, rows)] if timed else []


def informative(jobs: Jobs, count: int, among: Sequence[int]) -> list[int]:
    """`count` of the rows `among` those of jobs, one after the other, each of which leaves least to guess of all jobs
    (the sum of the variances of the process of `discrepancy`, and of a scale that all share, given the rows before:
    Chaloner and Verdinelli 1995, Bayesian Experimental Design, Statistical Science 10(3), A-optimality)."""
    variance = _SCALE**2 + DEVIATION**2 * likeness(jobs, jobs)
    found: list[int] = []
    for _ in range(min(count, len(among))):
        told = (variance**2).sum(axis=0) / (np.diag(variance) + _ERROR**2)
        place = max((row for row in among if row not in found), key=lambda row: (told[row], -row))
        found.append(place)
        column = variance[:, place]
        variance = variance - np.outer(column, column) / (column[place] + _ERROR**2)
    return found


def together(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one cluster and one software, in order."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.cluster, run.software].append(run)
    return list(found.values())
