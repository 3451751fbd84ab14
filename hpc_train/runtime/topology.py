"""Which switches every node of the job hangs on: from cluster.topology, else from Slurm."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_train.cluster.slurm.address import path
from hpc_train.cluster.slurm.scontrol import show_topology
from hpc_train.cluster.spec import Cluster
from hpc_train.config.cluster import ClusterConfig
from hpc_train.runtime.facts import Facts
from hpc_train.runtime.plan import NotPlaced

Paths = Mapping[str, Sequence[str]]
"""Node -> switches, top to leaf."""
_ADDRESS, _PATTERN, _NODE = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN", "SLURMD_NODENAME"


def paths_of(
    cluster: ClusterConfig, heads: Sequence[Facts], ask: Callable[[], Cluster | None] = show_topology
) -> Paths | None:
    """The switches above every node, by host; None where no source tells anything.

    heads: the facts of local rank 0 of every node. ask: what `scontrol show topology` says; called once at most, and
    only in a Slurm job. Raises NotPlaced where a source tells of some nodes only or contradicts itself, UserError for a
    cluster.topology that cannot be read.
    """
    if cluster.topology is not None:
        return _from_file(Path(cluster.topology).expanduser(), heads)
    if any(_ADDRESS in head.slurm for head in heads):
        return _from_addresses(heads, ask)
    shown = ask() if "SLURM_JOB_ID" in os.environ else None
    return _complete(_by_name(shown), heads, "`scontrol show topology`") if shown else None


def _from_file(file: Path, heads: Sequence[Facts]) -> Paths:
    from hpc_train.cluster.reading import read_file

    return _complete(_by_name(read_file(file)), heads, f"cluster.topology={file}")


def _by_name(cluster: Cluster) -> Paths:
    from hpc_train.cluster import tree

    return tree.paths_of(cluster)


def _complete(found: Paths, heads: Sequence[Facts], source: str) -> Paths:
    """The paths of all nodes, which a source may know by Slurm's name, by the host's, or by the first part of it."""
    known = {head.host: _first_of(found, head) for head in heads}
    if missing := [host for host, names in known.items() if not names]:
        raise NotPlaced(f"{source} does not tell where {missing[0]} is ({len(missing)} of {len(heads)} nodes)")
    return known


def _first_of(found: Paths, head: Facts) -> Sequence[str]:
    names = (head.slurm.get(_NODE, head.host), head.host, head.host.partition(".")[0])
    return next((found[name] for name in names if found.get(name)), ())


def _from_addresses(heads: Sequence[Facts], ask: Callable[[], Cluster | None]) -> Paths | None:
    nodes = Counter(head.slurm.get(_NODE, head.host) for head in heads)
    twice = next((node for node, count in nodes.items() if count > 1), None)
    if twice is not None:
        raise NotPlaced(f"{nodes[twice]} nodes have the environment of {twice}; start the ranks by srun")
    if missing := [head.host for head in heads if _ADDRESS not in head.slurm]:
        raise NotPlaced(f"SLURM_TOPOLOGY_ADDR is not set on {missing[0]} ({len(missing)} of {len(heads)} nodes)")
    found = {head.host: _path(head, ()) for head in heads}
    if any(len(found[head.host]) == 1 and _levels(head) > 1 for head in heads) and (shown := ask()):
        names = frozenset(switch.name for switch in shown.switches)
        found = {head.host: _path(head, names) for head in heads}
    if not any(found.values()):
        return None
    return _complete({head.slurm.get(_NODE, head.host): found[head.host] for head in heads}, heads, _ADDRESS)


def _path(head: Facts, switches: frozenset[str] | tuple[()]) -> tuple[str, ...]:
    return path(head.slurm[_ADDRESS], head.slurm.get(_PATTERN), head.slurm.get(_NODE, head.host), switches)


def _levels(head: Facts) -> int:
    return len(head.slurm.get(_PATTERN, "").split(".")) - 1
