"""What to ask the scheduler for, where no order of the nodes that it gave keeps a group together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpc_train.placement.fabric import Fabric
from hpc_train.placement.mesh import label, rows
from hpc_train.placement.result import Placement
from hpc_train.placement.straddling import Crossable, crossable, several
from hpc_train.placement.tree import tapered
from hpc_train.traffic.flow import Flow

SEGMENT_SINCE = (24, 5)
"""Version of Slurm whose sbatch has --segment, for topology/block."""


def advice(
    fabric: Fabric,
    sizes: Mapping[str, int],
    flows: Sequence[Flow],
    placement: Placement,
    slurm: tuple[int, int] | None = None,
) -> tuple[str, ...]:
    """One line for every axis whose groups, as placed, straddle an oversubscribed level that could hold one.

    Of axes whose groups lie on neighbouring nodes of the mesh; an outer axis crosses so that inner ones need not.
    slurm: version of the cluster's Slurm as (year, month); None: not known.
    """
    groups = {label(flow.axes): rows(sizes, flow.axes, fabric.ranks_per_node) for flow in flows}
    order, narrow = np.array(placement.nodes)[None], set(tapered(fabric))
    lines = []
    for it in crossable(fabric, groups):
        straddle = int(it.straddle(fabric, order)[0])
        if straddle and it.level in narrow and _neighbours(it):
            lines.append(_line(fabric, it, straddle, slurm))
    return tuple(lines)


def least_straddling(fabric: Fabric, it: Crossable) -> int:
    """Groups that straddle the level in any order of the nodes; 0 where that cannot be told.

    A group of the level holds as many sets of `spread` nodes as fit into it whole. Sets that share no node are counted.
    """
    nodes = int(it.spread.max())
    if (it.spread != nodes).any() or len(it.rows) * nodes != len(np.unique(it.rows)):
        return 0
    whole = int((np.bincount(fabric.levels[it.level].group) // nodes).sum())
    return max(0, len(it.rows) - whole) * int(it.copies.min())


def _neighbours(it: Crossable) -> bool:
    return bool((it.rows[:, -1] - it.rows[:, 0] + 1 == it.spread).all())


def _line(fabric: Fabric, it: Crossable, straddle: int, slurm: tuple[int, int] | None) -> str:
    level, nodes = fabric.levels[it.level].name, int(it.spread.max())
    what = f"{straddle} of {it.groups} {it.axis} groups ({nodes} nodes each) lie in several {several(level)}"
    least = least_straddling(fabric, it)
    if not least:
        return f"{what}: the other axes weigh more; a smaller degree of {it.axis} would fit"
    why = f"no permutation can fix it (in any order of these nodes at least {least} do)"
    return f"{what}: {why}; {_request(fabric, it, slurm)}"


def _request(fabric: Fabric, it: Crossable, slurm: tuple[int, int] | None) -> str:
    level, nodes = fabric.levels[it.level], int(it.spread.max())
    if level.name == "domain":
        if slurm is None:
            return f"ask for --segment={nodes} (topology/block, Slurm 24.05 or newer), or for a smaller {it.axis}"
        if slurm >= SEGMENT_SINCE:
            return f"ask for --segment={nodes}"
        return f"this Slurm has no --segment: ask for nodes by name (--nodelist), or for a smaller {it.axis}"
    sizes = np.bincount(level.group)
    fewest = math.ceil(len(fabric.nodes) / int(sizes.max()))
    if level.name == "leaf" and fewest < len(sizes):
        return f"ask for --switches={fewest}, or for a smaller {it.axis}"
    return f"ask for nodes in whole multiples of {nodes} a {level.name} (--nodelist), or for a smaller {it.axis}"
