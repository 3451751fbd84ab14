"""Which combinations exist: one table, asked before any rank is started. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.config.degrees import Degrees, resolve
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


@dataclass(frozen=True)
class Technique:
    """How one strategy is done."""

    backend: str
    exact: str
    """What design law 1 (same numbers at any layout) means for it."""


STRATEGIES: dict[str, Technique] = {
    "ddp": Technique("torch DistributedDataParallel", "exact"),
    "zero3": Technique("torch fully_shard (FSDP2); HSDP with dp_replicate > 1", "exact"),
}
"""The strategies that exist; a name of the schema that is not here is refused."""

AXES = ("dp_replicate", "dp_shard")
"""The mesh axes that may be larger than 1."""


def check_support(config: RunConfig, world: int) -> Degrees:
    """The degrees of this run on `world` ranks. Raises UserError, saying what would work, if nothing here can do it."""
    degrees = resolve(config.parallel, world)
    strategy = config.parallel.strategy
    if strategy not in STRATEGIES:
        raise UserError(f"parallel.strategy={strategy}: not in this version; use {' or '.join(STRATEGIES)}")
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1:
            raise UserError(
                f"parallel.{axis}={getattr(degrees, axis)}: not in this version; spread over {' and '.join(AXES)}"
            )
    if strategy == "ddp" and degrees.dp_shard > 1:
        raise UserError(f"parallel.dp_shard={degrees.dp_shard}: ddp shards nothing; use parallel.strategy=zero3")
    _check_batch(config, degrees)
    _check_precision(config)
    return degrees


def _check_batch(config: RunConfig, degrees: Degrees) -> None:
    batch, shares = config.train.global_batch, degrees.data_parallel
    if batch % shares:
        lower = batch // shares * shares
        legal = f"{lower} or {lower + shares}" if lower else str(shares)
        raise UserError(
            f"train.global_batch={batch}: does not divide over {shares} data-parallel ranks ({degrees}); use {legal}"
        )


def _check_precision(config: RunConfig) -> None:
    precision = config.precision
    if precision.name == "fp16":
        raise UserError("precision=fp16: needs loss scaling, which is not in this version; use precision=bf16")
    native = "fp64" if precision.name == "fp64" else "fp32"
    if config.parallel.strategy == "ddp" and precision.reduce != native:
        raise UserError(
            f"precision.reduce={precision.reduce}: ddp reduces gradients in {native} at precision={precision.name}; "
            f"use parallel.strategy=zero3 or precision.reduce={native}"
        )
    if precision.name == "fp64" and precision.reduce != "fp64":
        raise UserError(f"precision.reduce={precision.reduce}: would throw away what precision=fp64 computes; use fp64")
