"""What measured runs of a cluster tell that no constant explains: settings like theirs are off as they are.

The model is wrong in ways that its constants cannot mend, and by about as much for settings that are alike. That error
is a Gaussian process over the settings, which a few runs condition (Kennedy and O'Hagan 2001, Bayesian Calibration of
Computer Models, J. R. Statist. Soc. B 63(3), section 4): nothing is changed far from them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hpc_train.cluster.calibration import Residual
from hpc_train.planner.jobs import Column, Jobs

Floats = NDArray[np.float64]

SETTINGS = ("hidden", "sequence", "tp", "pp", "virtual_stages", "micro_batch")
"""Columns that make settings alike. None is of a technique, whose order by time must not change within a layout."""
LENGTH = 1.5
"""Doublings of one setting, over which the likeness of two falls to exp(-1/2)."""
DEVIATION = 0.1
"""Standard deviation of the error, of log(time): with LENGTH from the residuals of all clusters, each left out once."""


def likeness(one: Jobs, other: Jobs) -> Floats:
    """[n, m] correlation of the errors of n jobs and of m others."""
    a, b = (np.log2([np.broadcast_to(getattr(jobs, name), jobs.n) for name in SETTINGS]) for jobs in (one, other))
    found: Floats = np.exp(-0.5 * np.sum((a[:, :, None] - b[:, None, :]) ** 2, axis=0) / LENGTH**2)
    return found


def residuals(jobs: Jobs, errors: Floats) -> tuple[Residual, ...]:
    """Of runs: errors, [n] of log(time), as a sum of likenesses. Runs alike share theirs: a matrix may be singular."""
    weights = np.linalg.pinv(likeness(jobs, jobs), rcond=1e-6, hermitian=True) @ errors
    settings = [np.broadcast_to(getattr(jobs, name), jobs.n) for name in SETTINGS]
    return tuple(
        Residual({name: float(it[row]) for name, it in zip(SETTINGS, settings, strict=True)}, float(weights[row]))
        for row in range(jobs.n)
    )


def factor(jobs: Jobs, known: Sequence[Residual]) -> Column:
    """Of the time of each job, by the runs that are like it."""
    found = np.zeros(())
    for it in known:
        apart = sum((np.log2(getattr(jobs, name) / it.settings[name]) ** 2 for name in SETTINGS), np.zeros(()))
        found = found + it.weight * np.exp(-0.5 * apart / LENGTH**2)
    return np.exp(found)
