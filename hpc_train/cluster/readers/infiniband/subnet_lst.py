"""Read an InfiniBand subnet from a list of its links: ibdiagnet2.lst of ibdiagnet, opensm-subnet.lst of OpenSM.

A line is one port with a cable: this end, the other end, and the link's width, state and speed. Numbers are
hexadecimal. Every cable is in the list twice, once from each end. What is built from the devices is in
ibnetdiscover.py.

Formats: OpenSM, opensm/osm_dump.c (dump_topology_node); ibutils, ibdm/datamodel/Fabric.cpp (parseSubnetLine). ibdiagnet
and UFM write other tables of the same subnet, which are refused with the name of the file to give instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from hpc_train.cluster.readers.infiniband.ibnetdiscover import make_fabric
from hpc_train.cluster.readers.infiniband.subnet_devices import (
    CA,
    FDR10,
    ROUTER,
    SPEEDS,
    SWITCH,
    CableEnd,
    SubnetDevice,
    check_line_length,
)
from hpc_train.cluster.spec import Cluster
from hpc_train.errors import UserError

_NAMES = {f"{speed.gbit_s:g}": speed.name for speed in SPEEDS} | {FDR10.name: FDR10.name}
"""Name of a link's speed by the Gbit/s of a lane, as ibdiagnet writes them."""
_KINDS = {"SW": SWITCH, "CA": CA, "Rt": ROUTER}
_LETTERS = {SWITCH: "S", CA: "H", ROUTER: "R"}


def _end_pattern(end: int) -> str:
    """Return the pattern of one end of a link, with groups kind1, ports1, ... for the first."""
    digits = "[0-9A-Fa-f]"
    return (
        rf"\{{ *(?P<kind{end}>SW|CA|Rt)(?:-SM)? +Ports:(?P<ports{end}>{digits}{{1,2}})"
        rf" +SystemGUID:(?P<system{end}>{digits}{{16}}) +NodeGUID:(?P<guid{end}>{digits}{{16}})"
        rf" +PortGUID:{digits}{{16}} +VenID:{digits}{{1,8}} +DevID:{digits}{{1,8}} +Rev:{digits}{{1,8}}"
        rf" +(?:\{{(?P<name{end}>.{{0,200}}?)\}} +)?LID:[0-9A-Fa-f/]{{1,8}} +PN:(?P<port{end}>{digits}{{1,2}}) *\}}"
    )


_LINE = re.compile(
    f"{_end_pattern(1)} *{_end_pattern(2)}"
    r" *PHY=(?P<width>\S{1,8}) +LOG=(?P<state>[A-Z]{1,8}) +SPD=(?P<speed>\S{1,8})"
)
_BEGINNING = re.compile(r"^\{ *(?:SW|CA|Rt)(?:-SM)? +Ports:[0-9A-Fa-f]{1,2} +SystemGUID:", re.MULTILINE)
_NET_DUMP = re.compile(r"^[ \t]{0,9}# {1,20}: IB# {1,9}: Sta {1,9}: PhysSta {1,20}:", re.MULTILINE)
_UFM_LINKS = re.compile(r"\s{0,9}[\[{](?=.{0,4000}\"source_guid\")(?=.{0,4000}\"destination_port\")", re.DOTALL)
_DOWN = frozenset({"DWN", "DOWN"})
_EXAMPLE = "`{ SW Ports:.. SystemGUID:.. } { CA Ports:.. SystemGUID:.. } PHY=4x LOG=ACT SPD=50`"


def matches_subnet_lst(text: str) -> bool:
    """Whether the text is a list of links, or another table that ibdiagnet or UFM writes."""
    return bool(_BEGINNING.search(text)) or _find_other_table(text) is not None


def _find_other_table(text: str) -> str | None:
    """Return the name of the table that this is; a table of UFM is JSON, so that the text begins with it."""
    if _NET_DUMP.search(text):
        return "ibdiagnet2.net_dump"
    return "UFM's table of links" if _UFM_LINKS.match(text) else None


def read_subnet_lst(text: str, name: str) -> Cluster:
    """Read the hosts, their adapters and the switches, as ibnetdiscover's dump gives them.

    Raises UserError, one line, for a list that is cut or contradicts itself, and for other tables of ibdiagnet and UFM.
    """
    if not _BEGINNING.search(text) and (table := _find_other_table(text)):
        raise UserError(
            f"{name}:1: {table} is not read; expected ibdiagnet2.lst, ibdiagnet2.ibnetdiscover or ibdiagnet2.db_csv, "
            "which a run of ibdiagnet writes, UFM's too"
        )
    parser = _Parser(name)
    for number, line in enumerate(text.split("\n"), 1):
        parser.take(line, number)
    parser.check_both_ends()
    return make_fabric(parser.devices, name, "subnet_lst")


@dataclass
class _Parser:
    name: str
    devices: dict[str, SubnetDevice] = field(default_factory=dict)

    def take(self, line: str, number: int) -> None:
        if not line.strip() or line.lstrip().startswith("#"):
            return
        check_line_length(line, self.name, number)
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise UserError(f"{self.name}:{number}: not a link, or cut off: {line[:60]!r}; expected {_EXAMPLE}")
        near, far = self._find_device(match, 1, number), self._find_device(match, 2, number)
        if match["state"] in _DOWN:
            return
        port, far_port = int(match["port1"], 16), int(match["port2"], 16)
        if not 1 <= port <= near.ports:
            raise UserError(f"{self.name}:{number}: port {port} of {near.id}; expected 1 to {near.ports}")
        cable = CableEnd(far.id, far_port, number, far.name, _format_rate(match["width"], match["speed"]))
        before = near.cables.setdefault(port, cable)
        if before[:2] != cable[:2]:
            raise UserError(
                f"{self.name}:{number}: {near.id}[{port}] goes to {far.id}[{far_port}], in line {before.line} to "
                f"{before.far}[{before.far_port}]; expected one cable a port"
            )

    def _find_device(self, match: re.Match[str], end: int, number: int) -> SubnetDevice:
        kind, ports = _KINDS[match[f"kind{end}"]], int(match[f"ports{end}"], 16)
        id = f"{_LETTERS[kind]}-{match[f'guid{end}'].lower()}"
        device = self.devices.get(id)
        if device is None:
            system, title = match[f"system{end}"].lower(), (match[f"name{end}"] or "").strip() or None
            device = self.devices[id] = SubnetDevice(id, kind, number, ports, title, system)
        elif device.ports != ports:
            raise UserError(
                f"{self.name}:{number}: {id} has {ports} ports, in line {device.line} {device.ports}; expected as many"
            )
        return device

    def check_both_ends(self) -> None:
        """Refuse a list that has some cables from one end only: the rest of it is missing."""
        ends = [(id, port, cable) for id, device in self.devices.items() for port, cable in device.cables.items()]
        alone = [(id, port, cable) for id, port, cable in ends if cable.far_port not in self.devices[cable.far].cables]
        if alone and len(alone) < len(ends):
            id, port, cable = alone[0]
            raise UserError(
                f"{self.name}:{cable.line}: {id}[{port}] goes to {cable.far}[{cable.far_port}], which has no line of "
                "its own, though other cables are listed from both ends; expected the whole list"
            )


def _format_rate(width: str, speed: str) -> str | None:
    """Write a rate as ibnetdiscover does: 4xHDR; None where a part of it is unknown."""
    return f"{width}{_NAMES[speed]}" if speed in _NAMES and re.fullmatch(r"\d{1,2}x", width) else None
