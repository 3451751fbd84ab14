"""Rules of data parallelism: strategy, batch, number formats, and what belongs to ddp or to the zero strategies."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def sharded(config: RunConfig, degrees: Degrees) -> bool:
    """Whether fully_shard holds the parameters: for the zero strategies, and over DTensors, which DDP cannot hold."""
    return config.parallel.strategy != "ddp" or degrees.tp > 1 or degrees.pp > 1


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what data parallelism cannot do."""
    _check_strategy(config.parallel.strategy, degrees)
    _check_gathering(config.parallel)
    _check_alone(config.parallel, degrees)
    _check_batch(config, degrees)
    _check_precision(config, degrees)


def _check_strategy(strategy: str, degrees: Degrees) -> None:
    if strategy == "ddp" and degrees.dp_shard > 1:
        raise UserError(f"parallel.dp_shard={degrees.dp_shard}: ddp shards nothing; use parallel.strategy=zero3")
    if strategy != "ddp" and degrees.dp_shard * degrees.cp == 1 and degrees.dp_replicate > 1:
        raise UserError(
            f"parallel.strategy={strategy}: has no effect with parallel.dp_shard=1, where each of "
            f"{degrees.dp_replicate} copies is whole; raise dp_shard, or use parallel.strategy=ddp"
        )


def _check_gathering(parallel: ParallelConfig) -> None:
    """Options of when parameters are gathered and freed, which not every strategy does."""
    strategy = parallel.strategy
    if strategy == "zero3" and parallel.bucket_mib is not None:
        raise UserError(
            f"parallel.bucket_mib={parallel.bucket_mib:g}: zero3 gathers and reduces block by block; leave it out, or "
            "use zero1, zero2 or ddp"
        )
    if strategy != "zero3" and not parallel.reshard_after_forward:
        raise UserError(
            f"parallel.reshard_after_forward=false: belongs to zero3, not to {strategy}, which frees nothing after "
            "forward; leave it out"
        )
    ahead = parallel.prefetch
    if strategy == "ddp" and ahead != 1:
        raise UserError(f"parallel.prefetch={ahead}: ddp gathers nothing; leave it out, or use a zero strategy")
    if ahead == 0 and (strategy != "zero3" or not parallel.reshard_after_forward):
        raise UserError(
            "parallel.prefetch=0: is about gathering in backward, which only zero3 with reshard_after_forward does; "
            "leave it out"
        )


def _check_alone(parallel: ParallelConfig, degrees: Degrees) -> None:
    """Options of an exchange over data-parallel ranks, where there is nobody to exchange with; cp shards too."""
    alone = "leave it out, or use more ranks"
    if degrees.dp_shard * degrees.cp == 1:
        if not parallel.reshard_after_forward:
            raise UserError(f"parallel.reshard_after_forward=false: has no effect with dp_shard 1; {alone}")
        if parallel.prefetch != 1:
            raise UserError(f"parallel.prefetch={parallel.prefetch}: has no effect with dp_shard 1; {alone}")
    if parallel.bucket_mib is not None and degrees.data_parallel * degrees.cp == 1:
        raise UserError(
            f"parallel.bucket_mib={parallel.bucket_mib:g}: has no effect on one data-parallel rank, which reduces "
            f"nothing; {alone}"
        )


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
