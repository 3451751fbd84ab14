"""Choose the nodes to place ranks on: those of a Slurm job, of a list on a topology file, or of a described cluster.

`topology place`, the API and `bench placement` choose here. A job has its nodes already, and locates them by the same
locate_hosts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_train.config.parallel import list_requested_degrees
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.described_cluster import (
    count_nodes,
    locate_described_cluster,
    name_described_nodes,
)
from hpc_train.placement.node_locations import (
    JobHost,
    NodeLocations,
    choose_compute_nodes,
    locate_hosts,
    read_switch_file,
)


def find_allocation(config: RunConfig, listed: str | None, env: Mapping[str, str]) -> NodeLocations:
    """Choose the nodes of a run and locate them, in the same way as a job does.

    listed: a host list, in its order (None: the job's nodes inside a Slurm job, else the first nodes of the
    description). Raises UserError for a list or a file that is wrong, and for a node that appears twice.
    """
    inside = listed is None and "SLURM_JOB_ID" in env
    nodes: tuple[str, ...] | None = None
    if inside:
        nodes = list_job_nodes(env)
    elif listed is not None:
        nodes = _expand_hosts("--nodes", listed)
    notes: tuple[str, ...] = ()
    if config.cluster.topology:
        if nodes is None:
            nodes, notes = _choose_from_file(config, Path(config.cluster.topology))
    elif not inside:
        return locate_described_cluster(config, nodes or name_described_nodes(count_nodes(config)))
    assert nodes is not None
    locations = locate_hosts(config.cluster, [JobHost(name) for name in nodes], inside)
    return replace(locations, notes=(*notes, *locations.notes))


def list_job_nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """List the nodes of the Slurm job around this process, in Slurm's order."""
    return _expand_hosts("SLURM_JOB_NODELIST", env.get("SLURM_JOB_NODELIST", ""))


def shuffle_nodes(nodes: NodeLocations, seed: int) -> NodeLocations:
    """Put the nodes into a random order, to see what a bad one costs."""
    order = list(nodes.nodes)
    random.Random(seed).shuffle(order)
    return replace(nodes, nodes=tuple(order), source=f"{nodes.source}, shuffled with seed {seed}")


def _expand_hosts(origin: str, text: str) -> tuple[str, ...]:
    """Expand a host list. origin: the option or variable that has it, for errors."""
    from hpc_train.cluster.hostlist import expand_hostlist

    nodes = tuple(expand_hostlist(text))
    if not nodes:
        raise UserError(f"{origin}: no node in it; give names such as node[01-08],node12")
    if len(set(nodes)) != len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise UserError(f"{origin}: {twice} is in it twice; a node holds its ranks once")
    return nodes


def _choose_from_file(config: RunConfig, file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (the file's first compute nodes, as many as the run takes; a note on the other hosts)."""
    nodes, notes = choose_compute_nodes(config.cluster, read_switch_file(file))
    asked = config.cluster.nodes or config.launch.ranks or -1 not in list_requested_degrees(config.parallel).values()
    count = count_nodes(config) if asked else len(nodes)
    if count > len(nodes):
        rest = f"; {notes[0]}" if notes else ""
        raise UserError(f"{config.cluster.topology}: has {len(nodes)} nodes, and the run needs {count}{rest}")
    return nodes[:count], notes
