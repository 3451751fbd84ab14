"""Join a job and start its process group.

`join` goes from the launcher's environment to a Task with the job's store; `start` from a Task to a World with process
group and device mesh. `init` does both, for a program of a user's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from hpc_train._torch.observation import make_device_clock
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.parallel import AXES, Degrees, ParallelConfig, resolve_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import RankMap, Task, World
from hpc_train.placement.communication_environment import apply_settings, choose_socket_settings, combine_with_site
from hpc_train.runtime.device_settings import (
    apply_matmul_precision,
    choose_allocator_settings,
    choose_gloo_settings,
    choose_group_options,
    keep_memory_of_steps,
    separate_ranks_on_one_gpu,
)
from hpc_train.runtime.identity import find_local_address, identify_process, make_single_identity
from hpc_train.runtime.rendezvous import open_job_store
from hpc_train.step_clock import HostClock, SilentClock, StepClock

log = logging.getLogger(__name__)


def join(
    env: Mapping[str, str] | None = None,
    interface: str | None = None,
    timeout: timedelta = timedelta(minutes=30),
    meeting: timedelta | None = None,
) -> Task:
    """Join this process's job: identify the process and connect it to the job's store. No process group yet.

    env: the launcher's variables (default: this process's). interface: network for the store, see find_local_address.
    meeting: how long to wait for the other processes at the start, at most `timeout`; later waits on the store end
    after `timeout`. Raises UserError if the environment makes no sense or the others do not come in that time.
    """
    env = os.environ if env is None else env
    identity = identify_process(env) or make_single_identity()
    store = open_job_store(identity, env, interface, min(meeting or timeout, timeout))
    store.set_timeout(timeout)
    return Task(
        process=identity.process,
        processes=identity.processes,
        local=identity.local,
        node=identity.node,
        nodes=identity.nodes,
        launcher=identity.launcher,
        host=identity.host,
        store=store,
    )


def make_identity_map(task: Task) -> RankMap:
    """Return the rank map that leaves ranks in the launcher's order."""
    return RankMap(tuple(range(task.processes)))


def pick_device(task: Task, config: RunConfig, gpu: int | None = None) -> torch.device:
    """Return this rank's GPU; the CPU if the cluster has no GPUs.

    gpu: its index among the visible ones; None: the local rank.
    """
    if torch.cuda.is_available():
        visible = torch.cuda.device_count()
        if task.local >= visible and visible > 1:
            raise UserError(f"local rank {task.local} on {task.host} has no GPU: {visible} are visible")
        # A launcher that binds one GPU to each task leaves it as the only visible one.
        index = task.local if gpu is None else gpu
        return torch.device("cuda", index if visible > 1 else 0)
    if config.cluster.node.gpus:
        raise UserError(
            f"cluster={config.cluster.name}: {config.cluster.node.gpus} GPUs per node, but torch sees none on "
            f"{task.host}; check the job's GPU request and that torch is a CUDA build"
        )
    return torch.device("cpu")


def _set_environment(task: Task, cluster: ClusterConfig, device: torch.device) -> None:
    """Set what the libraries read from the environment, and the site's variables, unless the user has."""
    interface = cluster.fabric.interface
    _, name = find_local_address(task.host, task.nodes, interface)
    sockets = choose_socket_settings(name, task.nodes, interface is not None)
    settings = [
        *sockets,
        *choose_gloo_settings(task.processes),
        *choose_allocator_settings(
            device, {**os.environ, **{name: value or "" for name, value in cluster.environment.items()}}
        ),
    ]
    apply_settings(combine_with_site(settings, cluster.environment)[0], os.environ)


def start(task: Task, rank_map: RankMap, config: RunConfig) -> World:
    """Initialise the process group and the mesh. Every process of the job calls it.

    The default group reduces CPU tensors with gloo and CUDA tensors with NCCL.
    Raises UserError if the degrees do not multiply to the number of processes.
    """
    degrees = resolve_degrees(config.parallel, task.processes)  # first: wrong degrees need no process group
    device = pick_device(task, config, rank_map.gpu)
    # gloo and NCCL read their variables when the process group is made.
    _set_environment(task, config.cluster, device)
    apply_matmul_precision(config)
    keep_memory_of_steps(device, os.environ)
    rank = rank_map.process_to_rank[task.process]
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything allocates, or each rank also gets a context on GPU 0
    separate_ranks_on_one_gpu(task, device)
    assert task.store is not None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", task.store),  # apart from the keys of the rank assignment
        rank=rank,
        world_size=task.processes,
        timeout=timedelta(seconds=config.launch.timeout_seconds),
        **choose_group_options(device),
    )
    world = make_world(rank, task.processes, task.local, device, degrees, task.store)
    return replace(world, node=task.node, clock=_make_clock(config, device))


def _make_clock(config: RunConfig, device: torch.device) -> StepClock:
    """Make the clock of a rank. The host's clock says nothing about the parts of a step on a GPU."""
    if not config.train.record_steps:
        return SilentClock()
    return make_device_clock() if device.type == "cuda" else HostClock()


def make_world(
    rank: int, size: int, local_rank: int, device: torch.device, degrees: Degrees, store: dist.Store | None = None
) -> World:
    """Make the World of a started process group. Every rank calls it."""
    mesh = init_device_mesh(device.type, degrees.sizes, mesh_dim_names=AXES)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        device=device,
        mesh=mesh,
        dp_index=_compute_data_index(rank, degrees),
        dp_size=degrees.data_parallel,
        store=store,
    )


def make_another_mesh(world: World, degrees: Degrees) -> World:
    """Make a World of the same ranks with other degrees, to compare layouts in one job. Every rank calls it."""
    mesh = init_device_mesh(world.device.type, degrees.sizes, mesh_dim_names=AXES)
    return replace(world, mesh=mesh, dp_index=_compute_data_index(world.rank, degrees), dp_size=degrees.data_parallel)


def _compute_data_index(rank: int, degrees: Degrees) -> int:
    """Return which data-parallel share of a batch a rank reads; tp, cp and pp ranks of a share read the same."""
    coordinates = degrees.find_coordinates(rank)
    return coordinates["dp_replicate"] * degrees.dp_shard + coordinates["dp_shard"]


def leave_process_group() -> None:
    """Leave the process group; harmless if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()


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
