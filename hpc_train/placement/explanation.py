"""Explain a placement in one line, and advise what to ask the scheduler for if no order of nodes helps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpc_train.placement.fabric import Fabric, find_tapered_levels, is_uniform, pluralise_level
from hpc_train.placement.mesh_groups import (
    CrossableGroups,
    find_crossable_groups,
    format_axes,
    list_rows,
)
from hpc_train.placement.node_orders import order_along_tree
from hpc_train.placement.placement_result import CostCase, Placement
from hpc_train.traffic.axes import Flow
from hpc_train.units import format_seconds

StraddlingTable = dict[str, dict[str, dict[str, int]]]
_SETTINGS = {"leaf": "cluster.fabric.oversubscription"}
_ABOVE = "cluster.fabric.group_oversubscription"


def explain_placement(
    fabric: Fabric,
    cases: Sequence[CostCase],
    table: StraddlingTable,
    unchanged: bool,
    worth: float,
    unknown: Sequence[str] = (),
) -> str:
    """Explain the gain in one line, or why there is none.

    cases: cost under each assumption; unchanged: the launcher's order stays; worth: least gain that counts; unknown:
    levels whose taper nobody gives, for which `fabric` has an assumed one.
    """
    before = cases[0].identity
    if unchanged:
        return f"no gain expected: {_explain_no_gain(fabric, before, worth)}"
    fewer = _format_fewer_straddling(fabric, table)
    if not fewer and not any(_is_gain(case, worth) for case in cases):
        fewer = "but fewer bytes cross its switches"
    parts = [_explain_gains(fabric, cases, worth, unknown), fewer]
    return "; ".join(part for part in parts if part)


def name_taper_settings(unknown: Sequence[str]) -> str:
    """Name the settings that give the tapers of these levels."""
    return " and ".join(dict.fromkeys(f"{_SETTINGS.get(level, _ABOVE)}=..." for level in unknown))


def _explain_gains(fabric: Fabric, cases: Sequence[CostCase], worth: float, unknown: Sequence[str]) -> str:
    tapers = list(dict.fromkeys(case.taper for case in cases))
    if not unknown or tapers == [None]:
        if any(_is_gain(case, worth) for case in cases):
            return f"communication of a step {_format_both(cases, worth)}"
        if find_tapered_levels(fabric):
            return "no gain expected in the slowest link"
        return "no gain expected: no level of the fabric is oversubscribed"
    parts = []
    for taper in sorted((taper for taper in tapers if taper is not None), reverse=True):
        of_taper = [case for case in cases if case.taper == taper]
        what = "non-blocking" if taper == 1 else f"{taper:g}:1"
        parts.append(f"if it is {what}, communication of a step {_format_both(of_taper, worth)}")
    levels = " and ".join(unknown)
    return f"the taper of the {levels} uplinks is not known, give {name_taper_settings(unknown)}: {'; '.join(parts)}"


def _format_both(cases: Sequence[CostCase], worth: float) -> str:
    """Format the gain without neighbours and, if different, next to busy ones."""
    alone, *busy_cases = cases
    silent = _format_gain(alone, worth)
    if not busy_cases or silent == (busy := _format_gain(busy_cases[0], worth)):
        return silent
    return (
        f"{silent} if no other job uses the uplinks, {busy} if the other nodes of these switches use their fair share"
    )


def _format_gain(case: CostCase, worth: float) -> str:
    if not _is_gain(case, worth):
        return f"{format_seconds(case.placed)}, no gain"
    return (
        f"{format_seconds(case.identity)} -> {format_seconds(case.placed)}, {case.identity / case.placed:.2f}x faster"
    )


def _is_gain(case: CostCase, worth: float) -> bool:
    return case.placed < case.identity * (1 - worth)


def _explain_no_gain(fabric: Fabric, before: float, worth: float) -> str:
    count = len(fabric.nodes)
    if count == 1:
        return "one node"
    if before == 0:
        return "the axes of this mesh move nothing"
    if is_uniform(fabric):
        return f"all {count} nodes are on one switch, as far as is known"
    if len(fabric.levels) > 1 and not find_tapered_levels(fabric):
        return "no level of the fabric is oversubscribed"
    order = "the launcher's order follows the topology and" if _is_sorted(fabric) else "the launcher's order"
    return f"{order} is within {worth:.0%} of the best that was found"


def _is_sorted(fabric: Fabric) -> bool:
    return bool((order_along_tree(fabric) == range(len(fabric.nodes))).all())


def _format_fewer_straddling(fabric: Fabric, table: StraddlingTable) -> str:
    """Say how many groups still straddle each level, where there are fewer than before."""
    parts = []
    for level in (level.name for level in fabric.levels[1:]):
        for axis, levels in table.items():
            if level in levels and levels[level]["placed"] < levels[level]["identity"]:
                counts = levels[level]
                change = f"{counts['identity']} -> {counts['placed']} of {counts['groups']}"
                parts.append(f"{axis} groups that straddle a {level}: {change}")
    return ", ".join(parts)


def advise_allocation(
    fabric: Fabric, sizes: Mapping[str, int], flows: Sequence[Flow], placement: Placement
) -> tuple[str, ...]:
    """Advise on every axis whose groups, as placed, straddle an oversubscribed level that could hold them.

    Only axes whose groups lie on neighbouring nodes of the mesh count: an outer axis crosses so that inner ones need
    not.
    """
    groups = {format_axes(flow.axes): list_rows(sizes, flow.axes, fabric.ranks_per_node) for flow in flows}
    order, narrow = np.array(placement.nodes)[None], set(find_tapered_levels(fabric))
    lines = []
    for groups_of_level in find_crossable_groups(fabric, groups):
        straddle = int(groups_of_level.count_straddling_by_order(fabric, order)[0])
        if straddle and groups_of_level.level in narrow and _are_neighbours(groups_of_level):
            lines.append(_format_advice(fabric, groups_of_level, straddle))
    return tuple(lines)


def count_least_straddling(fabric: Fabric, groups: CrossableGroups) -> int:
    """Return how many groups straddle the level in any order of the nodes; 0 if that cannot be told.

    A group of the level holds as many sets of `spread` nodes as fit into it whole. Sets that share no node are counted.
    """
    nodes = int(groups.spread.max())
    if (groups.spread != nodes).any() or len(groups.rows) * nodes != len(np.unique(groups.rows)):
        return 0
    # Whole sets that fit into each group of the level; what is left over of a group cannot hold one.
    capacity = int((np.bincount(fabric.levels[groups.level].group) // nodes).sum())
    return max(0, len(groups.rows) - capacity) * int(groups.copies.min())


def _are_neighbours(groups: CrossableGroups) -> bool:
    return bool((groups.rows[:, -1] - groups.rows[:, 0] + 1 == groups.spread).all())


def _format_advice(fabric: Fabric, groups: CrossableGroups, straddle: int) -> str:
    level, nodes = fabric.levels[groups.level].name, int(groups.spread.max())
    several = f"several {pluralise_level(level)}"
    what = f"{straddle} of {groups.count} {groups.axis} groups ({nodes} nodes each) lie in {several}"
    least = count_least_straddling(fabric, groups)
    if not least:
        return f"{what}: the other axes weigh more; a smaller degree of {groups.axis} would fit"
    why = f"no permutation can fix it (in any order of these nodes at least {least} do)"
    return f"{what}: {why}; {_format_request(fabric, groups)}"


def _format_request(fabric: Fabric, groups: CrossableGroups) -> str:
    level, nodes = fabric.levels[groups.level], int(groups.spread.max())
    if level.name == "domain":
        return f"ask for --segment={nodes} (topology/block, Slurm 24.05 or newer), or for a smaller {groups.axis}"
    sizes = np.bincount(level.group)
    # As many leaves as would be needed if all were as full as the fullest.
    fewest = math.ceil(len(fabric.nodes) / int(sizes.max()))
    if level.name == "leaf" and fewest < len(sizes):
        return f"ask for --switches={fewest}, or for a smaller {groups.axis}"
    return f"ask for nodes in whole multiples of {nodes} a {level.name} (--nodelist), or for a smaller {groups.axis}"
