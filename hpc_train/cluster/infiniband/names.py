"""What devices are called: node descriptions are free text, and only some of them name a host or a switch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from hpc_train.cluster.infiniband.nameless import join_nameless
from hpc_train.cluster.infiniband.text import CA, Device, kind_of

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


def is_aggregation_node(device: Device) -> bool:
    """SHARP's processor within a switch, which shows itself as a channel adapter."""
    return device.kind == CA and "aggregation node" in (device.name or "").lower()


def host_and_device(description: str | None) -> tuple[str, str | None] | None:
    """("gpu01", "mlx5_4") of `gpu01 mlx5_4`; None where no host is named: `MT4129 ConnectX7 Mellanox Technologies`."""
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


def hosts(adapters: Sequence[Device]) -> dict[str, tuple[str, str | None]]:
    """Return (host, device) for each adapter.

    Names come from the description, else from an adapter with the same system image GUID that has a name, else from
    `join_nameless`. A host without any name is called by its system image GUID.
    """
    named = _named(adapters)
    of_system: dict[str | None, set[str]] = defaultdict(set)
    for adapter in adapters:
        if adapter.id in named:
            of_system[adapter.system].add(named[adapter.id][0])
    found = dict(named)
    for adapter in adapters:
        if adapter.id not in named and adapter.system and len(of_system[adapter.system]) == 1:
            found[adapter.id] = (next(iter(of_system[adapter.system])), None)
    joined = join_nameless(adapters, {id: host for id, (host, _) in found.items()}, _number)
    systems = {adapter.id: adapter.system or guid(adapter) for adapter in adapters}
    return found | {id: (systems.get(host, host), None) for id, host in joined.items()}


def _number(adapter: Device) -> int | None:
    return int(adapter.id[2:], 16) if kind_of(adapter.id) else None


def _named(adapters: Iterable[Device]) -> dict[str, tuple[str, str | None]]:
    """Adapters whose description names a host; a host most of whose adapters are there twice is several of one name."""
    named = {it.id: found for it in adapters if (found := host_and_device(it.name or _simulated(it)))}
    twice: dict[str, list[bool]] = defaultdict(list)
    for (host, device), count in Counter(named.values()).items():
        twice[host].append(device is not None and count > 1)
    return {id: found for id, found in named.items() if 2 * sum(twice[found[0]]) <= len(twice[found[0]])}


def _simulated(device: Device) -> str | None:
    """ibsim's ids are names where they are no GUIDs."""
    return None if kind_of(device.id) else device.id


def guid(device: Device) -> str:
    """16 hexadecimal digits, lower case; for ibsim's names the name."""
    return device.id[2:].lower() if kind_of(device.id) else device.id


def switch_names(switches: Sequence[Device]) -> dict[str, str]:
    """A name of each, no two alike: its own, with its place in a chassis where several share that, else the GUID."""
    choices = {it.id: [*_own_names(it), guid(it), it.id] for it in switches}
    while doubles := {name for name, count in Counter(it[0] for it in choices.values()).items() if count > 1}:
        for names in choices.values():
            if names[0] in doubles and len(names) > 1:
                del names[0]
    return {id: names[0] for id, names in choices.items()}


def _own_names(device: Device) -> list[str]:
    text = " ".join((device.name or _simulated(device) or "").split())
    if match := _MANAGED.fullmatch(text):
        return [match["name"], f"{match['name']}:{match['part']}"] if match["part"] else [match["name"]]
    return [text] if _ONE_WORD.fullmatch(text) and not _VENDOR.search(text) else []
