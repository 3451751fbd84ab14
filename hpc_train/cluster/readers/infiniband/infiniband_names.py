"""Name the devices of an InfiniBand subnet: find which adapters are in one host, and the name of each switch.

Node descriptions are free text, and only some of them name a host. Adapters whose description names none are assigned
to servers by the pattern that the named adapters follow: by system, by port number, or by neighbouring GUIDs.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from hpc_train.cluster.readers.infiniband.subnet_devices import CA, SubnetDevice, get_device_kind
from hpc_train.cluster.similar_sets import group_similar_sets

_MOSTLY = 0.9
"""Share of the named servers that must follow a cabling rule before it is applied to the others."""
_BOARD = 64
"""Maximum distance between the GUIDs of one board."""


def assign_nameless_adapters(
    adapters: Sequence[SubnetDevice], named: Mapping[str, str], number_of: Callable[[SubnetDevice], int | None]
) -> dict[str, str]:
    """Map each adapter without a name to its server's name, or to the server's first adapter id if it has no name.

    named: host of each adapter that tells it; number_of: its GUID. Adapters with the same system image GUID belong to
    one server. If nine of ten named servers have all their cables in ports of one number, on different leaves of a
    unit, adapters in such ports belong to one server. Otherwise adapters belong together if their GUIDs follow one
    another as those of named servers do, on different switches. An adapter that matches no other is a server of its
    own.
    """
    nameless = [adapter for adapter in adapters if adapter.id not in named]
    if not nameless:
        return {}
    groups = _group_by_system(nameless)
    plugs = {adapter.id: [(cable.far, cable.far_port) for cable in adapter.cables.values()] for adapter in adapters}
    if _use_same_ports(named, plugs):
        host_of = _assign_by_port(groups, named, plugs)
    else:
        host_of = _assign_by_guid(groups, adapters, named, plugs, number_of)
    return host_of | {adapter.id: group[0].id for group in groups for adapter in group if adapter.id not in host_of}


CablePlugs = Mapping[str, Sequence[tuple[str, int]]]
"""(switch, port of the switch) of each cable of an adapter, by adapter."""


def _group_by_system(nameless: Sequence[SubnetDevice]) -> list[list[SubnetDevice]]:
    groups: dict[str, list[SubnetDevice]] = defaultdict(list)
    for adapter in nameless:
        groups[adapter.system or adapter.id].append(adapter)
    return list(groups.values())


def _group_by_host(named: Mapping[str, str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = defaultdict(list)
    for id, host in named.items():
        members[host].append(id)
    return members


def _use_same_ports(named: Mapping[str, str], plugs: CablePlugs) -> bool:
    """Whether each server's cables are in ports of one number, each on a different switch."""
    same = several = 0
    for ids in _group_by_host(named).values():
        cables = [plug for id in ids for plug in plugs.get(id, ())]
        if len(cables) > 1:
            several += 1
            same += len({port for _, port in cables}) == 1 and len({switch for switch, _ in cables}) == len(cables)
    return several > 1 and same >= _MOSTLY * several


def _assign_by_port(
    groups: Sequence[Sequence[SubnetDevice]], named: Mapping[str, str], plugs: CablePlugs
) -> dict[str, str]:
    """Return a host for each adapter without a name, by the ports of the leaf switches that it is plugged into."""
    unit = _number_units(named, plugs)
    owners: dict[tuple[int, int], set[str]] = defaultdict(set)
    for id, host in named.items():
        for switch, port in plugs.get(id, ()):
            owners[unit.get(switch, -1), port].add(host)
    used = {
        host: {switch for id in ids for switch, _ in plugs.get(id, ())} for host, ids in _group_by_host(named).items()
    }
    hosts_of: dict[str, str] = {}
    first: dict[tuple[int, int], str] = {}
    for group in groups:
        keys = {(unit[switch], port) for adapter in group for switch, port in plugs[adapter.id] if switch in unit}
        # One (unit, port) pair means one server. It joins a named server of that pair, unless both have a cable to the
        # same leaf, which two adapters of one server never have. Two candidates: leave it without a name.
        if len(keys) == 1:
            key = next(iter(keys))
            switches = {switch for adapter in group for switch, _ in plugs[adapter.id]}
            hosts = {host for host in owners[key] if used[host].isdisjoint(switches)}
            if len(hosts) < 2:
                hosts_of |= dict.fromkeys(
                    (adapter.id for adapter in group), next(iter(hosts), first.setdefault(key, group[0].id))
                )
    return hosts_of


def _number_units(named: Mapping[str, str], plugs: CablePlugs) -> dict[str, int]:
    """Map each leaf to the number of its scalable unit, judged by the named hosts on it."""
    on: dict[str, set[object]] = defaultdict(set)
    for id, host in named.items():
        for switch, _ in plugs.get(id, ()):
            on[switch].add(host)
    switches = list(on)
    groups = group_similar_sets([frozenset(on[switch]) for switch in switches])
    return {switches[member]: number for number, members in enumerate(groups) for member in members}


