"""`hpc-train plan`: predict memory, time and cost of a run, and find the best layouts."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path

from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.planner.output.plan_json import plan_to_json
from hpc_train.planner.plan import PlanOptions, plan_overrides


def plan_command(overrides: Sequence[str], config_dir: str | None, options: PlanOptions) -> int:
    """Print the plan, and return the exit code. Raises UserError for a run that cannot be planned."""
    if options.top < 1:
        raise UserError(f"--top {options.top}: must be at least 1")
    plan = plan_overrides(overrides, config_dir, options)
    if options.plot is not None:
        from hpc_train.planner.output.plan_picture import draw_plan

        draw_plan(plan, Path(options.plot))
    if options.json:
        print(json_module.dumps(plan_to_json(plan), indent=1))
    else:
        from hpc_train.cli.output import print_rich
        from hpc_train.planner.output.plan_table import format_plan

        print_rich(*format_plan(plan, options.show_all))
    return EXIT_DONE
