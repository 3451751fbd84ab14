"""From a dump to a Cluster."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from hpc_train.cluster.infiniband.cables import connect
from hpc_train.cluster.infiniband.levels import switch_levels
from hpc_train.cluster.infiniband.names import guid, hosts, is_aggregation_node, switch_names
from hpc_train.cluster.infiniband.rates import gbit_s
from hpc_train.cluster.infiniband.text import CA, SWITCH, Device, kind_of, parse
from hpc_train.cluster.spec import Cluster, Nic, Node, Switch, Trunk
from hpc_train.errors import UserError

_DUMP = re.compile(
    r'^[ \t]*(?:(?:Switch|H?ca|Rt)\s+\d+\s*"|(?:switch|h?ca|rt|sysimg)guids?=0x|vendid=0x|# Topology file: generated)|'
    r'^[ \t]*\[\d+\][^\n"]*"[SHR]-[0-9a-f]{16}"',
    re.IGNORECASE | re.MULTILINE,
)
_OTHERS = {
    "iblinkinfo": re.compile(r"==\([^()\n]{0,200}\)==>\s"),
    "ibnetdiscover --list": re.compile(r"^(?:Switch|Ca|Router)\s*: 0x[0-9a-f]{16} ports ", re.MULTILINE),
    "ibnetdiscover --ports": re.compile(r"^(?:SW|CA|RT)\s+\d+\s+\d+ 0x[0-9a-f]{16} ", re.MULTILINE),
}
"""Output of the same tools that does not tell a fabric, or tells it otherwise."""


def matches(text: str) -> bool:
    """Whether it is a dump of ibnetdiscover, or what could be mistaken for one."""
    return bool(_DUMP.search(text)) or any(it.search(text) for it in _OTHERS.values())


def read(text: str, name: str) -> Cluster:
    """The hosts, their adapters and the switches; Nic.switches says what each adapter hangs on.

    Devices are known by GUID. SHARP's aggregation nodes and routers are no hosts. Raises UserError, one line, for a
    dump that is cut or contradicts itself.
    """
    for tool, pattern in _OTHERS.items():
        if pattern.search(text) and not _DUMP.search(text):
            raise UserError(f"{name}:1: {tool} is not read; expected what ibnetdiscover prints without options")
    devices = connect(parse(text, name), name)
    adapters = [it for it in devices.values() if it.kind == CA and not is_aggregation_node(it)]
    if not adapters:
        raise UserError(
            f"{name}:1: no adapter of a host; expected the whole dump, which has at least the one it ran on"
        )
    host_of = hosts(adapters)
    levels = switch_levels(devices, host_of, name)
    names = switch_names([devices[id] for id in devices if id in levels])
    nodes = _nodes(adapters, host_of, names)
    switches = tuple(_switches(devices, levels, names, host_of))
    return Cluster("ibnetdiscover", nodes, (), switches, _notes(devices, levels))


def _nodes(
    adapters: Iterable[Device], host_of: Mapping[str, tuple[str, str | None]], switches: Mapping[str, str]
) -> tuple[Node, ...]:
    members: dict[str, list[Device]] = defaultdict(list)
    for adapter in adapters:
        members[host_of[adapter.id][0]].append(adapter)
    return tuple(Node(host, (), _nics(found, host_of, switches)) for host, found in members.items())


def _nics(
    adapters: list[Device], host_of: Mapping[str, tuple[str, str | None]], switches: Mapping[str, str]
) -> tuple[Nic, ...]:
    """In the order of their devices' numbers."""
    ordered = sorted(adapters, key=lambda it: (_natural(host_of[it.id][1] or "~"), it.id))
    return tuple(_nic(f"NIC{n}", it, host_of[it.id][1], switches) for n, it in enumerate(ordered))


def _nic(id: str, adapter: Device, device: str | None, switches: Mapping[str, str]) -> Nic:
    rates = [gbit_s(cable.rate) for cable in adapter.cables.values()]
    known = [rate for rate in rates if rate is not None]
    on = dict.fromkeys(switches[it.far] for _, it in sorted(adapter.cables.items()) if it.far in switches)
    return Nic(
        id,
        device,
        guid=guid(adapter) if kind_of(adapter.id) else None,
        active=bool(adapter.cables),
        gbit_s=sum(known) if known and len(known) == len(rates) else None,
        layer="infiniband",
        switches=tuple(on),
    )


def _natural(text: str) -> tuple[tuple[bool, int, str], ...]:
    """HCA-10 after HCA-9."""
    return tuple((it.isdecimal(), int(it) if it.isdecimal() else 0, it) for it in re.split(r"([0-9]+)", text))


def _switches(
    devices: Mapping[str, Device],
    levels: Mapping[str, int],
    names: Mapping[str, str],
    host_of: Mapping[str, tuple[str, str | None]],
) -> Iterable[Switch]:
    """Lowest level first; of two switches of one level neither is below the other."""
    for id in sorted(levels, key=levels.__getitem__):
        far = [cable.far for _, cable in sorted(devices[id].cables.items())]
        below = [names[it] for it in far if it in levels and levels[it] == levels[id] - 1]
        hosts = [host_of[it][0] for it in far if it in host_of]
        uplinks = _uplinks(id, devices, levels, names)
        yield Switch(names[id], levels[id], tuple(dict.fromkeys(hosts)), tuple(dict.fromkeys(below)), uplinks)


def _uplinks(
    id: str, devices: Mapping[str, Device], levels: Mapping[str, int], names: Mapping[str, str]
) -> tuple[Trunk, ...]:
    """Return the switch's cables to all switches not below it, including those without their own record."""
    rates: dict[str, list[float | None]] = defaultdict(list)
    for _, cable in sorted(devices[id].cables.items()):
        far = devices[cable.far]
        if far.kind == SWITCH and far.id != id and levels.get(far.id, levels[id]) >= levels[id]:
            rates[far.id].append(gbit_s(cable.rate))
    return tuple(Trunk(names.get(far) or guid(devices[far]), len(found), _sum(found)) for far, found in rates.items())


def _sum(rates: list[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None


def _notes(devices: Mapping[str, Device], levels: Mapping[str, int]) -> tuple[str, ...]:
    """List what the tree of switches leaves out: cables between switches of one level."""
    joined = [
        id
        for id, level in levels.items()
        if sum(levels.get(cable.far) == level and cable.far != id for cable in devices[id].cables.values())
    ]
    if len(joined) < 3:
        return ()
    return (
        f"{len(joined)} of {len(levels)} switches are cabled to others of their own level, as in a dragonfly or torus: "
        "its groups are not read, each such switch counts as a leaf of its own; to place by groups give Slurm's "
        "topology.conf with one switch a group",
    )
