"""Assign adapters whose description names no host to servers, by example of the adapters that do name one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from hpc_train.cluster.infiniband.text import Device
from hpc_train.cluster.tree import group_alike

_MOSTLY = 0.9
"""Share of the named servers that must follow a cabling rule before it is applied to the others."""
_BOARD = 64
"""Largest distance between GUIDs of one board."""


def join_nameless(
    adapters: Sequence[Device], named: Mapping[str, str], number_of: Callable[[Device], int | None]
) -> dict[str, str]:
    """Map each adapter without a name to its server's name, or to the server's first adapter id if it has no name.

    named: host of each adapter that tells it; number_of: its GUID. Adapters with the same system image GUID belong to
    one server. If nine of ten named servers have all their cables in ports of one number, on different leaves of a
    unit, adapters in such ports belong to one server. Otherwise adapters belong together if their GUIDs follow one
    another as those of named servers do, on different switches. An adapter that matches no other is a server of its
    own.
    """
    nameless = [it for it in adapters if it.id not in named]
    if not nameless:
        return {}
    groups = _by_system(nameless)
    plugs = {it.id: [(cable.far, cable.far_port) for cable in it.cables.values()] for it in adapters}
    if _same_ports(named, plugs):
        found = _by_port(groups, named, plugs)
    else:
        found = _by_guid(groups, adapters, named, plugs, number_of)
    return found | {it.id: group[0].id for group in groups for it in group if it.id not in found}


Plugs = Mapping[str, Sequence[tuple[str, int]]]
"""Adapter -> (switch, port of the switch) for each of its cables."""


def _by_system(nameless: Sequence[Device]) -> list[list[Device]]:
    groups: dict[str, list[Device]] = defaultdict(list)
    for it in nameless:
        groups[it.system or it.id].append(it)
    return list(groups.values())


def _members(named: Mapping[str, str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = defaultdict(list)
    for id, host in named.items():
        members[host].append(id)
    return members


def _same_ports(named: Mapping[str, str], plugs: Plugs) -> bool:
    """Whether each server's cables are in ports of one number, each on a different switch."""
    kept = several = 0
    for ids in _members(named).values():
        cables = [plug for id in ids for plug in plugs.get(id, ())]
        if len(cables) > 1:
            several += 1
            kept += len({port for _, port in cables}) == 1 and len({switch for switch, _ in cables}) == len(cables)
    return several > 1 and kept >= _MOSTLY * several


def _by_port(groups: Sequence[Sequence[Device]], named: Mapping[str, str], plugs: Plugs) -> dict[str, str]:
    unit = _units(named, plugs)
    owners: dict[tuple[int, int], set[str]] = defaultdict(set)
    for id, host in named.items():
        for switch, port in plugs.get(id, ()):
            owners[unit.get(switch, -1), port].add(host)
    used = {host: {switch for id in ids for switch, _ in plugs.get(id, ())} for host, ids in _members(named).items()}
    found: dict[str, str] = {}
    first: dict[tuple[int, int], str] = {}
    for group in groups:
        keys = {(unit[switch], port) for it in group for switch, port in plugs[it.id] if switch in unit}
        if len(keys) == 1:
            key = next(iter(keys))
            own = {switch for it in group for switch, _ in plugs[it.id]}
            hosts = {host for host in owners[key] if used[host].isdisjoint(own)}
            if len(hosts) < 2:
                found |= dict.fromkeys((it.id for it in group), next(iter(hosts), first.setdefault(key, group[0].id)))
    return found


def _units(named: Mapping[str, str], plugs: Plugs) -> dict[str, int]:
    """Map each leaf to the number of its scalable unit, judged by the named hosts on it."""
    on: dict[str, set[object]] = defaultdict(set)
    for id, host in named.items():
        for switch, _ in plugs.get(id, ()):
            on[switch].add(host)
    switches = list(on)
    groups = group_alike([frozenset(on[switch]) for switch in switches])
    return {switches[member]: number for number, members in enumerate(groups) for member in members}


def _by_guid(
    groups: Sequence[Sequence[Device]],
    adapters: Sequence[Device],
    named: Mapping[str, str],
    plugs: Plugs,
    number_of: Callable[[Device], int | None],
) -> dict[str, str]:
    """Find runs of GUIDs one board step apart, each on another switch, no longer than a named server has adapters."""
    numbers = sorted((number, it.id) for it in adapters if (number := number_of(it)) is not None)
    step = _step(numbers, named)
    members = _members(named)
    most = Counter(map(len, members.values())).most_common(1)[0][0] if members else 0
    if step is None or most < 2:
        return {}
    host = dict(named)
    used = {name: {switch for id in ids for switch, _ in plugs.get(id, ())} for name, ids in members.items()}
    size = {name: len(ids) for name, ids in members.items()}
    system = {it.id: group for group in groups for it in group}
    at = dict(numbers)

    def join(number: int, id: str, alone: bool) -> None:
        """Join the server of a GUID neighbour with room for it; an adapter that is alone becomes its own server."""
        own = {switch for switch, _ in plugs.get(id, ())}
        near = [host[at[it]] for it in (number - step, number + step) if it in at and at[it] in host]
        fits = [name for name in near if size[name] < most and used[name].isdisjoint(own)]
        if not fits and not alone:
            return
        name = fits[0] if fits else system[id][0].id
        host[id] = name
        used.setdefault(name, set()).update(own)
        size[name] = size.get(name, 0) + 1

    for order, alone in ((numbers, False), (numbers[::-1], False), (numbers, True)):
        for number, id in order:
            if id not in host:
                join(number, id, alone)
    return {id: name for id, name in host.items() if id not in named}


def _step(numbers: Sequence[tuple[int, str]], named: Mapping[str, str]) -> int | None:
    """Return the GUID step between neighbours in one server; None if most neighbours that far apart are strangers."""
    same, strangers = Counter[int](), Counter[int]()
    for (low, a), (high, b) in pairwise(numbers):
        if high - low <= _BOARD and a in named and b in named:
            (same if named[a] == named[b] else strangers)[high - low] += 1
    if not same:
        return None
    step, count = same.most_common(1)[0]
    return step if count >= strangers[step] else None
