"""Explain in one line what a placement gains, and under which assumptions."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.placement.fabric import Fabric
from hpc_train.placement.order import tree_order
from hpc_train.placement.result import Case
from hpc_train.placement.tree import tapered, uniform

Table = dict[str, dict[str, dict[str, int]]]
_SETTINGS = {"leaf": "cluster.fabric.oversubscription"}
_ABOVE = "cluster.fabric.group_oversubscription"


def explain(
    fabric: Fabric, cases: Sequence[Case], table: Table, kept: bool, worth: float, unknown: Sequence[str] = ()
) -> str:
    """Explain the gain. cases: cost under each assumption; kept: launcher's order stays; worth: least gain that counts.

    unknown: levels whose taper nobody has told; then `fabric` has an assumed one.
    """
    before = cases[0].identity
    if kept:
        return f"no gain expected: {_why_not(fabric, before, worth)}"
    fewer = _fewer(fabric, table)
    if not fewer and not any(_is_gain(case, worth) for case in cases):
        fewer = "but fewer bytes cross its switches"
    parts = [_gains(fabric, cases, worth, unknown), fewer]
    return "; ".join(part for part in parts if part)


def taper_settings(unknown: Sequence[str]) -> str:
    """Name the settings that give the tapers of these levels."""
    return " and ".join(dict.fromkeys(f"{_SETTINGS.get(level, _ABOVE)}=..." for level in unknown))


def _gains(fabric: Fabric, cases: Sequence[Case], worth: float, unknown: Sequence[str]) -> str:
    tapers = list(dict.fromkeys(case.taper for case in cases))
    if not unknown or tapers == [None]:
        if any(_is_gain(case, worth) for case in cases):
            return f"communication of a step {_both(cases, worth)}"
        nothing = "in the slowest link" if tapered(fabric) else ": no level of the fabric is oversubscribed"
        return f"no gain expected {nothing}".replace(" :", ":")
    parts = []
    for taper in sorted((taper for taper in tapers if taper is not None), reverse=True):
        of_taper = [case for case in cases if case.taper == taper]
        what = "non-blocking" if taper == 1 else f"{taper:g}:1"
        parts.append(f"if it is {what}, communication of a step {_both(of_taper, worth)}")
    levels = " and ".join(unknown)
    return f"the taper of the {levels} uplinks is not known, give {taper_settings(unknown)}: {'; '.join(parts)}"


def _both(cases: Sequence[Case], worth: float) -> str:
    """Format the gain without neighbours and, if different, next to busy ones."""
    alone, *beside = cases
    if not beside or _text(alone, worth) == _text(beside[0], worth):
        return _text(alone, worth)
    return (
        f"{_text(alone, worth)} if no other job uses the uplinks, {_text(beside[0], worth)} if the other nodes of "
        "these switches use their fair share"
    )


def _text(case: Case, worth: float) -> str:
    if not _is_gain(case, worth):
        return f"{_time(case.placed)}, no gain"
    return f"{_time(case.identity)} -> {_time(case.placed)}, {case.identity / case.placed:.2f}x faster"


def _is_gain(case: Case, worth: float) -> bool:
    return case.placed < case.identity * (1 - worth)


def _why_not(fabric: Fabric, before: float, worth: float) -> str:
    count = len(fabric.nodes)
    if count == 1:
        return "one node"
    if before == 0:
        return "the axes of this mesh move nothing"
    if uniform(fabric):
        return f"all {count} nodes are on one switch, as far as is known"
    if len(fabric.levels) > 1 and not tapered(fabric):
        return "no level of the fabric is oversubscribed"
    order = "the launcher's order follows the topology and" if _sorted(fabric) else "the launcher's order"
    return f"{order} is within {worth:.0%} of the best that was found"


def _sorted(fabric: Fabric) -> bool:
    return bool((tree_order(fabric) == range(len(fabric.nodes))).all())


def _fewer(fabric: Fabric, table: Table) -> str:
    """Say how many groups still straddle each level, where there are fewer than before."""
    parts = []
    for level in (level.name for level in fabric.levels[1:]):
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
