"""The nodes that ranks are placed on: those of a Slurm job, of a list on a topology file, or of a described cluster."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.cluster.reading import read_file
from hpc_train.cluster.spec import Cluster
from hpc_train.cluster.tree import paths_of
from hpc_train.config.cluster import ClusterConfig
from hpc_train.config.degrees import wanted
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.placement.from_config import described_nodes, described_places, node_count

Paths = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Allocation:
    """Nodes of one job and what is known of where they are."""

    nodes: tuple[str, ...]
    """In the launcher's order."""
    paths: Paths
    """Switches of a node, top to leaf."""
    domains: Mapping[str, str]
    """NVLink domain of a node, where domains span nodes."""
    source: str
    """Who says so."""
    missing: tuple[str, ...] = ()
    """Nodes of which the source says nothing."""


def allocation(config: RunConfig, listed: str | None, env: Mapping[str, str]) -> Allocation:
    """listed: a host list in its order (None: the job's nodes inside a Slurm job, else those of the description).

    Raises UserError for a list or a file that is wrong, and for a node that appears twice.
    """
    inside = listed is None and "SLURM_JOB_ID" in env
    nodes = job_nodes(env) if inside else None if listed is None else _expanded("--nodes", listed)
    if config.cluster.topology:
        return _on_file(config, nodes, Path(config.cluster.topology))
    return _in_job(config, nodes) if inside and nodes else _described(config, nodes)


def job_nodes(env: Mapping[str, str]) -> tuple[str, ...]:
    """Nodes of the Slurm job that this process is in, in Slurm's order."""
    return _expanded("SLURM_JOB_NODELIST", env.get("SLURM_JOB_NODELIST", ""))


def shuffled(nodes: Allocation, seed: int) -> Allocation:
    """The same nodes in a random order, to see what a bad one costs."""
    order = list(nodes.nodes)
    random.Random(seed).shuffle(order)
    return replace(nodes, nodes=tuple(order), source=f"{nodes.source}, shuffled with seed {seed}")


def domains_of(cluster: Cluster, config: ClusterConfig) -> dict[str, str]:
    """NVLink domain of each node: as its GPUs say; else Slurm's blocks, where the cluster's domains span nodes."""
    cliques = {node.name: {gpu.clique for gpu in node.gpus} for node in cluster.nodes}
    known = {name: next(iter(them)) for name, them in cliques.items() if len(them) == 1}
    said = {name: clique for name, clique in known.items() if clique is not None}
    if said or cluster.kind != "slurm_block" or config.node.nvlink_domain_gpus <= max(config.node.gpus, 1):
        return said
    return {node: switch.name for switch in cluster.switches if switch.level == 0 for node in switch.nodes}


def _expanded(what: str, text: str) -> tuple[str, ...]:
    from hpc_train.cluster.slurm.hostlist import expand

    nodes = tuple(expand(text))
    if not nodes:
        raise UserError(f"{what}: no node in it; give names such as node[01-08],node12")
    if len(set(nodes)) != len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise UserError(f"{what}: {twice} is in it twice; a node holds its ranks once")
    return nodes


def _on_file(config: RunConfig, nodes: tuple[str, ...] | None, path: Path) -> Allocation:
    cluster = read_file(path)
    paths = _known_paths(cluster)
    if not paths:
        raise UserError(f"{path}: cluster.topology needs switches with nodes on them; this file tells of none")
    if nodes is None:
        nodes = tuple(paths)[: _wanted(config, len(paths))]
    return _known(nodes, paths, domains_of(cluster, config.cluster), str(path))


def _wanted(config: RunConfig, most: int) -> int:
    """Nodes of a file that the run takes: as many as it asks for; all of them if a degree is what is left."""
    asked = config.cluster.nodes or config.launch.ranks or -1 not in wanted(config.parallel).values()
    count = node_count(config) if asked else most
    if count > most:
        raise UserError(f"{config.cluster.topology}: has {most} nodes, and the run needs {count}")
    return count


def _in_job(config: RunConfig, nodes: tuple[str, ...]) -> Allocation:
    from hpc_train.cluster.slurm.scontrol import show_topology

    cluster = show_topology()
    if cluster is None:
        return Allocation(nodes, {}, {}, "Slurm, which tells of no switches", nodes)
    return _known(nodes, _known_paths(cluster), domains_of(cluster, config.cluster), "Slurm")


def _known_paths(cluster: Cluster) -> Paths:
    return {node: path for node, path in paths_of(cluster).items() if path}


def _known(nodes: tuple[str, ...], paths: Paths, domains: Mapping[str, str], source: str) -> Allocation:
    missing = tuple(node for node in nodes if node not in paths)
    return Allocation(nodes, paths, domains, source, missing)


def _described(config: RunConfig, nodes: tuple[str, ...] | None) -> Allocation:
    chosen = nodes or described_nodes(node_count(config))
    return Allocation(chosen, *described_places(config, chosen), f"conf/cluster/{config.cluster.name}.yaml")
