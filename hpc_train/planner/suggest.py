"""Which short runs to calibrate a cluster with: of the ways that the planner would take, those that tell most."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.planner.calibrate import informative
from hpc_train.planner.candidate import Candidate
from hpc_train.planner.from_config import jobs_of
from hpc_train.planner.jobs import Jobs, columns_of
from hpc_train.planner.plan_command import Options, ask
from hpc_train.planner.settings import overrides_of
from hpc_train.planner.words import layout, seconds, techniques

RUNS = 3
WAYS = 30
"""Meshes of the planner's answer that the runs are to tell of."""
STEPS = 20
"""Of a run: the first ones do not count, and the median of the others is steady."""


@dataclass(frozen=True)
class Suggestion:
    """One run."""

    overrides: tuple[str, ...]
    """Of `hpc-train train` or `submit`."""
    told: str
    """What it is, in a few words."""


def suggest(overrides: Sequence[str], config_dir: str | None = None) -> list[Suggestion]:
    """RUNS of them at most. Raises UserError for a run that cannot be planned, and where nothing fits."""
    answered = ask(overrides, config_dir, Options(top=WAYS, familiar=False))
    ways = [it for it in answered.candidates if it.fits != "no"]
    if not ways:
        raise UserError("plan calibrate --suggest: nothing fits; see `hpc-train plan` with the same settings")
    rows = informative(_together(ways), RUNS, range(len(ways)))
    return [_suggestion(overrides, ways[row], number) for number, row in enumerate(rows, 1)]


def _together(ways: Sequence[Candidate]) -> Jobs:
    """A row each."""
    each = [columns_of(jobs_of(it.config, it.ranks)) for it in ways]
    return Jobs(**{name: np.array([float(columns[name]) for columns in each]) for name in each[0]})


def _suggestion(overrides: Sequence[str], it: Candidate, number: int) -> Suggestion:
    own = [*overrides_of(it.settings), f"train.steps={STEPS}", "checkpoint.every=0"]
    own.append(f"run_dir=runs/calibrate-{number}")
    keys = {word.partition("=")[0] for word in own}
    others = [word for word in overrides if word.partition("=")[0] not in keys and not word.startswith("plan.")]
    more = techniques(it)
    told = f"{layout(it)}, micro-batch {it.config.train.micro_batch}{', ' + more if more else ''}"
    step = f", {seconds(it.step.p50)} a step" if it.step else ""
    return Suggestion((*others, *own), f"{told}: {it.ranks} ranks{step}")


def suggest_command(overrides: Sequence[str], as_json: bool) -> int:
    """Print them as commands."""
    found = suggest(overrides)
    if as_json:
        print(json.dumps([{"overrides": list(it.overrides), "told": it.told} for it in found], indent=1))
        return EXIT_DONE
    for it in found:
        print(f"# {it.told}\nhpc-train submit {shlex.join(it.overrides)}")
    folders = " ".join(f"runs/calibrate-{number}" for number in range(1, len(found) + 1))
    print(f"# when they are done\nhpc-train plan calibrate --runs {folders} --out calibration.json")
    return EXIT_DONE
