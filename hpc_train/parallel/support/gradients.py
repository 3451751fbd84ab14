"""Rules of the way of ddp's gradients: compression, the MPI library, odd models; and those of SyncBatchNorm."""

from __future__ import annotations

from hpc_train.config.degrees import Degrees
from hpc_train.config.run import RunConfig
from hpc_train.config.techniques import CompressionConfig
from hpc_train.errors import UserError
from hpc_train.parallel.support.changed import written
from hpc_train.parallel.support.data import sharded

REMEMBERING = ("powersgd", "topk")
"""Methods that add to a step's gradients what an earlier step did not send."""
_BELONGS = {"rank": ("powersgd",), "ratio": ("topk",), "warmup_steps": REMEMBERING, "feedback": REMEMBERING}
"""Settings of compression, and the methods that read them."""


def check(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what cannot be done to gradients."""
    for option in _asked_for(config):
        _check_ddp(option, config, degrees)
    _check_compression(config)
    _check_warm_up(config)
    _check_mpi(config)
    if config.parallel.static_graph and config.parallel.unused_parameters:
        raise UserError("parallel.unused_parameters=true: without effect at static_graph=true, which finds them once")
    if config.parallel.sync_batchnorm:
        _check_batch_norm(degrees)


def _asked_for(config: RunConfig) -> list[str]:
    """The options of this room that are ddp's and are not at their default."""
    parallel = config.parallel
    flags = [name for name in ("static_graph", "unused_parameters") if getattr(parallel, name)]
    asked = [f"parallel.{name}=true" for name in flags]
    if parallel.reduce_with != "torch":
        asked.append(f"parallel.reduce_with={parallel.reduce_with}")
    if parallel.compression.method != "none":
        asked.append(f"parallel.compression.method={parallel.compression.method}")
    return asked


def _check_ddp(option: str, config: RunConfig, degrees: Degrees) -> None:
    parallel = config.parallel
    if parallel.server.mode != "none":
        raise UserError(f"{option}: without effect at parallel.server.mode={parallel.server.mode}; leave it out")
    if parallel.strategy != "ddp":
        raise UserError(f"{option}: belongs to ddp, not to {parallel.strategy}; leave it out, or use strategy=ddp")
    if sharded(config, degrees):
        axis = "tp" if degrees.tp > 1 else "pp"
        raise UserError(
            f"{option}: parallel.{axis}={getattr(degrees, axis)} reduces with fully_shard, which cannot; leave it out, "
            "or spread over dp_replicate"
        )
    if degrees.world == 1:
        raise UserError(f"{option}: without effect on one rank, which reduces nothing; leave it out, or use more ranks")


def _check_compression(config: RunConfig) -> None:
    compression, precision = config.parallel.compression, config.precision.name
    method = compression.method
    for name, methods in _BELONGS.items():
        value = getattr(compression, name)
        if value != getattr(CompressionConfig(), name) and method not in methods:
            raise UserError(
                f"parallel.compression.{name}={written(value)}: without effect at method={method}; "
                f"use {' or '.join(methods)}"
            )
    if method in ("fp16", "bf16") and precision == "fp64":
        raise UserError(
            f"parallel.compression.method={method}: would throw away what precision=fp64 computes; use precision=fp32"
        )
    if method in REMEMBERING and precision == "fp16":
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
        raise UserError("parallel.sync_batchnorm=true: without effect on one rank; leave it out, or use more ranks")
