"""Rules of data parallelism: strategy, batch, number formats, and what belongs to ddp or to the zero strategies."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def sharded(config: RunConfig, degrees: Degrees) -> bool:
    """Whether fully_shard holds the parameters: for the zero strategies, and over DTensors, which DDP cannot hold."""
    return config.parallel.strategy != "ddp" or degrees.tp > 1 or degrees.pp > 1


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what data parallelism cannot do."""
    strategy = config.parallel.strategy
    if strategy in ("zero1", "zero2"):
        raise UserError(f"parallel.strategy={strategy}: not in this version; use ddp or zero3")
    if strategy == "ddp" and degrees.dp_shard > 1:
        raise UserError(f"parallel.dp_shard={degrees.dp_shard}: ddp shards nothing; use parallel.strategy=zero3")
    _check_batch(config, degrees)
    _check_precision(config, degrees)


def _check_batch(config: RunConfig, degrees: Degrees) -> None:
    batch, shares = config.train.global_batch, degrees.data_parallel
    if batch % shares:
        lower = batch // shares * shares
        legal = f"{lower} or {lower + shares}" if lower else str(shares)
        raise UserError(
            f"train.global_batch={batch}: does not divide over {shares} data-parallel ranks ({degrees}); use {legal}"
        )


def _check_precision(config: RunConfig, degrees: Degrees) -> None:
    precision = config.precision
    native = "fp64" if precision.name == "fp64" else "fp32"
    if not sharded(config, degrees) and precision.reduce != native:
        raise UserError(
            f"precision.reduce={precision.reduce}: ddp reduces gradients in {native} at precision={precision.name}; "
            f"use parallel.strategy=zero3 or precision.reduce={native}"
        )
    if precision.name == "fp64" and precision.reduce != "fp64":
        raise UserError(f"precision.reduce={precision.reduce}: would throw away what precision=fp64 computes; use fp64")
