"""Join a job from a user's own program with one call, whichever launcher started the ranks."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_train.config.parallel import ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import World
from hpc_train.runtime.start import join, make_identity_map, make_world, start

log = logging.getLogger(__name__)


def init(
    *,
    pp: int = 1,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    cp: int = 1,
    tp: int = 1,
    interface: str | None = None,
    timeout_seconds: int = 1800,
) -> World:
    """Join this process's job and return its rank, device and device mesh. Every process calls it.

    The job may be started by srun, torchrun, mpirun or submitit, or be this process alone. Degrees are those of the
    mesh `pp, dp_replicate, dp_shard, cp, tp`; -1 takes what is left, which is dp_shard unless a data-parallel degree is
    given. A process group that the program has started already is used as it is. interface: the network between nodes,
    as in cluster.fabric.interface. End with torch.distributed.destroy_process_group().
    Raises UserError for degrees that do not multiply to the number of processes, and if the others do not come.
    """
    if dp_replicate is None and dp_shard is None:
        dp_shard = -1
    replicate, shard = (1 if degree is None else degree for degree in (dp_replicate, dp_shard))
    config = RunConfig(parallel=ParallelConfig(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp))
    config.launch.timeout_seconds = timeout_seconds
    config.cluster.fabric.interface = interface
    if dist.is_initialized():
        return _use_group(config)
    task = join(interface=interface, timeout=timedelta(seconds=timeout_seconds))
    log.info("%s: process %d of %d on %s", task.launcher, task.process, task.processes, task.host)
    return start(task, make_identity_map(task), config)


def _use_group(config: RunConfig) -> World:
    """Make the World of the existing default process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    degrees = resolve_degrees(config.parallel, size)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return make_world(rank, size, device.index or 0, device, degrees)
