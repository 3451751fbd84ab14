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
"""Of log(time) of a run by itself; beyond it a run counts less (soft_l1)."""
_WIDTH = 0.2
"""How far from cluster to cluster a constant is expected to differ, in shares of its range (standard deviation)."""
_SCALE = 0.05
"""The same of log(scale), what none of them explains."""


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
            values[name] = float(np.clip(getattr(constants, name) + by * _WIDTH * (high - low), low, high))
        return replace(constants, **values, scale=constants.scale * float(np.exp(step[-1] * _SCALE)))

    def residuals(step: Floats) -> Floats:
        errors = np.log(time(jobs, moved(step)).step / measured) / _ERROR
        return np.concatenate([np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1)), step])

    return moved(least_squares(residuals, np.zeros(len(limits) + 1), max_nfev=30).x)


def chosen(runs: Sequence[Run], count: int) -> list[Run]:
    """`count` of a cluster's timed runs: evenly spread over all of them from the fastest step to the slowest, ends left
    out. Deterministic; does not look at predictions."""
    timed = sorted((run for run in runs if np.isfinite(run.seconds)), key=lambda run: (run.seconds, run.id))
    if len(timed) <= count:
        return timed
    places = (np.arange(count) + 0.5) * len(timed) / count
    return [timed[int(place)] for place in places]


def by_cluster(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Cluster -> its runs, in order."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[run.cluster].append(run)
    return dict(found)
