"""Read an InfiniBand subnet as iblinkinfo prints it: every port of every device, with the rate of its cable.

The lines know the far end of a cable by its LID only, so all devices are read first, and cables are joined after that.
Format: rdma-core, infiniband-diags/iblinkinfo.c (print_node_header, print_port). What is built from the devices is
in ibnetdiscover.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpc_train.cluster.readers.infiniband.ibnetdiscover import make_fabric
from hpc_train.cluster.readers.infiniband.subnet_devices import (
    CA,
    SPEEDS,
    SWITCH,
    CableEnd,
    SubnetDevice,
    check_line_length,
)
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_ARROW = re.compile(r"==\([^()\n]{0,80}(?:\([A-Z0-9]{1,8}\))?[^()\n]{0,80}\)==>")
_SWITCH = re.compile(r"Switch:? (0x[0-9a-fA-F]{1,16})(?: (.*?))?:?\s*")
_ADAPTER = re.compile(r"CA: (.*?):?\s*")
_PORT = re.compile(
    r"\s*(?P<guid>0x[0-9a-fA-F]{1,16})?\s+(?P<lid>\d{1,5})\s+(?P<port>\d{1,3})\[[^\]]{0,4}\]\s*"
    r"==\(\s*(?:(?P<width>\d{1,2})X\s+(?P<lane>[0-9.]{1,9})\s+Gbps(?:\s+\((?P<kind>[A-Z0-9]{1,8})\))?)?\s*"
    r"(?P<state>[A-Za-z]+)\s*/\s*[A-Za-z ]*\)==>\s*(?:(?P<far_lid>\d{1,5})\s+(?P<far_port>\d{1,3}))?\[[^\]]{0,4}\]\s*"
    r'"(?P<far_name>[^"]*)".*'
)
_NAMES = {speed.signalling: speed.name for speed in SPEEDS}
_EXAMPLE = "a whole `iblinkinfo`, whose devices begin with `CA: name:` or `Switch: 0x... name:`"


def matches_iblinkinfo(text: str) -> bool:
    """Whether the text has ports as iblinkinfo prints them."""
    return _ARROW.search(text) is not None


def read_iblinkinfo(text: str, name: str) -> Cluster:
    """Read the hosts, their adapters and the switches, as ibnetdiscover's dump gives them.

    Adapters that only switches tell of, as in the output of --switches-only, have no GUID. Raises UserError, one line,
    for output that is cut, of which lines were removed, or that is of the option --line.
    """
    parser = _Parser(name)
    for number, line in enumerate(text.split("\n"), 1):
        parser.take(line.rstrip(), number)
    return make_fabric(parser.join_cables(), name, "iblinkinfo")


@dataclass
class _Port:
    """A port line that is up: the far end is known by its LID."""

    device: SubnetDevice
    port: int
    far_lid: int
    far_port: int
    far_name: str
    rate: str | None
    line: int


@dataclass
class _Parser:
    name: str
    devices: dict[str, SubnetDevice] = field(default_factory=dict)
    by_lid: dict[int, SubnetDevice] = field(default_factory=dict)
    ports: list[_Port] = field(default_factory=list)
    adapter: tuple[str, int] | None = None
    """Name and line of an adapter's header whose first port, with the GUID, is still to come."""
    current: SubnetDevice | None = None

    def take(self, line: str, number: int) -> None:
        if not line:
            return
        check_line_length(line, self.name, number)
        if switch := _SWITCH.fullmatch(line):
            self.current = self._add_device(f"S-{_format_guid(switch[1])}", SWITCH, switch[2], number)
            self.adapter = None
        elif adapter := _ADAPTER.fullmatch(line):
            # An adapter prints its GUID only with its first port, in one of the next lines.
            self.adapter, self.current = (adapter[1], number), None
        elif port := _PORT.fullmatch(line):
            self._take_port(port, number)
        elif _ARROW.search(line):
            raise UserError(
                f"{self.name}:{number}: not a port of iblinkinfo: {line.strip()[:60]!r}; expected {_EXAMPLE}"
            )
        elif self.devices:
            raise UserError(f"{self.name}:{number}: not understood: {line.strip()[:60]!r}; expected {_EXAMPLE}")

    def _add_device(self, id: str, kind: str, description: str | None, number: int) -> SubnetDevice:
        if id in self.devices:
            raise UserError(
                f"{self.name}:{number}: {id[2:]} again, first in line {self.devices[id].line}; expected one"
            )
        self.devices[id] = SubnetDevice(id, kind, number, name=description)
        return self.devices[id]

    def _take_port(self, match: re.Match[str], number: int) -> None:
        if self.adapter is not None and match["guid"]:
            description, line = self.adapter
            self.current, self.adapter = (
                self._add_device(f"H-{_format_guid(match['guid'])}", CA, description, line),
                None,
            )
        if self.current is None:
            raise UserError(f"{self.name}:{number}: a port without its device; expected {_EXAMPLE}")
        lid = int(match["lid"])
        # LID 0: the subnet manager has not given this port an address.
        if lid and self.by_lid.setdefault(lid, self.current) is not self.current:
            other = self.by_lid[lid].line
            raise UserError(f"{self.name}:{number}: LID {lid} is also that of line {other}; expected one device a LID")
        if match["far_lid"] and match["state"].lower() != "down":
            rate = _format_rate(match)
            ends = int(match["port"]), int(match["far_lid"]), int(match["far_port"])
            self.ports.append(_Port(self.current, *ends, match["far_name"], rate, number))

    def join_cables(self) -> dict[str, SubnetDevice]:
        """Complete the cables of all devices, and add the adapters that only switches tell of."""
        if not self.devices:
            raise UserError(f"{self.name}:1: no device; expected {_EXAMPLE}")
        only_switches = all(device.kind == SWITCH for device in self.devices.values())
        for port in self.ports:
            far = self.by_lid.get(port.far_lid)
            if far is None:
                if not only_switches:
                    raise UserError(
                        f"{self.name}:{port.line}: LID {port.far_lid} ({port.far_name[:40]!r}) has no ports of its own "
                        f"here; expected {_EXAMPLE}"
                    )
                far = self.by_lid[port.far_lid] = SubnetDevice(f"LID {port.far_lid}", CA, None, name=port.far_name)
                self.devices[far.id] = far
            cable = CableEnd(far.id, port.far_port, port.line, port.far_name, port.rate)
            if port.device.cables.setdefault(port.port, cable) is not cable:
                raise UserError(f"{self.name}:{port.line}: port {port.port} again; expected each port once")
        return self.devices


def _format_guid(text: str) -> str:
    return text.removeprefix("0x").lower().zfill(16)


def _format_rate(match: re.Match[str]) -> str | None:
    """Write width and speed as ibnetdiscover does: 4xEDR; None for a speed without a name."""
    speed = match["kind"] or _NAMES.get(match["lane"] or "")
    return f"{match['width']}x{speed}" if match["width"] and speed else None
