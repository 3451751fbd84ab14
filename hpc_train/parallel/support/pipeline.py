"""Rules of pipeline parallelism."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what pipeline parallelism cannot do."""
    if degrees.pp > 1:
        raise UserError(f"parallel.pp={degrees.pp}: not in this version; spread over dp_replicate and dp_shard")
