"""What this machine cannot do for a cluster's rank: what is rehearsed in its place, and the line that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpc_train.config.parallel import ParallelConfig
from hpc_train.config.run import RunConfig
from hpc_train.config.techniques import CompressionConfig, ServerConfig

_Change = Callable[[ParallelConfig], tuple[ParallelConfig, str] | None]


def stand_in(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """A configuration with the same layout, and a line for each thing of the real one that is not rehearsed."""
    parallel, said = config.parallel, []
    for change in (_compiled, _offloaded, _in_files, _in_host_memory, _by_mpi, _compressed, _served):
        if (changed := change(parallel)) is not None:
            parallel, line = changed
            said.append(line)
    return replace(config, parallel=parallel, run_dir=None), said


def _compiled(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if not parallel.compile:
        return None
    line = "parallel.compile=true: rehearsed without; compiled blocks keep fewer activations"
    return replace(parallel, compile=False), line


def _offloaded(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if not parallel.recompute.offload:
        return None
    line = "parallel.recompute.offload=true: rehearsed without; activations are counted as if they stayed on the GPU"
    return replace(parallel, recompute=replace(parallel.recompute, offload=False)), line


def _in_files(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    offload = parallel.offload
    if "file" not in (offload.parameters, offload.optimizer):
        return None
    parameters, optimizer = (where.replace("file", "cpu") for where in (offload.parameters, offload.optimizer))
    line = "parallel.offload: rehearsed as cpu; no file is made, so whether the disk has room is not known"
    return replace(parallel, offload=replace(offload, parameters=parameters, optimizer=optimizer, dir=None)), line


def _in_host_memory(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if (parallel.offload.parameters, parallel.offload.optimizer) == ("none", "none"):
        return None
    return parallel, "parallel.offload: what is offloaded counts as the host's; copies on their way are not counted"


def _by_mpi(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    if parallel.reduce_with != "mpi":
        return None
    return replace(parallel, reduce_with="torch"), "parallel.reduce_with=mpi: rehearsed as torch; MPI is not started"


def _compressed(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    method = parallel.compression.method
    if method == "none":
        return None
    line = f"parallel.compression.method={method}: rehearsed without; gradients are reduced whole"
    return replace(parallel, compression=CompressionConfig()), line


def _served(parallel: ParallelConfig) -> tuple[ParallelConfig, str] | None:
    mode = parallel.server.mode
    if mode == "none":
        return None
    what = "the workers' replicas are built as for ddp, the servers' shares are counted"
    if mode == "peer":
        what = "the ranks' replicas are built as for ddp"
    line = f"parallel.server.mode={mode}: {what}; MPI windows and what goes through them are not rehearsed"
    return replace(parallel, server=ServerConfig()), line
