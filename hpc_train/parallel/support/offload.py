"""Rules of the offload of parameters and of optimizer state."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what cannot be offloaded."""
    offload, strategy = config.parallel.offload, config.parallel.strategy
    asked = {name: getattr(offload, name) for name in ("optimizer", "parameters") if getattr(offload, name) != "none"}
    for name, place in asked.items():
        if strategy == "ddp":
            raise UserError(
                f"parallel.offload.{name}={place}: only what the zero strategies shard can live elsewhere, ddp keeps "
                "all on each rank; use parallel=zero1, zero2 or fsdp"
            )
    if offload.dir is not None and "file" not in asked.values():
        raise UserError(
            f"parallel.offload.dir={offload.dir}: without effect, nothing is offloaded to a file; set "
            "parallel.offload.optimizer=file or parallel.offload.parameters=file"
        )
