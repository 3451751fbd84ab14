"""What `plan` says of the memory of the ranks that were rehearsed, to stand beside what was counted."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.planner.constants import of_cluster
from hpc_train.planner.from_config import jobs_of
from hpc_train.planner.memory import memory

_PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
"""Without what an allocator and a driver add, which is not counted here."""


def planned(config: RunConfig, degrees: Degrees, ranks: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Bytes by part. ranks: the pipeline rank of each rank. Empty for a model that cannot be planned."""
    try:
        parts = memory(jobs_of(config, degrees.world), of_cluster(config.cluster))
    except UserError:
        return {}
    found = {}
    for rank, pp in ranks.items():
        stage = 0 if pp == 0 else 2 if pp == degrees.pp - 1 else 1
        found[rank] = {part: float(getattr(parts, part)[stage].max()) for part in _PARTS}
    return found
