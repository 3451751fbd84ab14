"""Rules of data parallelism: strategy, batch, number formats, and how gradients are reduced.

The rules of every strategy come first, then those of features that only ddp has (compression, the MPI library, models
that do not use all parameters) and of SyncBatchNorm.
"""

from __future__ import annotations

from hpc_train.config.keys.overrides import format_override_value
from hpc_train.config.parallel import CompressionConfig, Degrees, ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.traffic.sharding import uses_fully_shard


def check_data_parallel_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what data parallelism cannot do."""
    _check_strategy(config.parallel.strategy, degrees)
    _check_gathering(config.parallel)
    _check_single_rank(config.parallel, degrees)
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
    """Check the options of gathering and freeing parameters, which not every strategy does."""
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


def _check_single_rank(parallel: ParallelConfig, degrees: Degrees) -> None:
    """Refuse options of the exchange between data-parallel ranks where there is only one; ranks of cp count as such."""
    advice = "leave it out, or use more ranks"
    if degrees.dp_shard * degrees.cp == 1:
        if not parallel.reshard_after_forward:
            raise UserError(f"parallel.reshard_after_forward=false: has no effect with dp_shard 1; {advice}")
        if parallel.prefetch != 1:
            raise UserError(f"parallel.prefetch={parallel.prefetch}: has no effect with dp_shard 1; {advice}")
    if parallel.bucket_mib is not None and degrees.data_parallel * degrees.cp == 1:
        raise UserError(
            f"parallel.bucket_mib={parallel.bucket_mib:g}: has no effect on one data-parallel rank, which reduces "
            f"nothing; {advice}"
        )


def _check_batch(config: RunConfig, degrees: Degrees) -> None:
    batch, shares = config.train.global_batch, degrees.data_parallel
    if batch % shares:
        # The nearest legal batches below and above, so that the message can be pasted.
        lower = batch // shares * shares
        legal = f"{lower} or {lower + shares}" if lower else str(shares)
        raise UserError(
            f"train.global_batch={batch}: does not divide over {shares} data-parallel ranks ({degrees}); use {legal}"
        )


def _check_precision(config: RunConfig, degrees: Degrees) -> None:
    precision = config.precision
    native = "fp64" if precision.name == "fp64" else "fp32"
    if not uses_fully_shard(config, degrees) and precision.reduce != native:
        raise UserError(
            f"precision.reduce={precision.reduce}: ddp reduces gradients in {native} at precision={precision.name}; "
            f"use parallel.strategy=zero3 or precision.reduce={native}"
        )
    if precision.name == "fp64" and precision.reduce != "fp64":
        raise UserError(f"precision.reduce={precision.reduce}: would throw away what precision=fp64 computes; use fp64")


ERROR_FEEDBACK_METHODS = ("powersgd", "topk")
"""Methods that add to a step's gradients the part that earlier steps did not send."""
_METHODS_OF_OPTION = {
    "rank": ("powersgd",),
    "ratio": ("topk",),
    "warmup_steps": ERROR_FEEDBACK_METHODS,
    "feedback": ERROR_FEEDBACK_METHODS,
}
"""Settings of compression, and the methods that read them."""


def check_gradient_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what cannot be done to gradients."""
    for option in _list_ddp_options(config):
        _check_ddp(option, config, degrees)
    _check_compression(config)
    _check_warm_up(config)
    _check_mpi(config)
    if config.parallel.static_graph and config.parallel.unused_parameters:
        raise UserError(
            "parallel.unused_parameters=true: has no effect with static_graph=true, which finds the unused ones "
            "in the first step; leave it out"
        )
    if config.parallel.sync_batchnorm:
        _check_batch_norm(degrees)


def _list_ddp_options(config: RunConfig) -> list[str]:
    """List the options that only ddp has and that are not at their defaults."""
    parallel = config.parallel
    flags = [name for name in ("static_graph", "unused_parameters") if getattr(parallel, name)]
    options = [f"parallel.{name}=true" for name in flags]
    if parallel.reduce_with != "torch":
        options.append(f"parallel.reduce_with={parallel.reduce_with}")
    if parallel.compression.method != "none":
        options.append(f"parallel.compression.method={parallel.compression.method}")
    return options


def _check_ddp(option: str, config: RunConfig, degrees: Degrees) -> None:
    parallel = config.parallel
    if parallel.server.mode != "none":
        raise UserError(f"{option}: has no effect with parallel.server.mode={parallel.server.mode}; leave it out")
    if parallel.strategy != "ddp":
        raise UserError(f"{option}: belongs to ddp, not to {parallel.strategy}; leave it out, or use strategy=ddp")
    if uses_fully_shard(config, degrees):
        # DDP cannot reduce DTensor parameters, so tp and pp run on fully_shard whatever the strategy is called.
        axis = "tp" if degrees.tp > 1 else "pp"
        raise UserError(
            f"{option}: parallel.{axis}={getattr(degrees, axis)} reduces with fully_shard, which cannot; leave it out, "
            "or spread over dp_replicate"
        )
    if degrees.world == 1:
        raise UserError(f"{option}: has no effect on one rank, which reduces nothing; leave it out, or use more ranks")


def _check_compression(config: RunConfig) -> None:
    compression, precision = config.parallel.compression, config.precision.name
    method = compression.method
    for name, methods in _METHODS_OF_OPTION.items():
        value = getattr(compression, name)
        if value != getattr(CompressionConfig(), name) and method not in methods:
            raise UserError(
                f"parallel.compression.{name}={format_override_value(value)}: has no effect with method={method}; "
                f"use {' or '.join(methods)}"
            )
    if method in ("fp16", "bf16") and precision == "fp64":
        raise UserError(
            f"parallel.compression.method={method}: would throw away what precision=fp64 computes; use precision=fp32"
        )
    if method in ERROR_FEEDBACK_METHODS and precision == "fp16":
        raise UserError(
            f"parallel.compression.method={method}: remembers gradients, which precision=fp16 scales by a factor that "
            "changes; use precision=bf16, or method=fp16"
        )


def _check_warm_up(config: RunConfig) -> None:
    compression, steps = config.parallel.compression, config.train.wanted_steps
    if compression.warmup_steps and steps is not None and compression.warmup_steps >= steps:
        raise UserError(
            f"parallel.compression.warmup_steps={compression.warmup_steps}: nothing would be compressed in "
            f"train.steps={steps}; use fewer, or parallel.compression.method=none"
        )


def _check_mpi(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.reduce_with != "mpi":
        return
    if parallel.compression.method != "none":
        raise UserError(
            f"parallel.compression.method={parallel.compression.method}: reduces with torch, not with "
            "parallel.reduce_with=mpi; leave one of them out"
        )
    if config.cluster.node.gpus:
        raise UserError(
            f"parallel.reduce_with=mpi: reduces on CPUs, and cluster={config.cluster.name} has GPUs; use torch"
        )


def _check_batch_norm(degrees: Degrees) -> None:
    for axis in ("pp", "cp", "tp"):
        if getattr(degrees, axis) > 1:
            raise UserError(
                f"parallel.sync_batchnorm=true: not with parallel.{axis}={getattr(degrees, axis)}; "
                "spread over dp_replicate and dp_shard"
            )
    if degrees.world == 1:
        raise UserError("parallel.sync_batchnorm=true: has no effect on one rank; leave it out, or use more ranks")
