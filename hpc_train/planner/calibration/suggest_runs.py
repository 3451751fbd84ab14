"""Suggest which short runs to calibrate a cluster with: of the layouts that the planner would take, those that tell
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.errors import UserError
from hpc_train.planner.calibration.fit import choose_informative_jobs
from hpc_train.planner.candidate import Candidate, describe_layout, describe_techniques
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import Jobs, job_columns
from hpc_train.planner.plan_overrides import PlanOptions, plan_overrides
from hpc_train.planner.settings import settings_to_overrides
from hpc_train.units import format_seconds

SUGGESTED_RUNS = 3
LAYOUTS_CONSIDERED = 30
"""Meshes of the planner's answer that the runs are to tell of."""
SUGGESTED_STEPS = 20
"""Of a run: the first ones do not count, and the median of the others is steady."""


@dataclass(frozen=True)
class SuggestedRun:
    """One run."""

    overrides: tuple[str, ...]
    """Of `hpc-train train` or `submit`."""
    told: str
    """What it is, in a few words."""


def suggest_runs(overrides: Sequence[str], config_dir: str | None = None) -> list[SuggestedRun]:
    """RUNS of them at most. Raises UserError for a run that cannot be planned, and where nothing fits."""
    answered = plan_overrides(overrides, config_dir, PlanOptions(top=LAYOUTS_CONSIDERED, familiar=False))
    ways = [it for it in answered.candidates if it.fits != "no"]
    if not ways:
        raise UserError("plan calibrate --suggest: nothing fits; see `hpc-train plan` with the same settings")
    rows = choose_informative_jobs(_jobs_of_candidates(ways), SUGGESTED_RUNS, range(len(ways)))
    return [_make_suggestion(overrides, ways[row], number) for number, row in enumerate(rows, 1)]


def _jobs_of_candidates(ways: Sequence[Candidate]) -> Jobs:
    """A row each."""
    each = [job_columns(jobs_from_config(it.config, it.ranks)) for it in ways]
    return Jobs(**{name: np.array([float(columns[name]) for columns in each]) for name in each[0]})


def _make_suggestion(overrides: Sequence[str], it: Candidate, number: int) -> SuggestedRun:
    own = [*settings_to_overrides(it.settings), f"train.steps={SUGGESTED_STEPS}", "checkpoint.every=0"]
    own.append(f"run_dir=runs/calibrate-{number}")
    keys = {word.partition("=")[0] for word in own}
    others = [word for word in overrides if word.partition("=")[0] not in keys and not word.startswith("plan.")]
    more = describe_techniques(it)
    told = f"{describe_layout(it)}, micro-batch {it.config.train.micro_batch}{', ' + more if more else ''}"
    step = f", {format_seconds(it.step.p50)} a step" if it.step else ""
    return SuggestedRun((*others, *own), f"{told}: {it.ranks} ranks{step}")
