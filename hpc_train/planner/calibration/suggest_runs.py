"""Suggest short runs to calibrate a cluster with: the most informative ones for the layouts the planner prefers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.errors import UserError
from hpc_train.planner.calibration.fit import choose_informative_jobs
from hpc_train.planner.candidate import Candidate
from hpc_train.planner.candidate_text import describe_candidate
from hpc_train.planner.model.from_config import jobs_from_config
from hpc_train.planner.model.jobs import Jobs, job_columns
from hpc_train.planner.plan import PlanOptions, plan_overrides
from hpc_train.planner.settings import settings_to_overrides
from hpc_train.units import format_seconds

SUGGESTED_RUNS = 3
LAYOUTS_CONSIDERED = 30
"""Meshes of the plan that the suggested runs are chosen from."""
SUGGESTED_STEPS = 20
"""Steps of a run: enough for a stable median without the first steps."""


@dataclass(frozen=True)
class SuggestedRun:
    """A short run on the cluster."""

    overrides: tuple[str, ...]
    """Overrides of `hpc-train train` or `submit`."""
    description: str


def suggest_runs(overrides: Sequence[str]) -> list[SuggestedRun]:
    """Suggest at most SUGGESTED_RUNS runs. Raises UserError for a run that cannot be planned, and if nothing fits."""
    plan = plan_overrides(overrides, None, PlanOptions(top=LAYOUTS_CONSIDERED, baselines=False))
    candidates = [candidate for candidate in plan.candidates if candidate.fits != "no"]
    if not candidates:
        raise UserError("plan calibrate --suggest: nothing fits; see `hpc-train plan` with the same settings")
    rows = choose_informative_jobs(_candidates_to_jobs(candidates), SUGGESTED_RUNS, range(len(candidates)))
    return [_make_suggestion(overrides, candidates[row], number) for number, row in enumerate(rows, 1)]


def _candidates_to_jobs(candidates: Sequence[Candidate]) -> Jobs:
    """Return one row of jobs for each candidate."""
    rows = [job_columns(jobs_from_config(candidate.config, candidate.ranks)) for candidate in candidates]
    return Jobs(**{name: np.array([float(row[name]) for row in rows]) for name in rows[0]})


def _make_suggestion(overrides: Sequence[str], candidate: Candidate, number: int) -> SuggestedRun:
    settings = [*settings_to_overrides(candidate.settings), f"train.steps={SUGGESTED_STEPS}", "checkpoint.every=0"]
    settings.append(f"run_dir=runs/calibrate-{number}")
    keys = {word.partition("=")[0] for word in settings}
    others = [word for word in overrides if word.partition("=")[0] not in keys and not word.startswith("plan.")]
    step = f", {format_seconds(candidate.step.p50)} per step" if candidate.step else ""
    return SuggestedRun((*others, *settings), f"{describe_candidate(candidate)}: {candidate.ranks} ranks{step}")
