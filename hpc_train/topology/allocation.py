"""The nodes that ranks are placed on: those of a Slurm job, of a list on a topology file, or of a described cluster."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpc_train.config.degrees import wanted
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.from_config import described_locations, described_nodes, node_count
from hpc_train.placement.locate import Host, Locations, choose_nodes, locate, read_switches


def allocation(config: RunConfig, listed: str | None, env: Mapping[str, str]) -> Locations:
    """listed: a host list in its order (None: the job's nodes inside a Slurm job, else those of the description).

    Where they are is asked as a job asks it. Raises UserError for a list or a file that is wrong, and for a node that
    appears twice.
    """
    inside = listed is None and "SLURM_JOB_ID" in env
    nodes = job_nodes(env) if inside else None if listed is None else _expanded("--nodes", listed)
    notes: tuple[str, ...] = ()
    if config.cluster.topology:
        if nodes is None:
            nodes, notes = _chosen(config, Path(config.cluster.topology))
    elif not inside:
        return described_locations(config, nodes or described_nodes(node_count(config)))
    assert nodes is not None
    found = locate(config.cluster, [Host(name) for name in nodes], inside)
    return replace(found, notes=(*notes, *found.notes))


def job_nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes of the Slurm job that this process is in, in Slurm's order."""
    return _expanded("SLURM_JOB_NODELIST", env.get("SLURM_JOB_NODELIST", ""))


def shuffled(nodes: Locations, seed: int) -> Locations:
    """The same nodes in a random order, to see what a bad one costs."""
    order = list(nodes.nodes)
    random.Random(seed).shuffle(order)
    return replace(nodes, nodes=tuple(order), source=f"{nodes.source}, shuffled with seed {seed}")


def _expanded(what: str, text: str) -> tuple[str, ...]:
    from hpc_train.cluster.slurm.hostlist import expand

    nodes = tuple(expand(text))
    if not nodes:
        raise UserError(f"{what}: no node in it; give names such as node[01-08],node12")
    if len(set(nodes)) != len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise UserError(f"{what}: {twice} is in it twice; a node holds its ranks once")
    return nodes


def _chosen(config: RunConfig, file: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (as many of the file's first compute nodes as the run takes; a note on the other hosts)."""
    nodes, notes = choose_nodes(config.cluster, read_switches(file))
    asked = config.cluster.nodes or config.launch.ranks or -1 not in wanted(config.parallel).values()
    count = node_count(config) if asked else len(nodes)
    if count > len(nodes):
        rest = f"; {notes[0]}" if notes else ""
        raise UserError(f"{config.cluster.topology}: has {len(nodes)} nodes, and the run needs {count}{rest}")
    return nodes[:count], notes
