"""A cluster's own constants from a few of its runs: those of the package, moved no further than the runs ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hpc_train.planner.constants import MEMORY, Constants, bounds
from hpc_train.planner.from_runs import Run, jobs_of, seconds_of
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
    above (maximum a posteriori). Runs without a time are left out; without any, the constants as they are."""
    timed = [run for run in runs if np.isfinite(run.seconds)]
    if not timed:
        return constants
    limits = {name: it for name, it in bounds().items() if name not in MEMORY}
    jobs, measured = jobs_of(timed), seconds_of(timed)

    def moved(step: Floats) -> Constants:
        values = {}
        for (name, (low, high)), by in zip(limits.items(), step[:-1], strict=True):
            before = getattr(constants, name)  # what was measured may lie outside of what is usual
            limit = min(low, before), max(high, before)
            values[name] = float(np.clip(before + by * _WIDTH * (high - low), *limit))
        return replace(constants, **values, scale=constants.scale * float(np.exp(step[-1] * _SCALE)))

    def residuals(step: Floats) -> Floats:
        errors = np.log(time(jobs, moved(step)).step / measured) / _ERROR
        return np.concatenate([_heavy(errors), step[:-1], _heavy(step[-1:])])

    start = np.zeros(len(limits) + 1)
    start[-1] = -np.median(np.log(time(jobs, constants).step / measured)) / _SCALE
    return moved(least_squares(residuals, start, max_nfev=30).x)


def _heavy(errors: Floats) -> Floats:
    """Roots of the Cauchy distribution's loss."""
    found: Floats = np.sign(errors) * np.sqrt(np.log1p(errors**2))
    return found


def chosen(runs: Sequence[Run], count: int, shift: float = 0.5) -> list[Run]:
    """`count` of a cluster's timed runs, evenly spread over all of them from the fastest step to the slowest: one of
    each of `count` equal parts, as far into its part as `shift` says, from 0 to less than 1. Deterministic; does not
    look at predictions."""
    timed = sorted((run for run in runs if np.isfinite(run.seconds)), key=lambda run: (run.seconds, run.id))
    if len(timed) <= count:
        return timed
    places = (np.arange(count) + shift) * len(timed) / count
    return [timed[int(place)] for place in places]


def together(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of one cluster and one software, in order."""
    found: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        found[run.cluster, run.software].append(run)
    return list(found.values())
