"""One honest line on what a placement wins."""

from __future__ import annotations

from hpc_train.placement.fabric import Fabric
from hpc_train.placement.order import tree_order
from hpc_train.placement.tree import tapered, uniform

Table = dict[str, dict[str, dict[str, int]]]


def explain(fabric: Fabric, before: float, after: float, table: Table, kept: bool, worth: float) -> str:
    """before, after: modelled seconds; kept: the launcher's order stays; worth: least gain that counts."""
    if kept:
        return f"no gain expected: {_why_not(fabric, before, worth)}"
    fewer = _fewer(fabric, table)
    if after < before * (1 - worth):
        gain = f"communication of a step {_time(before)} -> {_time(after)}, {before / after:.2f}x faster"
        return f"{gain}; {fewer}" if fewer else gain
    return f"no gain expected in the slowest link; {fewer}"


def _why_not(fabric: Fabric, before: float, worth: float) -> str:
    count = len(fabric.nodes)
    if count == 1:
        return "one node"
    if before == 0:
        return "the axes of this mesh move nothing"
    if uniform(fabric):
        return f"all {count} nodes are on one switch, as far as is known"
    if len(fabric.levels) > 1 and not tapered(fabric):
        return "no level of the fabric is oversubscribed (non-blocking), as far as is known"
    order = "the launcher's order follows the topology and" if _sorted(fabric) else "the launcher's order"
    return f"{order} is within {worth:.0%} of the best that was found"


def _sorted(fabric: Fabric) -> bool:
    return bool((tree_order(fabric) == range(len(fabric.nodes))).all())


def _fewer(fabric: Fabric, table: Table) -> str:
    """What no longer straddles an oversubscribed level."""
    parts = []
    for number in tapered(fabric):
        level = fabric.levels[number].name
        for axis, levels in table.items():
            if level in levels and levels[level]["placed"] < levels[level]["identity"]:
                it = levels[level]
                change = f"{it['identity']} -> {it['placed']} of {it['groups']}"
                parts.append(f"{axis} groups that straddle a {level}: {change}")
    return ", ".join(parts)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
