"""Plan a run that is given by overrides, as `hpc-train plan` and the suggestion of calibration runs do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_train.config.compose import compose
from hpc_train.planner.plan import Plan, make_plan
from hpc_train.planner.request import make_request


@dataclass(frozen=True)
class PlanOptions:
    """Of the command line."""

    json: bool = False
    plot: str | None = None
    top: int = 10
    by: str | None = None
    """What the best has least of; None: plan.objective."""
    whole: bool = False
    """Print everything, not only the 40 most important lines."""
    familiar: bool = True
    """Also search the familiar layouts."""


def plan_overrides(overrides: Sequence[str], config_dir: str | None = None, options: PlanOptions | None = None) -> Plan:
    """The answer to these overrides. Raises UserError as `plan_command` does."""
    options = options or PlanOptions()
    question = make_request(compose(overrides, config_dir), overrides)
    found = make_plan(question, options.top, options.by, familiar=options.familiar)
    return replace(found, overrides=tuple(overrides), config_dir=config_dir)
