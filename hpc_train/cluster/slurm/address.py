"""SLURM_TOPOLOGY_ADDR: where a node hangs, as slurmd tells it every step that runs on the node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import pairwise

from hpc_train.cluster.slurm.assemble import Unit, cluster
from hpc_train.cluster.slurm.hostlist import expand, group
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_COORDINATES = {"ring": 1, "torus": 3}
"""Numbers that follow a unit's name after colons, by the first word of the pattern."""


def path(address: str, pattern: str | None, node: str, switches: Collection[str] = ()) -> tuple[str, ...]:
    """Names from the top switch to the leaf (or block, ring, torus) that `node` hangs on; () where Slurm knows none.

    address, pattern: SLURM_TOPOLOGY_ADDR and _PATTERN; node: SLURMD_NODENAME. Names of nodes and switches may hold
    dots, so the node is cut off by its name, and the number of names left is the pattern's. Where dots leave it open
    which names these are, `switches` (all names, as scontrol shows them) decides; without, all that is before the
    node is one name of its own: nodes with the same are together, and no more is claimed. A level without a switch is
    left out. Several switches on one level are one group, named alike whatever their order: opasw[06-07,11,14-15].

    Raises UserError for an address that does not end in the node's name.
    """
    if address == node:
        return ()
    before = address.removesuffix(f".{node}")
    if before == address:
        raise UserError(f"SLURM_TOPOLOGY_ADDR={address[:80]} does not end in the node's name, {node}")
    words = (pattern or "").split(".")[:-1]
    if (first := words[0].split(":")[0] if words else "") in _COORDINATES:
        name = before.rsplit(":", _COORDINATES[first])[0]
        return (name,) if name else ()
    found = _split(before, len(words), switches)
    return (before,) if found is None else tuple(_canonical(name) for name in found if name)


def cluster_of_paths(paths: Mapping[str, Sequence[str]]) -> Cluster:
    """The cluster of nodes in this order, each with its names from top to leaf; kind slurm_address.

    Raises UserError where the paths contradict each other (one puts a above b, another b above a).
    """
    nodes: dict[str, list[str]] = {}
    below: dict[str, dict[str, None]] = {}
    for node, names in paths.items():
        for name in names:
            nodes.setdefault(name, [])
            below.setdefault(name, {})
        for upper, lower in pairwise(names):
            below[upper][lower] = None
        if names:
            nodes[names[-1]].append(node)
    units = {name: Unit(name, 1, tuple(nodes[name]), tuple(below[name])) for name in nodes}
    return cluster("slurm_address", units, "SLURM_TOPOLOGY_ADDR", paths)


def _split(before: str, count: int, switches: Collection[str]) -> tuple[str, ...] | None:
    """The only way to see `count` names in it; None where there is none or more than one."""
    pieces = before.split(".")
    if len(pieces) == count:
        return tuple(pieces)
    if not switches or not 0 < count < len(pieces):
        return None
    known = frozenset(switches)

    @cache
    def ways(start: int, left: int) -> list[tuple[str, ...]]:
        """Up to two ways to see `left` names in the pieces from `start` on."""
        if left == 0:
            return [()] if start == len(pieces) else []
        found: list[tuple[str, ...]] = []
        for end in range(start + 1, len(pieces) - left + 2):
            name = ".".join(pieces[start:end])
            if not name or _is_known(name, known):
                found += [(name, *rest) for rest in ways(end, left - 1)]
        return found[:2]

    found = ways(0, count)
    return found[0] if len(found) == 1 else None


def _is_known(name: str, known: Collection[str]) -> bool:
    return name in known or (_is_group(name) and all(member in known for member in _members(name)))


def _canonical(name: str) -> str:
    return group(_members(name)) if _is_group(name) else name


def _is_group(name: str) -> bool:
    return "," in name or "[" in name


def _members(name: str) -> list[str]:
    try:
        return expand(name) or [name]
    except UserError:
        return [name]