def _assign_by_guid(
    groups: Sequence[Sequence[SubnetDevice]],
    adapters: Sequence[SubnetDevice],
    named: Mapping[str, str],
    plugs: CablePlugs,
    number_of: Callable[[SubnetDevice], int | None],
) -> dict[str, str]:
    """Find runs of GUIDs one board step apart, each on another switch, no longer than a named server has adapters."""
    numbers = sorted((number, adapter.id) for adapter in adapters if (number := number_of(adapter)) is not None)
    step = _find_guid_step(numbers, named)
    members = _group_by_host(named)
    adapters_per_server = Counter(map(len, members.values())).most_common(1)[0][0] if members else 0
    if step is None or adapters_per_server < 2:
        return {}
    growth = _ServerGrowth(dict(numbers), step, adapters_per_server, named, plugs)
    # Named servers first, upwards and downwards along their GUIDs. What is left then becomes servers without a name,
    # each called by the first adapter of its system.
    system = {adapter.id: group[0].id for group in groups for adapter in group}
    for order, make_new in ((numbers, False), (numbers[::-1], False), (numbers, True)):
        for number, id in order:
            if id not in growth.host:
                growth.join_neighbour(number, id, system[id] if make_new else None)
    return {id: name for id, name in growth.host.items() if id not in named}


class _ServerGrowth:
    """Servers that take in adapters one by one: which adapters each has, and on which switches."""

    def __init__(
        self, by_number: Mapping[int, str], step: int, most: int, named: Mapping[str, str], plugs: CablePlugs
    ) -> None:
        """by_number: adapter by GUID number. step: between neighbours of one server. most: adapters of a server."""
        self.host = dict(named)
        """Server of each adapter."""
        self._by_number, self._step, self._most, self._plugs = by_number, step, most, plugs
        members = _group_by_host(named)
        self._size = {name: len(ids) for name, ids in members.items()}
        self._switches = {name: set().union(*map(self._list_switches, ids)) for name, ids in members.items()}

    def join_neighbour(self, number: int, id: str, new_name: str | None) -> None:
        """Add an adapter to the server of a GUID neighbour that has room; else, with a new name, to a new server.

        A server has one adapter on a switch (a rail each), so a switch that it is on already means another server.
        """
        switches = self._list_switches(id)
        neighbours = (self._by_number.get(number - self._step), self._by_number.get(number + self._step))
        servers = [self.host[neighbour] for neighbour in neighbours if neighbour in self.host]
        fits = [name for name in servers if self._size[name] < self._most and self._switches[name].isdisjoint(switches)]
        name = fits[0] if fits else new_name
        if name is None:
            return
        self.host[id] = name
        self._switches.setdefault(name, set()).update(switches)
        self._size[name] = self._size.get(name, 0) + 1

    def _list_switches(self, id: str) -> set[str]:
        return {switch for switch, _ in self._plugs.get(id, ())}


def _find_guid_step(numbers: Sequence[tuple[int, str]], named: Mapping[str, str]) -> int | None:
    """Return the GUID step between neighbours in one server; None if most neighbours that far apart are strangers."""
    same, strangers = Counter[int](), Counter[int]()
    for (low, a), (high, b) in pairwise(numbers):
        if high - low <= _BOARD and a in named and b in named:
            (same if named[a] == named[b] else strangers)[high - low] += 1
    if not same:
        return None
    step, count = same.most_common(1)[0]
    return step if count >= strangers[step] else None


_DEVICE = (
    r"(?:hca|ca|mlx[45]|mlx[45]_(?:ib|bond|roce)|mthca|mtnic|hfi1|qib|ipath|opa|ibp?|ibs|ibm|roce\w*|rdma\w*|rocep\w*|ibp\w*|"
    r"ibs\w*|irdma|cxgb\d|bnxt_re|efa|rxe|siw|cxi|hsn|hns|erdma|ocrdma)"
)
_HOST_AND_DEVICE = re.compile(rf"(?P<host>[\w.-]*?\w)[\s:/_.@-]+(?P<device>{_DEVICE}[-_]?\d[\w.:]*)\b.*", re.IGNORECASE)
_ONLY_DEVICE = re.compile(rf"{_DEVICE}[-_]?\d\w*", re.IGNORECASE)
_ONE_WORD = re.compile(r"[\w.-]+")
_HOST_AND_WORD = re.compile(r"(?P<host>[A-Za-z][\w.-]*\d[\w.-]*)\s+(?P<device>[\w.:-]+)")
_VENDOR = re.compile(
    r"mellanox|technolog|nvidia|voltaire|qlogic|truescale|topspin|silverstorm|infini|switch-?(?:x|ib)|connect-?(?:x|ib)|"
    r"quantum|bluefield|\bMT\d{4,}|\bISR\d{4}|host channel|adapter",
    re.IGNORECASE,
)
_NO_HOST = frozenset({"localhost", "localhost.localdomain", "(none)", "none", "unknown"})
_MANAGED = re.compile(r"MF0;\s*(?P<name>[^:;]*[^:;\s])\s*(?::(?P<part>.*))?")


