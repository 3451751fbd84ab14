"""Read an InfiniBand subnet as ibnetdiscover dumps it: text -> devices and cables -> names -> levels -> Cluster.

The syntax is in ibnetdiscover_text.py, the names of hosts and switches in infiniband_names.py. In this file: both ends
of every cable, which must not contradict each other; how far each switch is from the hosts (leaves are level 0); the
Cluster.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from hpc_train.cluster.hostlist import natural_key
from hpc_train.cluster.readers.infiniband.direct_networks import DirectNetwork, recognise_direct_network
from hpc_train.cluster.readers.infiniband.ibnetdiscover_text import parse_ibnetdiscover
from hpc_train.cluster.readers.infiniband.infiniband_names import (
    format_guid,
    is_aggregation_node,
    name_hosts,
    name_switches,
)
from hpc_train.cluster.readers.infiniband.subnet_devices import (
    CA,
    SWITCH,
    CableEnd,
    SubnetDevice,
    get_device_kind,
    parse_rate,
)
from hpc_train.cluster.spec import Cluster, Nic, Node, Switch, Trunk, sum_rates
from hpc_train.errors import UserError


def connect_cables(devices: dict[str, SubnetDevice], name: str) -> dict[str, SubnetDevice]:
    """Complete every cable at both ends, and add the devices that are seen at a far end only.

    A dump of a part of a subnet is legal: a far end without a record is a device of which only that cable is known.
    Raises UserError where two lines contradict each other, and where the file ends within a switch's record.
    """
    everything = dict(devices)
    missing: dict[str, tuple[int, int]] = {}
    for device in devices.values():
        for port, cable in list(device.cables.items()):
            far = everything.get(cable.far) or _add_seen_device(cable, everything, name)
            back = far.cables.get(cable.far_port)
            if back is None:
                if cable.far_port > far.ports:
                    raise UserError(
                        f"{name}:{cable.line}: port {cable.far_port} of {far.id}; expected 1 to {far.ports}"
                    )
                far.cables[cable.far_port] = CableEnd(device.id, port, cable.line, device.name, cable.rate)
                if far.line is not None:
                    missing.setdefault(far.id, (cable.far_port, cable.line))
            elif (back.far, back.far_port) != (device.id, port):
                raise _make_contradiction_error(device.id, port, cable, back, name)
    _check_end(devices, missing, name)
    return everything


def _add_seen_device(cable: CableEnd, everything: dict[str, SubnetDevice], name: str) -> SubnetDevice:
    kind = get_device_kind(cable.far)
    if kind is None:
        raise UserError(
            f"{name}:{cable.line}: {cable.far} has no record; expected one, because its id does not show its kind"
        )
    return everything.setdefault(cable.far, SubnetDevice(cable.far, kind, None, name=cable.far_name))


def _make_contradiction_error(id: str, port: int, cable: CableEnd, back: CableEnd, name: str) -> UserError:
    return UserError(
        f"{name}:{cable.line}: {id}[{port}] goes to {cable.far}[{cable.far_port}], by line {back.line} that port goes "
        f"to {back.far}[{back.far_port}]; expected both ends of a cable to agree"
    )


def _check_end(devices: dict[str, SubnetDevice], missing: dict[str, tuple[int, int]], name: str) -> None:
    """Refuse a dump that ends within a switch's record.

    The switch lost hosts that no other line lists, so its level would be wrong.
    """
    last = max(devices.values(), key=lambda device: device.line or 0)
    if last.kind == SWITCH and set(missing) == {last.id}:
        port, line = missing[last.id]
        raise UserError(
            f"{name}:{last.line}: the file ends within {last.id}: line {line} lists its port {port}, its record "
            "does not; expected a whole record"
        )


def compute_switch_levels(devices: Mapping[str, SubnetDevice], hosts: Container[str], name: str) -> dict[str, int]:
    """Map each switch to its hops from the nearest switch with a host. hosts: adapters that are in hosts.

    A switch without a record may hold hosts that the dump does not tell of, and so may the last one of a dump that
    tells but a part of its devices: it may be cut there. A level that hangs on what such a switch may hold is refused;
    a switch without a record on which no host is seen is left out. Switches that no host is connected to are level 0.
    """
    switches = {id: device for id, device in devices.items() if device.kind == SWITCH}
    leaves = [id for id, switch in switches.items() if any(cable.far in hosts for cable in switch.cables.values())]
    # Levels with the hosts that are seen, and levels if every uncertain switch had a host, too. Where the two differ,
    # the level depends on what the dump does not show.
    farthest = _compute_distances(switches, leaves)
    nearest = _compute_distances(switches, [*leaves, *_list_uncertain_switches(devices)])
    for id, level in nearest.items():
        if (line := switches[id].line) is not None and farthest.get(id) != level:
            raise UserError(
                f"{name}:{line}: how far {id} is from a host hangs on switches that have no whole record; "
                "expected the whole dump"
            )
    recorded = {id: farthest.get(id, 0) for id, switch in switches.items() if switch.line is not None}
    return recorded | dict.fromkeys(leaves, 0)


def _list_uncertain_switches(devices: Mapping[str, SubnetDevice]) -> list[str]:
    """List the switches that may have more cables than the dump lists."""
    seen = [id for id, device in devices.items() if device.line is None]
    last = max(devices.values(), key=lambda device: device.line or 0)
    return [device for device in [*seen, *([last.id] if seen else [])] if devices[device].kind == SWITCH]


def _compute_distances(switches: Mapping[str, SubnetDevice], start: Iterable[str]) -> dict[str, int]:
    distances = dict.fromkeys(start, 0)
    queue = deque(distances)
    while queue:
        id = queue.popleft()
        for cable in switches[id].cables.values():
            if cable.far in switches and cable.far not in distances:
                distances[cable.far] = distances[id] + 1
                queue.append(cable.far)
    return distances


_DUMP = re.compile(
    r'^[ \t]*(?:(?:Switch|H?ca|Rt)\s+\d+\s*"|(?:switch|h?ca|rt|sysimg)guids?=0x|vendid=0x|# Topology file: generated)|'
    r'^[ \t]*\[\d+\][^\n"]*"[SHR]-[0-9a-f]{16}"',
    re.IGNORECASE | re.MULTILINE,
)
_OTHERS = {
    "ibnetdiscover --list": re.compile(r"^(?:Switch|Ca|Router)\s*: 0x[0-9a-f]{16} ports ", re.MULTILINE),
    "ibnetdiscover --ports": re.compile(r"^(?:SW|CA|RT)\s+\d+\s+\d+ 0x[0-9a-f]{16} ", re.MULTILINE),
}
"""Output of the same tools that does not tell a fabric, or tells it otherwise."""


def matches_ibnetdiscover(text: str) -> bool:
    """Whether the text is a dump of ibnetdiscover, or something often mistaken for one."""
    return bool(_DUMP.search(text)) or any(pattern.search(text) for pattern in _OTHERS.values())


def read_ibnetdiscover(text: str, name: str) -> Cluster:
    """Read the hosts, their adapters and the switches; Nic.switches lists the switches of each adapter.

    Devices are known by GUID. SHARP's aggregation nodes and routers are no hosts. Raises UserError, one line, for a
    dump that is cut or contradicts itself.
    """
    # The beginning of a dump tells what it is; the other expressions would be looked for in all of it.
    for tool, pattern in () if _DUMP.search(text) else _OTHERS.items():
        if pattern.search(text):
            raise UserError(f"{name}:1: {tool} is not read; expected what ibnetdiscover prints without options")
    return make_fabric(parse_ibnetdiscover(text, name), name, "ibnetdiscover")


def make_fabric(recorded: dict[str, SubnetDevice], name: str, kind: str) -> Cluster:
    """Make the cluster of the devices of a subnet that have a record. kind: the source. Raises UserError."""
    devices = connect_cables(recorded, name)
    adapters = [device for device in devices.values() if device.kind == CA and not is_aggregation_node(device)]
    if not adapters:
        raise UserError(
            f"{name}:1: no adapter of a host; expected the whole dump, which has at least the one it ran on"
        )
    host_of = name_hosts(adapters)
    levels = compute_switch_levels(devices, host_of, name)
    names = name_switches([devices[id] for id in devices if id in levels])
    nodes = _make_nodes(adapters, host_of, names)
    switches = tuple(_make_switches(devices, levels, names, host_of))
    joined = _list_joined_switches(devices, levels)
    network = recognise_direct_network(levels, _list_neighbours(devices, levels)) if joined else None
    if network is not None and network.kind == "dragonfly":
        switches += tuple(_make_groups(network, switches, names))
    return Cluster(kind, nodes, (), switches, _list_notes(network, joined, len(levels)))


def _make_nodes(
    adapters: Iterable[SubnetDevice], host_of: Mapping[str, tuple[str, str | None]], switches: Mapping[str, str]
) -> tuple[Node, ...]:
    members: dict[str, list[SubnetDevice]] = defaultdict(list)
    for adapter in adapters:
        members[host_of[adapter.id][0]].append(adapter)
    return tuple(
        Node(host, (), _make_nics(adapters_of_host, host_of, switches)) for host, adapters_of_host in members.items()
    )


def _make_nics(
    adapters: list[SubnetDevice], host_of: Mapping[str, tuple[str, str | None]], switches: Mapping[str, str]
) -> tuple[Nic, ...]:
    """Make a host's NICs, in the order of the numbers in their device names."""
    ordered = sorted(adapters, key=lambda adapter: (natural_key(host_of[adapter.id][1] or "~"), adapter.id))
    return tuple(_make_nic(f"NIC{n}", adapter, host_of[adapter.id][1], switches) for n, adapter in enumerate(ordered))


