"""Read ibstat's and ibstatus's output: the adapters of one host and the state of their ports.

Layout: rdma-core, infiniband-diags/ibstat.c (ca_dump, port_dump) and scripts/ibstatus.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hpc_train.cluster.spec import LINK_LAYERS, PORT_RATE, UNNAMED_HOST, Cluster, Nic, Node, parse_port_rate, sum_rates
from hpc_train.errors import UserError

_ADAPTER = re.compile(r"(?:CA|Switch|Router|iWARP RNIC|\?\?\?):? '([^']+)'")
_PORT = re.compile(r"Port (\d{1,3}):")
_STATUS = re.compile(r"Infiniband device '([^']+)' port (\d{1,3}) status:")
_FIELD = re.compile(r"([A-Za-z][\w ]*?):(?:\s+(.*))?")
_KINDS = {"ibstat": ("state", "physical state", "rate", "port guid"), "ibstatus": ("state", "phys state", "rate")}
"""Fields of a port that every version of the tool prints."""


@dataclass
class _Section:
    """A heading and the fields below it."""

    line: int
    fields: dict[str, str] = field(default_factory=dict)


@dataclass
class _Adapter(_Section):
    device: str = ""
    ports: dict[int, _Section] = field(default_factory=dict)


def matches_ibstat(text: str) -> bool:
    """Whether a line is a heading of either tool."""
    return bool(re.search(rf"^[ \t]*(?:{_ADAPTER.pattern}|{_STATUS.pattern})", text, re.MULTILINE))


def read_ibstat(text: str, name: str) -> Cluster:
    """Read one node and its adapters; neither tool names the node.

    Raises UserError for fields that are cut off or malformed.
    """
    kind = "ibstatus" if re.search(rf"^[ \t]*{_STATUS.pattern}", text, re.MULTILINE) else "ibstat"
    adapters = _parse_adapters(text, name)
    if not adapters:
        raise UserError(f"{name}:1: no adapter; expected a line such as CA 'mlx5_0'")
    nics = tuple(_make_nic(f"NIC{n}", adapter, kind, name) for n, adapter in enumerate(adapters.values()))
    return Cluster(kind, (Node(UNNAMED_HOST, (), nics),))


def _parse_adapters(text: str, name: str) -> dict[str, _Adapter]:
    adapters: dict[str, _Adapter] = {}
    section: _Section | None = None
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if match := _STATUS.match(line):
            adapter = adapters.setdefault(match[1], _Adapter(number, device=match[1]))
            section = _add_port(adapter, int(match[2]), number, name)
        elif match := _ADAPTER.match(line):
            if match[1] in adapters:
                raise UserError(f"{name}:{number}: {match[1]} is there twice; expected the output of one host")
            section = adapters[match[1]] = _Adapter(number, device=match[1])
        elif match := _PORT.fullmatch(line):
            if not adapters:
                raise UserError(f"{name}:{number}: a port of no adapter; expected a line such as CA 'mlx5_0' before it")
            section = _add_port(next(reversed(adapters.values())), int(match[1]), number, name)
        elif section is not None and (match := _FIELD.fullmatch(line)):
            section.fields[match[1].lower().replace("_", " ")] = (match[2] or "").strip()
    return adapters


def _add_port(adapter: _Adapter, port: int, line: int, name: str) -> _Section:
    if port in adapter.ports:
        raise UserError(
            f"{name}:{line}: port {port} of {adapter.device} is there twice; expected the output of one host"
        )
    return adapter.ports.setdefault(port, _Section(line))


def _make_nic(id: str, adapter: _Adapter, kind: str, name: str) -> Nic:
    _check_ports(adapter, kind, name)
    up = [port.fields for port in adapter.ports.values() if _is_up(port.fields)]
    rates = [parse_port_rate(port["rate"]) for port in up]
    layers = [_parse_layer(port, name) for port in adapter.ports.values()]
    live = [layer for layer, port in zip(layers, adapter.ports.values(), strict=True) if _is_up(port.fields)]
    return Nic(
        id,
        adapter.device,
        guid=_parse_guid(adapter.fields.get("node guid", ""), adapter.line, name),
        active=bool(up),
        gbit_s=sum_rates(rates),
        layer=next(iter([*live, *layers]), None),
    )


def _check_ports(adapter: _Adapter, kind: str, name: str) -> None:
    count = adapter.fields.get("number of ports", "")
    expected = int(count) if count.isdecimal() else 1
    if sum(port > 0 for port in adapter.ports) < min(expected, 255):
        raise UserError(
            f"{name}:{adapter.line}: {adapter.device} has {len(adapter.ports)} of {expected} ports; expected all"
        )
    for port, section in adapter.ports.items():
        for needed in _KINDS[kind]:
            if needed not in section.fields:
                raise UserError(f"{name}:{section.line}: port {port} of {adapter.device} has no {needed}; expected one")
        rate = section.fields["rate"]
        if rate not in ("", "unknown") and not (
            PORT_RATE.fullmatch(rate) and ("Gb/sec" in rate) == (kind == "ibstatus")
        ):
            raise UserError(
                f"{name}:{section.line}: rate {rate[:40]!r}; expected 100, or 100 Gb/sec (4X EDR) of ibstatus"
            )
        _parse_guid(section.fields.get("port guid", ""), section.line, name)


def _is_up(fields: Mapping[str, str]) -> bool:
    """Whether a port is active: ibstat writes `Active`, ibstatus `4: ACTIVE`."""
    return fields["state"].lower().split(":")[-1].strip() == "active"


def _parse_layer(section: _Section, name: str) -> str | None:
    text = section.fields.get("link layer", "")
    if text and text.lower() not in {*LINK_LAYERS, "unspecified", "unknown"}:
        raise UserError(f"{name}:{section.line}: link layer {text[:40]!r}; expected InfiniBand or Ethernet")
    return LINK_LAYERS.get(text.lower())


def _parse_guid(text: str, line: int, name: str) -> str | None:
    """Return the 16 digits of a GUID; None if there is none or it is 0."""
    if text and not re.fullmatch(r"0x[0-9a-fA-F]{16}", text):
        raise UserError(f"{name}:{line}: GUID {text[:40]!r}; expected 0x and 16 hexadecimal digits")
    return text[2:].lower() if text.strip("0x") else None
