"""Predictions against measured runs: error of time and memory, and whether the planner would have picked well."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_train.planner.calibrate import calibrate, chosen, together
from hpc_train.planner.constants import Constants, without_residuals
from hpc_train.planner.from_runs import Refused, Run, Runs, jobs_of
from hpc_train.planner.jobs import RECOMPUTE, Jobs, with_columns
from hpc_train.planner.kept import ALIKE
from hpc_train.planner.measured import memory_of
from hpc_train.planner.memory import FITS, NO, YES, memory
from hpc_train.planner.simplicity import complexity
from hpc_train.planner.step_time import time

Floats = NDArray[np.float64]
_LEAST_CONTEST = 2
"""Configurations that a group needs for a choice between them."""


@dataclass(frozen=True)
class Row:
    """One run."""

    run: Run
    seconds: float
    """Predicted, of a step."""
    memory: float
    """Predicted bytes, of the rank and counted as the run says: of the one that needs most, unless it names another."""
    fits: str
    ranked: float = 0.0
    """What a search orders by: seconds by the constants alone. 0: as predicted."""

    @property
    def ratio(self) -> float:
        """Predicted over measured time; NaN where no time was stated."""
        return self.seconds / self.run.seconds

    @property
    def memory_ratio(self) -> float:
        return self.memory / self.run.memory


@dataclass(frozen=True)
class Errors:
    """Of predicted over measured, fractions of 1."""

    n: int
    mape: float
    median: float
    bias: float


@dataclass(frozen=True)
class MemoryErrors:
    """Of memory, and of the answer to "does it fit"."""

    n: int
    mape: float
    oom_missed: int
    """Runs that ran out of memory and that were predicted to fit."""
    false_oom: int
    """Runs that ran and were predicted not to fit."""
    oom: int
    """Runs that ran out of memory."""
    maybe: float
    """Share of the runs that ran, of which the answer was maybe."""


@dataclass(frozen=True)
class Regret:
    """Slowdown of the configuration the planner picks relative to the fastest measured one, over groups."""

    n: int
    mean: float
    worst: float


@dataclass(frozen=True)
class Validation:
    """Of one table of runs."""

    overall: Errors
    families: dict[str, Errors]
    memory: MemoryErrors
    regret: Regret
    refused: tuple[Refused, ...]
    rows: tuple[Row, ...]


def validate(runs: Runs, constants: Constants, calibrated: int = 0) -> Validation:
    """Every run that can be modelled. calibrated: runs of each cluster and software that its constants are
    moved to; these are then left out of the errors of time."""
    spare: set[str] = set()
    rows: list[Row] = []
    for members in together(runs.runs):
        some = chosen(members, calibrated) if calibrated else []
        spare |= {run.id for run in some}
        rows += predict(members, calibrate(some, constants))
    order = {run.id: place for place, run in enumerate(runs.runs)}
    rows.sort(key=lambda row: order[row.run.id])
    timed = [row for row in rows if row.run.id not in spare]
    return summarise(rows, timed, runs.refused)


def summarise(rows: Sequence[Row], timed: Sequence[Row], refused: Sequence[Refused]) -> Validation:
    """timed: of the rows, those whose time counts."""
    return Validation(
        overall=errors(row.ratio for row in timed),
        families=families(timed),
        memory=_memory(rows),
        regret=regret(timed),
        refused=tuple(refused),
        rows=tuple(rows),
    )


def predict(runs: Sequence[Run], constants: Constants) -> list[Row]:
    """A row a run."""
    if not runs:
        return []
    jobs = jobs_of(runs)
    seconds, held = time(jobs, constants).step, memory(_least(jobs, runs), constants)
    ranked = time(jobs, without_residuals(constants)).step
    columns = zip(runs, seconds, memory_of(runs, held), held.fits, ranked, strict=True)
    return [Row(run, float(one), float(two), FITS[int(code)], float(key)) for run, one, two, code, key in columns]


def _least(jobs: Jobs, runs: Sequence[Run]) -> Jobs:
    """With full recomputation where it is not stated."""
    unknown = np.array(["recompute" in run.assumed for run in runs])
    return with_columns(jobs, recompute=np.where(unknown, RECOMPUTE.index("full"), jobs.recompute))


def families(rows: Iterable[Row]) -> dict[str, Errors]:
    """Family -> its errors, by name; those without a stated time are left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if np.isfinite(row.ratio):
            found[row.run.family].append(row.ratio)
    return {name: errors(found[name]) for name in sorted(found)}


def errors(ratios: Iterable[float]) -> Errors:
    """NaN are left out."""
    off = np.array([ratio - 1 for ratio in ratios if np.isfinite(ratio)])
    if not len(off):
        return Errors(0, 0.0, 0.0, 0.0)
    return Errors(len(off), float(np.abs(off).mean()), float(np.median(np.abs(off))), float(off.mean()))


def _memory(rows: Sequence[Row]) -> MemoryErrors:
    told = errors(row.memory_ratio for row in rows)
    ran = [row for row in rows if not row.run.out_of_memory and _on_device(row.run)]
    out = [row for row in rows if row.run.out_of_memory]
    return MemoryErrors(
        n=told.n,
        mape=told.mape,
        oom_missed=sum(row.fits == FITS[YES] for row in out),
        false_oom=sum(row.fits == FITS[NO] for row in ran),
        oom=len(out),
        maybe=sum(row.fits == "maybe" for row in ran) / max(len(ran), 1),
    )


def _on_device(run: Run) -> bool:
    """Whether it ran: what was only computed on paper may need more than there is."""
    return np.isfinite(run.seconds) or (np.isfinite(run.memory) and run.memory < run.columns["memory_bytes"])


def regret(rows: Iterable[Row]) -> Regret:
    """Over contests: same model, device, GPUs, batch and precision, in two configurations at least. Runs that are the
    same to the planner (other versions of the software) are one configuration, as fast as their mean."""
    contests: dict[str, dict[tuple[float, ...], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if np.isfinite(row.ratio):
            contests[row.run.contest][tuple(row.run.columns.values())].append(row)
    found = [_regret(list(it.values())) for it in contests.values() if len(it) >= _LEAST_CONTEST]
    return Regret(len(found), float(np.mean(found)) if found else 0.0, max(found, default=0.0))


def _regret(configurations: Sequence[Sequence[Row]]) -> float:
    measured = [float(np.mean([row.run.seconds for row in rows])) for rows in configurations]
    return measured[_pick([rows[0] for rows in configurations])] / min(measured) - 1


def _pick(configurations: Sequence[Row]) -> int:
    """Pick as `hpc-train plan` does: the simplest of those equal to the quickest."""
    limit = min(map(_ranked, configurations)) * (1 + ALIKE)
    alike = [place for place, row in enumerate(configurations) if _ranked(row) <= limit]
    return min(alike, key=lambda place: (_points(configurations[place].run), _ranked(configurations[place]), place))


def _points(run: Run) -> float:
    own = {name: np.atleast_1d(np.float64(value)) for name, value in run.columns.items()}
    return float(complexity({**own, "recompute_every": np.ones(1)})[0])


def _ranked(row: Row) -> float:
    return row.ranked or row.seconds
