"""Rules of context parallelism."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what context parallelism cannot do."""
    if degrees.cp > 1:
        raise UserError(f"parallel.cp={degrees.cp}: not in this version; spread over dp_replicate and dp_shard")
