"""`hpc-train plan fit RUNS.csv`: the constants that the package comes with, and how well such a fit predicts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from hpc_train.errors import UserError
from hpc_train.planner import constants as stored
from hpc_train.planner.calibrate import calibrate, chosen, together
from hpc_train.planner.constants import Constants, numbers
from hpc_train.planner.fit import SPLIT, Part, fit, fold_of, left_out, training
from hpc_train.planner.from_runs import Run, read_runs
from hpc_train.planner.validate import Errors, Row, errors, families, predict

A100_GPT = ("sc21", "korth", "megascale", "zb", "vtrain", "bloom", "mtnlg")
"""Families of dense GPTs on several nodes of A100."""
CALIBRATION_RUNS = 3
CHOICES = 10
"""Choices of these runs (calibrate.chosen) that errors are the mean of, each from another half of a cluster's."""


@dataclass(frozen=True)
class Options:
    """Of the command."""

    runs: tuple[str, ...]
    json: bool = False
    output: str | None = None
    folds: int = 5
    leave_out: bool = False


@dataclass(frozen=True)
class Report:
    """What a fit is worth."""

    constants: Constants
    trained: Errors
    """On the groups that it was fitted to."""
    held_out: Errors
    """On the groups that it has not seen."""
    folds: dict[str, Errors]
    """Family -> its errors by cross-validation over groups, and `overall`; empty: not asked for."""
    clusters: dict[str, Errors]
    """The same with each cluster left out once."""
    calibrated: dict[str, Errors]
    """The same, then calibrated with three of its runs by one software, which are left out of the errors: the mean of
    several choices of the three."""


def fit_command(options: Options) -> int:
    """Fit to the training split, report, and write the constants where asked."""
    runs = [run for path in options.runs for run in read_runs(Path(path)).runs]
    if not training(runs):
        raise UserError("plan fit: no run that can be modelled; `hpc-train plan validate` says why each is refused")
    found = report(runs, options)
    if options.output:
        stored.write(Path(options.output), found.constants, **_about(options, found))
    if options.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        _print(found)
    return 0


def report(runs: Sequence[Run], options: Options) -> Report:
    """The fit and its validations."""
    constants = fit(training(runs))
    folds = _rows(left_out(runs, lambda run: fold_of(run.group, options.folds))) if options.folds > 1 else []
    if folds:
        constants = replace(constants, spread=spread(folds))
    clusters = left_out(runs, lambda run: run.cluster) if options.leave_out else ()
    seen = {run.id for run in training(runs)}
    ratios = _ratios(runs, constants)
    return Report(
        constants,
        errors(ratio for run, ratio in zip(runs, ratios, strict=True) if run.id in seen),
        errors(ratio for run, ratio in zip(runs, ratios, strict=True) if run.id not in seen),
        by_family(folds),
        by_family(_rows(clusters)),
        _mean([by_family(calibrated_rows(clusters, number)) for number in range(CHOICES)]),
    )


def _ratios(runs: Sequence[Run], constants: Constants) -> list[float]:
    return [row.ratio for row in predict(runs, constants)]


def spread(rows: Sequence[Row]) -> float:
    """Standard deviation of log(measured / predicted), outliers apart: what four fifths of the families' runs are
    within, on average over families, over what four fifths of a normal variable are within."""
    errors_of: dict[str, list[float]] = {}
    for row in rows:
        errors_of.setdefault(row.run.family, []).append(abs(math.log(row.ratio)))
    within = [float(np.quantile(it, 0.8)) for it in errors_of.values()]
    return round(float(np.mean(within)) / NormalDist().inv_cdf(0.9), 4)


def _rows(parts: Sequence[Part]) -> list[Row]:
    return [row for part in parts for row in predict(part.runs, part.constants)]


def calibrated_rows(clusters: Sequence[Part], number: int = 0) -> list[Row]:
    """Each cluster's other runs, after a calibration with three of its own; number: of the choice of the three."""
    found = []
    for part in clusters:
        for members in together(part.runs):
            some = chosen(members, CALIBRATION_RUNS, half(members, number))
            others = [run for run in members if run not in some]
            found += predict(others, calibrate(some, part.constants))
    return found


def half(runs: Sequence[Run], number: int) -> list[Run]:
    """One of many halves of a cluster's timed runs, by a hash of their names; never fewer than are chosen."""
    timed = [run for run in runs if np.isfinite(run.seconds)]
    timed.sort(key=lambda run: hashlib.sha256(f"{number}/{run.id}".encode()).digest())
    return timed[: max(CALIBRATION_RUNS, math.ceil(len(timed) / 2))]


def _mean(tables: Sequence[dict[str, Errors]]) -> dict[str, Errors]:
    """Of the same groups' errors in several tables."""
    found = {}
    for name in tables[0]:
        same = [table[name] for table in tables if name in table]
        means = (float(np.mean([getattr(it, field) for it in same])) for field in ("mape", "median", "bias"))
        found[name] = Errors(same[0].n, *means)
    return found


def by_family(rows: Sequence[Row]) -> dict[str, Errors]:
    """And what the targets are about: dense GPT on A100 without sharded parameters; sharded ones; each device."""
    if not rows:
        return {}
    found = {**families(rows), "overall": errors(row.ratio for row in rows)}
    kinds: dict[str, Callable[[Run], bool]] = {
        "A100 GPT": lambda run: run.family in A100_GPT and run.columns["zero"] < 3,
        "FSDP": lambda run: run.columns["zero"] == 3,
        "H100": lambda run: run.cluster.split("/")[1].startswith("H100"),
        "GB200": lambda run: run.cluster.endswith("/GB200"),
    }
    for name, has in kinds.items():
        some = errors(row.ratio for row in rows if has(row.run))
        found |= {name: some} if some.n else {}
    return found


def _about(options: Options, found: Report) -> dict[str, object]:
    return {
        "data": [Path(path).name for path in options.runs],
        "trained_on": f"fitted to the groups (family/model/device) whose CRC-32 is no multiple of {SPLIT}",
        "trained": asdict(found.trained),
        "held_out": asdict(found.held_out),
    }


def _print(found: Report) -> None:
    print("constants:")
    for name, value in numbers(found.constants).items():
        print(f"  {name:18s} {value:.4g}")
    print(f"training groups: {_line(found.trained)}")
    print(f"held-out groups: {_line(found.held_out)}")
    tables = {
        "cross-validation over groups": found.folds,
        "each cluster left out once": found.clusters,
        f"the same, calibrated with {CALIBRATION_RUNS} runs (mean over {CHOICES} choices)": found.calibrated,
    }
    for title, table in tables.items():
        if table:
            print(f"{title}:")
        for name, it in table.items():
            print(f"  {name:12s} {_line(it)}")


def _line(it: Errors) -> str:
    return f"{it.n:4d} runs, MAPE {it.mape:6.1%}, median {it.median:6.1%}, bias {it.bias:+6.1%}"
