"""topology.conf of Slurm's plugins topology/tree, topology/block and topology/ring."""

from __future__ import annotations

import re

from hpc_train.cluster.slurm.assemble import Unit, cluster, demand_defined, demand_disjoint, gather, link_speed
from hpc_train.cluster.slurm.records import Grammar, Record, records
from hpc_train.cluster.slurm.show import matches as is_shown
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_FIRST = re.compile(r"^[ \t]*(?:SwitchName|BlockName|RingName|BlockSizes)[ \t]*=", re.IGNORECASE | re.MULTILINE)
_GRAMMAR = Grammar(
    kinds={
        "switchname": "slurm_tree",
        "blockname": "slurm_block",
        "blocksizes": "slurm_block",
        "ringname": "slurm_ring",
    },
    keys={
        "slurm_tree": frozenset({"switchname", "switches", "nodes", "linkspeed"}),
        "slurm_block": frozenset({"blockname", "nodes", "blocksizes"}),
        "slurm_ring": frozenset({"ringname", "nodes"}),
    },
)


def matches(text: str) -> bool:
    """Whether a line begins as one of topology.conf does, and none as scontrol prints it."""
    return bool(_FIRST.search(text)) and not is_shown(text)


def read(text: str, name: str) -> Cluster:
    """The cluster; kind slurm_tree, slurm_block or slurm_ring. Keys in any case, comments, continued lines.

    As Slurm does, refuses a switch with both nodes and switches, one below another that no line defines, a name that
    is defined twice and a circle. Several roots are legal, and so is a node (or switch) on several switches. A node in
    two blocks or rings is refused. BlockSizes= says how Slurm plans, not what hangs where: no switch comes of it.
    """
    lines = list(records(text, name, _GRAMMAR))
    units = gather((_unit(it) for it in lines if it.first != "blocksizes"), name)
    if not units:
        raise UserError(f"{name}: no switch or block; expected lines such as SwitchName=leaf1 Nodes=n[1-16]")
    demand_defined(units, name)
    kind = _GRAMMAR.kinds[lines[0].first]
    if kind != "slurm_tree":
        demand_disjoint(units, name)
    return cluster(kind, units, name)


def _unit(record: Record) -> Unit:
    nodes, switches = record.list("nodes"), record.list("switches")
    if nodes and switches:
        raise record.error("Nodes= and Switches= in one line; expected one of them")
    speed = link_speed(record.number("linkspeed")) if "linkspeed" in record.values else None
    if "blocksizes" in record.values:
        raise record.error("BlockSizes= belongs on a line of its own")
    return Unit(record.name(), record.line, nodes, switches, link_speed=speed)
