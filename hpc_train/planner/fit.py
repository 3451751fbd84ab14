"""The fit of the constants to measured runs: deterministic, with physical bounds, few constants and none for a row."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hpc_train.planner.constants import MEMORY, Constants, bounds, with_numbers
from hpc_train.planner.from_runs import Run, jobs_of, seconds_of
from hpc_train.planner.measured import memory_of
from hpc_train.planner.memory import memory
from hpc_train.planner.step_time import time

Floats = NDArray[np.float64]

_PRIOR = 0.03
"""Weight of a constant's distance from where it starts, in shares of its range: what no run tells stays there."""
_TOLERATED = 0.15
"""Error of log(time) from which on a run counts less: some published runs have faults that no model has."""
SPLIT = 5
"""One group of so many is kept out of the fit of the constants that the package comes with."""


def fold_of(group: str, folds: int) -> int:
    """The part of the data that a group of runs is in: a function of its name only (CRC-32), so it never changes."""
    return zlib.crc32(group.encode()) % folds


def training(runs: Iterable[Run]) -> list[Run]:
    """Those whose group the shipped constants are fitted to."""
    return [run for run in runs if fold_of(run.group, SPLIT) != 0]


def fit(runs: Sequence[Run], start: Constants | None = None) -> Constants:
    """Constants of time from the runs that state a time, and of memory from those that state memory."""
    start = start or Constants()
    timed = [run for run in runs if np.isfinite(run.seconds)]
    held = [run for run in runs if np.isfinite(run.memory)]
    if timed:
        start = _fit_time(timed, start)
    return _fit_memory(held, start) if held else start


def _fit_time(runs: Sequence[Run], start: Constants) -> Constants:
    names = [name for name in bounds() if name not in MEMORY]
    jobs, measured = jobs_of(runs), seconds_of(runs)
    return _solve(names, start, lambda constants: np.log(time(jobs, constants).step / measured), weights_of(runs))


def _fit_memory(runs: Sequence[Run], start: Constants) -> Constants:
    jobs, measured = jobs_of(runs), np.array([run.memory for run in runs])

    def errors(constants: Constants) -> Floats:
        found: Floats = np.log(memory_of(runs, memory(jobs, constants)) / measured)
        return found

    return _solve(list(MEMORY), start, errors, weights_of(runs))


def weights_of(runs: Sequence[Run]) -> Floats:
    """Of each run, so that a family of n runs counts as n to the power of a quarter: no long table decides alone."""
    counts = Counter(run.family for run in runs)
    return np.array([counts[run.family] ** -0.375 for run in runs])


def _solve(names: Sequence[str], start: Constants, errors: Callable[[Constants], Floats], weights: Floats) -> Constants:
    """Least squares with a robust loss, within bounds."""
    limits = bounds()
    low, high = (np.array([limits[name][side] for name in names]) for side in (0, 1))
    begin = np.array([getattr(start, name) for name in names])
    weights = weights / np.sqrt(np.sum(weights**2) / len(weights))
    pull = _PRIOR * np.sqrt(len(weights))

    def residuals(share: Floats) -> Floats:
        constants = with_numbers(start, dict(zip(names, low + share * (high - low), strict=True)))
        return np.concatenate([_robust(errors(constants)) * weights, pull * (share - first)])

    first = (begin - low) / (high - low)
    found = least_squares(residuals, np.clip(first, 1e-3, 1 - 1e-3), bounds=(0, 1), method="trf", xtol=1e-5, ftol=1e-6)
    values = low + found.x * (high - low)
    return with_numbers(start, {name: float(f"{value:.4g}") for name, value in zip(names, values, strict=True)})


def _robust(errors: Floats) -> Floats:
    """The root of soft_l1: linear beyond what is tolerated (Triggs et al. 2000, section 2.2)."""
    scaled = (errors / _TOLERATED) ** 2
    found: Floats = np.sign(errors) * _TOLERATED * np.sqrt(2 * (np.sqrt(1 + scaled) - 1))
    return found


@dataclass(frozen=True)
class Part:
    """Runs that a fit has not seen, and what it found without them."""

    runs: tuple[Run, ...]
    constants: Constants


def left_out(runs: Sequence[Run], key: Callable[[Run], object]) -> tuple[Part, ...]:
    """For each part of the timed runs (those with the same key) a fit of time to all others."""
    timed = [run for run in runs if np.isfinite(run.seconds)]
    parts: dict[str, list[Run]] = {}
    for run in timed:
        parts.setdefault(str(key(run)), []).append(run)
    found = []
    for name in sorted(parts):
        others = [run for run in timed if str(key(run)) != name]
        found.append(Part(tuple(parts[name]), _fit_time(others, Constants())))
    return tuple(found)
