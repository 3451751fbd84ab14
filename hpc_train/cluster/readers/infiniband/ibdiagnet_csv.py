"""Read an InfiniBand subnet from ibdiagnet2.db_csv: the sections NODES, PORTS and LINKS of ibdiagnet's tables.

A section is the line START_<NAME>, a line of column names, comma-separated rows, and the line END_<NAME>; the others,
mostly counters, are passed over. What is built from the devices is in ibnetdiscover.py.

Columns and codes: ibdiagnet of NVIDIA's ibutils2 (IBLinkSpeed, IBLinkWidth in ibdm), as its readers take them.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpc_train.cluster.readers.infiniband.ibnetdiscover import make_fabric
from hpc_train.cluster.readers.infiniband.subnet_devices import (
    CA,
    FDR10,
    ROUTER,
    SPEEDS,
    SWITCH,
    CableEnd,
    SubnetDevice,
)
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_SECTION = re.compile(r"^START_(?:NODES|PORTS|LINKS|INDEX_TABLE|SWITCHES)[ \t]*$", re.MULTILINE)
_KINDS = {"1": (CA, "H"), "2": (SWITCH, "S"), "3": (ROUTER, "R")}
"""Kind and first letter of the id, by NodeType."""
_WIDTHS = {"1": "1x", "2": "4x", "4": "8x", "8": "12x", "16": "2x"}
_SPEEDS = {str(speed.code): speed.name for speed in (*SPEEDS, FDR10)}
_NODES = ("NodeGUID", "NodeType", "NumPorts", "SystemImageGUID", "NodeDesc")
_LINKS = ("NodeGuid1", "PortNum1", "NodeGuid2", "PortNum2")
_PORTS = ("NodeGuid", "PortNum", "LinkWidthActv", "LinkSpeedActv")


class _Row(NamedTuple):
    """The wanted columns of one row."""

    line: int
    values: Sequence[str]


def matches_ibdiagnet_csv(text: str) -> bool:
    """Whether the text has sections of ibdiagnet2.db_csv."""
    return _SECTION.search(text) is not None


def read_ibdiagnet_csv(text: str, name: str) -> Cluster:
    """Read the hosts, their adapters and the switches, as ibnetdiscover's dump gives them.

    Rates are unknown without the section PORTS. Raises UserError, one line, for a file that is cut, contradicts itself,
    or has no section of nodes or of links.
    """
    devices: dict[str, SubnetDevice] = {}
    for line, (guid, kind, ports, system, description) in _read_section(text, name, "NODES", _NODES):
        device = _make_device(guid, kind, ports, system, description, f"{name}:{line}: ", line)
        if devices.setdefault(device.id[2:], device) is not device:
            raise UserError(f"{name}:{line}: {guid} again; expected each node once")
    rates = {
        (_parse_guid(guid, f"{name}:{line}: "), port): f"{_WIDTHS[width]}{_SPEEDS[speed]}"
        for line, (guid, port, width, speed) in _read_section(text, name, "PORTS", _PORTS, required=False)
        if width in _WIDTHS and speed in _SPEEDS
    }
    for line, values in _read_section(text, name, "LINKS", _LINKS):
        where = f"{name}:{line}: "
        a, b = (_find_end(devices, values[at], values[at + 1], where) for at in (0, 2))
        rate = rates.get((a[0].id[2:], values[1]))
        for (device, port), (far, far_port) in ((a, b), (b, a)):
            cable = CableEnd(far.id, far_port, line, far.name, rate)
            if device.cables.setdefault(port, cable)[:2] != cable[:2]:
                raise UserError(f"{where}port {port} of {device.id} again; expected one cable a port")
    return make_fabric({device.id: device for device in devices.values()}, name, "ibdiagnet_csv")


def _read_section(text: str, name: str, section: str, columns: Sequence[str], required: bool = True) -> Iterator[_Row]:
    """Yield the wanted columns of each row of a section."""
    start = re.search(rf"^START_{section}[ \t]*\n", text, re.MULTILINE)
    if start is None:
        if required:
            raise UserError(
                f"{name}:1: no section {section}; expected a whole ibdiagnet2.db_csv; ibdiagnet2.lst and "
                "ibdiagnet2.ibnetdiscover of the same run have all cables, too"
            )
        return
    end = re.compile(rf"^END_{section}[ \t]*$", re.MULTILINE).search(text, start.end())
    first = text.count("\n", 0, start.end()) + 1
    if end is None:
        raise UserError(f"{name}:{first}: the section {section} does not end; expected a line END_{section}")
    lines = text[start.end() : end.start()].split("\n")
    header = [column.strip() for column in lines[0].split(",")]
    if missing := [column for column in columns if column not in header]:
        raise UserError(
            f"{name}:{first}: the section {section} has no column {missing[0]}; expected {', '.join(columns)}"
        )
    at = [header.index(column) for column in columns]
    for number, line in enumerate(lines[1:], first + 1):
        if not line.strip():
            continue
        try:
            (cells,) = csv.reader([line])
        except csv.Error as error:
            raise UserError(f"{name}:{number}: {error}; expected a row of comma-separated values") from None
        if len(cells) != len(header):
            raise UserError(f"{name}:{number}: {len(cells)} values in a row; expected {len(header)}, as columns")
        yield _Row(number, [cells[column].strip() for column in at])


def _make_device(
    guid: str, kind: str, ports: str, system: str, description: str, where: str, line: int
) -> SubnetDevice:
    if kind not in _KINDS:
        raise UserError(f"{where}NodeType {kind[:20]!r}; expected 1 (adapter), 2 (switch) or 3 (router)")
    what, letter = _KINDS[kind]
    id = f"{letter}-{_parse_guid(guid, where)}"
    return SubnetDevice(id, what, line, _parse_number(ports, where), description or None, _parse_guid(system, where))


def _find_end(devices: dict[str, SubnetDevice], guid: str, port: str, where: str) -> tuple[SubnetDevice, int]:
    device, number = devices.get(_parse_guid(guid, where)), _parse_number(port, where)
    if device is None:
        raise UserError(f"{where}{guid} is not in the section NODES; expected a whole ibdiagnet2.db_csv")
    if not 1 <= number <= device.ports:
        raise UserError(f"{where}port {number} of {device.id}; expected 1 to {device.ports}")
    return device, number


def _parse_guid(text: str, where: str) -> str:
    if not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
        raise UserError(f"{where}{text[:40]!r}; expected a GUID such as 0x0002c90300001234")
    return text[2:].lower().zfill(16)


def _parse_number(text: str, where: str) -> int:
    if not re.fullmatch(r"\d{1,3}", text):
        raise UserError(f"{where}{text[:40]!r}; expected the number of a port")
    return int(text)