def _make_nic(id: str, adapter: SubnetDevice, device: str | None, switches: Mapping[str, str]) -> Nic:
    rates = [parse_rate(cable.rate) for cable in adapter.cables.values()]
    on = dict.fromkeys(switches[cable.far] for _, cable in sorted(adapter.cables.items()) if cable.far in switches)
    return Nic(
        id,
        device,
        guid=format_guid(adapter) if get_device_kind(adapter.id) else None,
        active=bool(adapter.cables),
        gbit_s=sum_rates(rates),
        layer="infiniband",
        switches=tuple(on),
    )


def _make_switches(
    devices: Mapping[str, SubnetDevice],
    levels: Mapping[str, int],
    names: Mapping[str, str],
    host_of: Mapping[str, tuple[str, str | None]],
) -> Iterable[Switch]:
    """Yield the switches, lowest level first. No switch is below another one of the same level."""
    for id in sorted(levels, key=levels.__getitem__):
        far = [cable.far for _, cable in sorted(devices[id].cables.items())]
        below = [names[device] for device in far if device in levels and levels[device] == levels[id] - 1]
        hosts = [host_of[device][0] for device in far if device in host_of]
        uplinks = _make_uplinks(id, devices, levels, names)
        yield Switch(names[id], levels[id], tuple(dict.fromkeys(hosts)), tuple(dict.fromkeys(below)), uplinks)


