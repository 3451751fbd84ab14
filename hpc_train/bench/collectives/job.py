"""The job that a rank of `bench collectives` is in: started and placed as a training is, and its fabric's levels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch

from hpc_train.api import Task, World
from hpc_train.bench.collectives.levels import RankLevel, levels_of_ranks
from hpc_train.collectives import all_gather_values, broadcast_value
from hpc_train.config.degrees import Degrees, resolve
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.messages import Codec
from hpc_train.placement.levels import NamedLevel, levels_of
from hpc_train.placement.locate import locate
from hpc_train.runtime.arrange import arrange
from hpc_train.runtime.facts import hear_all
from hpc_train.runtime.plan import NotPlaced, by_node
from hpc_train.runtime.search import hosts_of
from hpc_train.runtime.start import join, shut_down, start


@dataclass(frozen=True)
class Job:
    """This rank and what it knows of the others."""

    world: World
    degrees: Degrees
    nodes: int
    levels: tuple[RankLevel, ...]
    """Innermost first."""
    placement: str
    """How ranks came to their nodes."""
    notes: tuple[str, ...] = ()
    """What is not known."""


@contextmanager
def started(config: RunConfig) -> Iterator[Job]:
    """Join, take a rank and start. Raises UserError as a run would, and for a job of one rank."""
    if config.launch.threads:
        torch.set_num_threads(config.launch.threads)
    task = join(interface=config.cluster.fabric.interface, timeout=timedelta(seconds=config.launch.timeout_seconds))
    if task.processes < 2:
        raise UserError("bench collectives: one rank has nobody to talk to; start more (launch.ranks=2, srun -n 2)")
    rank_map = arrange(task, config)
    world = start(task, rank_map, config)
    try:
        hosts = all_gather_values(task.host)
        nodes = list(dict.fromkeys(hosts))
        levels, note = _from_rank_0(config, task, world, nodes)
        notes = tuple(it for it in (rank_map.warning, note) if it)
        ranked = tuple(levels_of_ranks(hosts, nodes, levels))
        yield Job(world, resolve(config.parallel, world.size), len(nodes), ranked, rank_map.reason, notes)
    finally:
        shut_down()


def _from_rank_0(
    config: RunConfig, task: Task, world: World, nodes: Sequence[str]
) -> tuple[tuple[NamedLevel, ...], str | None]:
    """Its levels and note, on all ranks."""
    found = known_levels(config, task, nodes) if world.rank == 0 else None
    return broadcast_value(found, codec=Codec((NamedLevel,)))


def known_levels(config: RunConfig, task: Task, nodes: Sequence[str]) -> tuple[tuple[NamedLevel, ...], str | None]:
    """(levels of these nodes, as cluster.topology, Slurm or NVLink tell; why there is none above the node, if so)."""
    if len(nodes) == 1:
        return levels_of(nodes), None
    try:
        facts = hear_all(task, timedelta(seconds=config.launch.timeout_seconds))
        heads = [ranks[0] for ranks in by_node(facts, task.processes)]
        where = locate(config.cluster, hosts_of(heads), "SLURM_JOB_ID" in os.environ)
    except (NotPlaced, UserError) as why:
        return levels_of(nodes), f"levels above the node are not known: {why}"
    if where.problem is not None:
        return levels_of(nodes), f"levels above the node are not known: {where.problem}"
    return levels_of(nodes, where.paths, where.domains), None
