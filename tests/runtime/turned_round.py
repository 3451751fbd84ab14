"""`hpc-train` whose search for a placement always reverses the launcher's order of nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fact_helpers import backwards

from hpc_train.cli.main import main
from hpc_train.config.run import RunConfig
from hpc_train.placement.placement_result import Placement
from hpc_train.runtime.host_info import ProcessInfo
from hpc_train.training import rank


def search(
    config: RunConfig, nodes: Sequence[Sequence[ProcessInfo]], parameters: Callable[[], int] | None = None
) -> Placement:
    return backwards(config, nodes)


vars(rank)["search_placement"] = search

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