def _make_uplinks(
    id: str, devices: Mapping[str, SubnetDevice], levels: Mapping[str, int], names: Mapping[str, str]
) -> tuple[Trunk, ...]:
    """Return the switch's cables to all switches not below it, including those without their own record."""
    rates: dict[str, list[float | None]] = defaultdict(list)
    for _, cable in sorted(devices[id].cables.items()):
        far = devices[cable.far]
        if far.kind == SWITCH and far.id != id and levels.get(far.id, levels[id]) >= levels[id]:
            rates[far.id].append(parse_rate(cable.rate))
    return tuple(
        Trunk(names.get(far) or format_guid(devices[far]), len(cable_rates), sum_rates(cable_rates))
        for far, cable_rates in rates.items()
    )


def _list_neighbours(devices: Mapping[str, SubnetDevice], levels: Mapping[str, int]) -> dict[str, list[str]]:
    """Map each switch to the other switches that it is cabled to, each once."""
    return {
        id: list(
            dict.fromkeys(cable.far for cable in devices[id].cables.values() if cable.far in levels and cable.far != id)
        )
        for id in levels
    }


def _list_joined_switches(devices: Mapping[str, SubnetDevice], levels: Mapping[str, int]) -> list[str]:
    """List the switches that are cabled to others of their own level."""
    return [
        id
        for id, level in levels.items()
        if any(levels.get(cable.far) == level and cable.far != id for cable in devices[id].cables.values())
    ]


def _make_groups(network: DirectNetwork, switches: Sequence[Switch], names: Mapping[str, str]) -> Iterator[Switch]:
    """Yield the groups of a dragonfly as switches above their own, with the cables between groups as uplinks."""
    by_name = {switch.name: switch for switch in switches}
    members = [[names[id] for id in group] for group in network.groups]
    titles = [f"dragonfly group {number}" for number in range(1, len(members) + 1)]
    title_of = {name: title for title, group in zip(titles, members, strict=True) for name in group}
    for title, group in zip(titles, members, strict=True):
        trunks: dict[str, list[Trunk]] = defaultdict(list)
        for trunk in (trunk for name in group for trunk in by_name[name].uplinks):
            if title_of.get(trunk.switch) != title:
                trunks[title_of.get(trunk.switch, trunk.switch)].append(trunk)
        uplinks = tuple(
            Trunk(far, sum(trunk.cables for trunk in cables), sum_rates(trunk.gbit_s for trunk in cables))
            for far, cables in trunks.items()
        )
        yield Switch(title, 1, (), tuple(group), uplinks)


def _list_notes(network: DirectNetwork | None, joined: Sequence[str], switches: int) -> tuple[str, ...]:
    """Say what network the cables between switches of one level make, and what is not read of it."""
    if network is not None and network.kind == "torus":
        return (
            f"the cables are those of {network.describe()}: distances in it do not count, each switch is a leaf of its "
            "own",
        )
    if network is not None:
        return (f"the cables are those of {network.describe()}",)
    if len(joined) < 3:
        return ()
    return (
        f"{len(joined)} of {switches} switches are cabled to others of their own level, as in a dragonfly or torus: "
        "its groups are not read, each such switch counts as a leaf of its own; to place by groups give Slurm's "
        "topology.conf with one switch a group",
    )
