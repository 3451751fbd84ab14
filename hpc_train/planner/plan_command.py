"""`hpc-train plan`: will it fit, how fast is it, what does it cost, and which degrees are best."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.config.compose import compose
from hpc_train.errors import EXIT_DONE, UserError
from hpc_train.planner.answer import Answer, answer
from hpc_train.planner.plan_json import answer_json
from hpc_train.planner.question import question_of


@dataclass(frozen=True)
class Options:
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


def plan_command(overrides: Sequence[str], config_dir: str | None, options: Options) -> int:
    """Print the answer; returns the exit code. Raises UserError for a run that cannot be planned."""
    if options.top < 1:
        raise UserError(f"--top {options.top}: must be at least 1")
    found = ask(overrides, config_dir, options)
    if options.plot is not None:
        from hpc_train.planner.plan_picture import draw

        draw(found, Path(options.plot))
    if options.json:
        print(json_module.dumps(answer_json(found), indent=1))
    else:
        from hpc_train.planner.plan_table import parts
        from hpc_train.topology.show import print_rich

        print_rich(*parts(found, options.whole))
    return EXIT_DONE


def ask(overrides: Sequence[str], config_dir: str | None = None, options: Options | None = None) -> Answer:
    """The answer to these overrides. Raises UserError as `plan_command` does."""
    options = options or Options()
    question = question_of(compose(overrides, config_dir), overrides)
    found = answer(question, options.top, options.by, familiar=options.familiar)
    return replace(found, overrides=tuple(overrides), config_dir=config_dir)
