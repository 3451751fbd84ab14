"""`hpc-train plan rehearse`: is the layout buildable on all ranks, does it add up, what does a rank really hold."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hpc_train.config.compose import compose
from hpc_train.launch.precheck import check_agreement
from hpc_train.models.shape import check_shape
from hpc_train.placement.from_config import node_count, ranks_per_node
from hpc_train.planner.auto import decide

WRONG = 1
"""Exit code for a layout that is inconsistent, needs more than the plan says, or does not fit."""


def rehearse_command(
    overrides: Sequence[str], config_dir: str | None, as_json: bool, ranks: str = "sample", processes: int | None = None
) -> int:
    """Rehearse the run, print what was found, and return the exit code.

    ranks, processes: see rehearsal.run.rehearse. Raises UserError for a run that cannot be built.
    """
    config = compose(overrides, config_dir)
    check_shape(config.model)
    if config.parallel.auto:
        decision = decide(config)
        config = decision.config
        if not as_json:
            print(decision.line)
    check_agreement(config)
    from hpc_train.planner.rehearsal.report import as_json as to_json
    from hpc_train.planner.rehearsal.report import lines
    from hpc_train.planner.rehearsal.run import rehearse

    found = rehearse(config, node_count(config) * ranks_per_node(config), ranks, processes)
    if as_json:
        print(json.dumps(to_json(found)))
    else:
        for line in lines(found):
            print(line)
    return 0 if found.ok else WRONG
