"""Rules of parameter servers."""

from __future__ import annotations

from hpc_train.config.keys.overrides import format_changed_setting
from hpc_train.config.parallel import Degrees, ServerConfig
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError


def check_server_rules(config: RunConfig, degrees: Degrees) -> None:
    """Raise UserError for what parameter servers cannot do."""
    server = config.parallel.server
    if server.mode == "none":
        if server != ServerConfig():
            changed = format_changed_setting(server)
            raise UserError(
                f"parallel.server.{changed}: has no effect with parallel.server.mode=none; set it to "
                "synchronous, asynchronous or peer"
            )
        return
    mode = f"parallel.server.mode={server.mode}"
    _check_place(config, degrees, mode)
    _check_counts(server, degrees, mode)


def _check_place(config: RunConfig, degrees: Degrees, mode: str) -> None:
    parallel = config.parallel
    if parallel.strategy != "ddp" or degrees.data_parallel != degrees.world:
        raise UserError(f"{mode}: every rank holds the whole model; use parallel.strategy=ddp with pp, cp and tp 1")
    if degrees.world == 1:
        raise UserError(f"{mode}: has no effect on one rank; leave it out, or use more ranks")
    if parallel.bucket_mib is not None:
        raise UserError(f"parallel.bucket_mib={parallel.bucket_mib:g}: has no effect with {mode}; leave it out")
    if parallel.sync_batchnorm and parallel.server.mode == "asynchronous":
        raise UserError(
            f"parallel.sync_batchnorm=true: makes ranks wait for one another, which {mode} is there to avoid; leave it "
            "out, or use parallel.server.mode=synchronous"
        )
    if parallel.compression.method != "none" or parallel.reduce_with != "torch":
        raise UserError(f"{mode}: takes the place of the reduction; leave out parallel.compression and reduce_with")
    if config.precision.name == "fp16":
        raise UserError(f"{mode}: servers do not scale a loss; use precision=bf16 or fp32")
    if config.cluster.node.gpus:
        raise UserError(f"{mode}: MPI windows are in CPU memory; use a cluster without GPUs, or parallel=ddp")


def _check_counts(server: ServerConfig, degrees: Degrees, mode: str) -> None:
    unused = ServerConfig(mode=server.mode)
    if server.mode == "peer" and server != unused:
        raise UserError(f"{mode}: has no servers; leave the other keys of parallel.server out")
    if server.mode == "synchronous" and server.staleness != unused.staleness:
        raise UserError(f"parallel.server.staleness={server.staleness}: only has an effect with mode=asynchronous")
    for key in ("servers", "replicas"):
        if getattr(server, key) > degrees.world:
            raise UserError(
                f"parallel.server.{key}={getattr(server, key)}: there are {degrees.world} ranks; use no more than that"
            )


def find_mpi_setting(config: RunConfig) -> str | None:
    """Return the setting that needs ranks started by MPI, or None."""
    if config.parallel.server.mode != "none":
        return f"parallel.server.mode={config.parallel.server.mode}"
    return "parallel.reduce_with=mpi" if config.parallel.reduce_with == "mpi" else None
