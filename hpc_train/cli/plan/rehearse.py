"""`hpc-train plan rehearse`: check that every rank can build its part of a layout, and how much memory it needs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from hpc_train.config.compose import compose
from hpc_train.launch.checks.model_and_data import check_model_and_data
from hpc_train.models.shape import check_shape
from hpc_train.placement.described_cluster import count_nodes, count_ranks_per_node
from hpc_train.planner.auto import choose_parallel

EXIT_NOT_BUILDABLE = 1
"""Exit code for a layout that is inconsistent, needs more than the plan says, or does not fit."""


def rehearse_command(overrides: Sequence[str], config_dir: str | None, as_json: bool, ranks: str) -> int:
    """Rehearse the run, print the result, and return the exit code.

    ranks: see rehearsal.rehearse.rehearse_run. Raises UserError for a run that cannot be built.
    """
    config = compose(overrides, config_dir)
    check_shape(config.model)
    if config.parallel.auto:
        decision = choose_parallel(config)
        config = decision.config
        if not as_json:
            print(decision.line)
    check_model_and_data(config)
    import torch

    from hpc_train._torch.versions import describe_untested_torch
    from hpc_train.planner.rehearsal.rehearse import rehearse_run
    from hpc_train.planner.rehearsal.result import format_rehearsal
    from hpc_train.planner.rehearsal.result import rehearsal_to_json as to_json

    if untested := describe_untested_torch(torch.__version__):
        print(f"warning: {untested}", file=sys.stderr)
    rehearsal = rehearse_run(config, count_nodes(config) * count_ranks_per_node(config), ranks)
    if as_json:
        print(json.dumps(to_json(rehearsal)))
    else:
        for line in format_rehearsal(rehearsal):
            print(line)
    return 0 if rehearsal.ok else EXIT_NOT_BUILDABLE