def is_aggregation_node(device: SubnetDevice) -> bool:
    """Whether the adapter is SHARP's processor within a switch, which shows itself as a channel adapter."""
    return device.kind == CA and "aggregation node" in (device.name or "").lower()


def parse_description(description: str | None) -> tuple[str, str | None] | None:
    """Split `gpu01 mlx5_4` into ("gpu01", "mlx5_4").

    None if no host is named: `MT4129 ConnectX7 Mellanox Technologies`.
    """
    text = " ".join((description or "").strip("'\" ").split())
    if not text or _VENDOR.search(text) or _ONLY_DEVICE.fullmatch(text):
        return None
    match = _HOST_AND_DEVICE.fullmatch(text) or _HOST_AND_WORD.fullmatch(text)
    if match and not _ONLY_DEVICE.fullmatch(match["host"]):
        host, device = match["host"], match["device"]
    elif _ONE_WORD.fullmatch(text):
        host, device = text, None
    else:
        return None
    return None if host.lower() in _NO_HOST else (host, device)


def name_hosts(adapters: Sequence[SubnetDevice]) -> dict[str, tuple[str, str | None]]:
    """Map each adapter to (host, device).

    Names come from the description, else from an adapter with the same system image GUID that has a name, else from
    assign_nameless_adapters. A host without any name is called by its system image GUID.
    """
    named = _list_named_adapters(adapters)
    of_system: dict[str | None, set[str]] = defaultdict(set)
    for adapter in adapters:
        if adapter.id in named:
            of_system[adapter.system].add(named[adapter.id][0])
    names = dict(named)
    for adapter in adapters:
        if adapter.id not in named and adapter.system and len(of_system[adapter.system]) == 1:
            names[adapter.id] = (next(iter(of_system[adapter.system])), None)
    joined = assign_nameless_adapters(adapters, {id: host for id, (host, _) in names.items()}, _parse_guid_number)
    systems = {adapter.id: adapter.system or format_guid(adapter) for adapter in adapters}
    return names | {id: (systems.get(host, host), None) for id, host in joined.items()}


def _parse_guid_number(adapter: SubnetDevice) -> int | None:
    return int(adapter.id[2:], 16) if get_device_kind(adapter.id) else None


def _list_named_adapters(adapters: Iterable[SubnetDevice]) -> dict[str, tuple[str, str | None]]:
    """Map the adapters whose description names a host.

    A host most of whose adapters appear twice is several hosts of one name, and is left out.
    """
    named = {
        adapter.id: description
        for adapter in adapters
        if (description := parse_description(adapter.name or _get_simulated_name(adapter)))
    }
    twice: dict[str, list[bool]] = defaultdict(list)
    for (host, device), count in Counter(named.values()).items():
        twice[host].append(device is not None and count > 1)
    return {
        id: description
        for id, description in named.items()
        if 2 * sum(twice[description[0]]) <= len(twice[description[0]])
    }


def _get_simulated_name(device: SubnetDevice) -> str | None:
    """Return the name of a device of ibsim, whose ids are names instead of GUIDs; None for a real device."""
    return None if get_device_kind(device.id) else device.id


def format_guid(device: SubnetDevice) -> str:
    """Format a GUID as 16 hexadecimal digits, lower case; a device of ibsim has its name instead."""
    return device.id[2:].lower() if get_device_kind(device.id) else device.id


def name_switches(switches: Sequence[SubnetDevice]) -> dict[str, str]:
    """Name each switch, no two alike: its own name, with its place in a chassis if several share it, else its GUID."""
    choices = {switch.id: [*_list_own_names(switch), format_guid(switch), switch.id] for switch in switches}
    while duplicates := {
        name for name, count in Counter(choice[0] for choice in choices.values()).items() if count > 1
    }:
        for names in choices.values():
            if names[0] in duplicates and len(names) > 1:
                del names[0]
    return {id: names[0] for id, names in choices.items()}


def _list_own_names(device: SubnetDevice) -> list[str]:
    text = " ".join((device.name or _get_simulated_name(device) or "").split())
    if match := _MANAGED.fullmatch(text):
        return [match["name"], f"{match['name']}:{match['part']}"] if match["part"] else [match["name"]]
    return [text] if _ONE_WORD.fullmatch(text) and not _VENDOR.search(text) else []
