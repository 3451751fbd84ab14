"""Invented InfiniBand fabrics, in the formats of ibnetdiscover, iblinkinfo and ibsim."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class FakeDevice:
    """A switch (S), an adapter (H) or a router (R)."""

    letter: str
    guid: int
    name: str
    ports: int
    system: int
    cables: dict[int, tuple[FakeDevice, int, str]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.letter}-{self.guid:016x}"


@dataclass
class FakeFabric:
    """Devices and cables; GUIDs are assigned in order."""

    devices: list[FakeDevice] = field(default_factory=list)
    next_guid: int = 0x0002C90000000100

    def add(self, letter: str, name: str, ports: int, system: int | None = None) -> FakeDevice:
        self.next_guid += 16
        device = FakeDevice(letter, self.next_guid, name, ports, self.next_guid if system is None else system)
        self.devices.append(device)
        return device

    def switch(self, name: str, ports: int = 40) -> FakeDevice:
        return self.add("S", name, ports)

    def adapter(self, name: str, ports: int = 1, system: int | None = None) -> FakeDevice:
        return self.add("H", name, ports, system)

    def cable(self, a: FakeDevice, b: FakeDevice, rate: str = "4xHDR", ports: tuple[int, int] | None = None) -> None:
        """Connect two devices, at their first free ports unless ports are given."""
        own, far = ports or (_free(a), _free(b, taken=_free(a) if a is b else None))
        a.cables[own] = (b, far, rate)
        b.cables[far] = (a, own, rate)

    def dump(self, full: bool = False, node_map: dict[int, str] | None = None) -> str:
        """Return the fabric as ibnetdiscover (-f if full) prints it. node_map: names that the site gave to GUIDs."""
        names_of_guids = node_map or {}
        lines = [
            "#",
            "# Topology file: generated on Sat Nov 21 10:00:00 2026",
            "#",
            "# Initiated from node 0002c9 port 1",
        ]
        for device in sorted(self.devices, key=lambda device: "SHR".index(device.letter)):
            lines += [
                "",
                *_heading(device, names_of_guids),
                *(_port(device, p, full, names_of_guids) for p in sorted(device.cables)),
            ]
        return "\n".join(lines) + "\n"

    def link_info(self, adapters: bool = True) -> str:
        """Return the fabric as iblinkinfo prints it; without adapters, as with --switches-only."""
        lids = {}
        for device in self.devices:
            for port in range(1, device.ports + 1) if device.letter == "H" else (0,):
                lids[device.id, port] = len(lids) + 1
        lines = []
        for device in sorted(self.devices, key=lambda device: "HS".index(device.letter)):
            if device.letter == "H" and not adapters:
                continue
            lines.append(
                f"Switch: 0x{device.guid:016x} {device.name}:" if device.letter == "S" else f"CA: {device.name}:"
            )
            for port in range(1, device.ports + 1):
                own = lids[device.id, port if device.letter == "H" else 0]
                guid = f"0x{device.guid + port - 1:016x}" if device.letter == "H" else ""
                head = f"      {guid:18} {own:6} {port:4}[  ] =="
                if port not in device.cables:
                    lines.append(f'{head}(                Down/ Polling)==>             [  ] "" ( )')
                    continue
                far, far_port, rate = device.cables[port]
                lid = lids[far.id, far_port if far.letter == "H" else 0]
                link = f"( {rate[0]}X {LANES[rate[2:]]:>13} Active/  LinkUp)==>"
                lines.append(f'{head}{link} {lid:7} {far_port:4}[  ] "{far.name}" ( )')
        return "\n".join(lines) + "\n"

    def subnet_lst(self) -> str:
        """As ibdiagnet2.lst and opensm-subnet.lst: a line for each end of a cable."""
        return "".join(
            f"{_lst_end(device, port)} {_lst_end(far, far_port)} PHY={rate[:2]} LOG=ACT SPD={LST_SPEEDS[rate[2:]]}\n"
            for device in self.devices
            for port, (far, far_port, rate) in sorted(device.cables.items())
        )

    def ibdiagnet_csv(self, ports: bool = True) -> str:
        """As ibdiagnet2.db_csv, with a section that no reader needs; without the section PORTS if not `ports`."""
        kinds = {"H": 1, "S": 2, "R": 3}
        lines = ["# ibdiagnet", "START_NODES", "NodeDesc,NumPorts,NodeType,ClassVersion,SystemImageGUID,NodeGUID"]
        for one in self.devices:
            lines.append(f'"{one.name}",{one.ports},{kinds[one.letter]},1,0x{one.system:016x},0x{one.guid:016x}')
        lines += ["END_NODES", "", "START_PORTS", "NodeGuid,PortGuid,PortNum,LinkWidthActv,LinkSpeedActv"]
        for one in self.devices:
            for port, (_, _, rate) in sorted(one.cables.items()):
                lines.append(f"0x{one.guid:016x},0x{one.guid:016x},{port},2,{CSV_SPEEDS[rate[2:]]}")
        lines += ["END_PORTS", "", "START_PM_INFO", "NodeGUID,PortNumber,rcv", "0x1,1,2", "END_PM_INFO", ""]
        if not ports:
            del lines[lines.index("START_PORTS") : lines.index("END_PORTS") + 1]
        lines += ["START_LINKS", "NodeGuid1,PortNum1,NodeGuid2,PortNum2"]
        for one in self.devices:
            for port, (far, far_port, _) in sorted(one.cables.items()):
                if (one.guid, port) < (far.guid, far_port):
                    lines.append(f"0x{one.guid:016x},{port},0x{far.guid:016x},{far_port}")
        return "\n".join([*lines, "END_LINKS", ""])

    def net(self) -> str:
        """Return the fabric as a net file of ibsim: names instead of ids, no GUIDs, no rates."""
        lines = ["# a net", ""]
        for device in self.devices:
            word = {"S": "Switch", "H": "Hca", "R": "Rt"}[device.letter]
            lines += [f'{word}\t{device.ports} "{device.name}"']
            lines += [f'[{p}]\t"{far.name}"[{q}]' for p, (far, q, _) in sorted(device.cables.items())]
            lines += [""]
        return "\n".join(lines)


LANES = {"HDR": "53.125 Gbps", "NDR": "106.25 Gbps", "EDR": "25.78125 Gbps", "FDR10": "10.0 Gbps (FDR10)"}
"""A lane's speed as iblinkinfo prints it."""

LST_SPEEDS = {"HDR": "50", "NDR": "100", "EDR": "25", "FDR10": "FDR10", "XDR": "200"}
"""A lane's speed as ibdiagnet2.lst has it."""
CSV_SPEEDS = {"HDR": 1024, "NDR": 2048, "EDR": 512, "FDR10": 65536, "XDR": 16777216}
"""A lane's speed as LinkSpeedActv of ibdiagnet2.db_csv has it."""


def _lst_end(device: FakeDevice, port: int) -> str:
    word = {"S": "SW", "H": "CA", "R": "Rt"}[device.letter]
    return (
        f"{{ {word} Ports:{device.ports:02X} SystemGUID:{device.system:016x} NodeGUID:{device.guid:016x} "
        f"PortGUID:{device.guid:016x} VenID:000002C9 DevID:D2F0 Rev:000000A1 {{{device.name}}} LID:0009 "
        f"PN:{port:02X} }}"
    )


def _free(device: FakeDevice, taken: int | None = None) -> int:
    return next(p for p in range(1, device.ports + 1) if p not in device.cables and p != taken)


def _heading(device: FakeDevice, node_map: dict[int, str]) -> Iterable[str]:
    kind, word = {"S": ("switch", "Switch"), "H": ("ca", "Ca"), "R": ("rt", "Rt")}[device.letter]
    tail = " enhanced port 0 lid 5 lmc 0" if kind == "switch" else ""
    name = node_map.get(device.guid, device.name) if kind == "switch" else device.name
    own = f"({device.guid:x})" if kind == "switch" else ""
    yield from ("vendid=0x2c9", "devid=0xd2f0", f"sysimgguid=0x{device.system:x}", f"{kind}guid=0x{device.guid:x}{own}")
    yield f'{word}\t{device.ports} "{device.id}"\t\t# "{name}"{tail}'


def _port(device: FakeDevice, port: int, full: bool, node_map: dict[int, str]) -> str:
    far, far_port, rate = device.cables[port]
    name, own = node_map.get(far.guid, far.name), f"({device.guid:x}) " if device.letter != "S" else ""
    port_guid = f"({far.guid:x}) " if far.letter != "S" else ""
    lid = "" if device.letter == "S" else "lid 7 lmc 0 "
    more = " s=4 w=2 v=4 e=4" if full else ""
    name_first = f'"{name}" lid 9 {rate}{more}'
    return f'[{port}]{own}\t"{far.id}"[{far_port}]{port_guid}\t\t# {lid}{name_first}'


def rail_fabric(units: int, hosts: int, nics: int, spines: int, rate: str = "4xNDR") -> FakeFabric:
    """Return `units` scalable units of `hosts` hosts. NIC n of each host is on leaf n of its unit, and every leaf is on
    every spine.
    """
    fabric = FakeFabric()
    tops = [fabric.switch(f"MF0;spine{n}:MQM9700/U1", 255) for n in range(spines)]
    for unit in range(units):
        leaves = [fabric.switch(f"MF0;leaf{unit}-{n}:MQM9700/U1", 255) for n in range(nics)]
        for leaf in leaves:
            for top in tops:
                fabric.cable(leaf, top, rate)
            fabric.cable(leaf, fabric.adapter("Mellanox Technologies Aggregation Node"), rate)
        for host in range(hosts):
            for n, leaf in enumerate(leaves):
                fabric.cable(leaf, fabric.adapter(f"gpu{unit}-{host} mlx5_{n}"), rate)
    return fabric


def three_levels(pods: int = 2, leaves: int = 2, hosts: int = 2, spines: int = 2, cores: int = 2) -> FakeFabric:
    """Return a fabric of three levels: hosts with one NIC on leaves, leaves on the spines of their pod, spines on the
    cores.
    """
    fabric = FakeFabric()
    tops = [fabric.switch(f"MF0;core{n}:MQM8790/U1") for n in range(cores)]
    for pod in range(pods):
        middle = [fabric.switch(f"MF0;spine{pod}-{n}:MQM8790/U1") for n in range(spines)]
        for spine in middle:
            for top in tops:
                fabric.cable(spine, top)
        for n in range(leaves):
            leaf = fabric.switch(f"MF0;leaf{pod}-{n}:MQM8790/U1")
            for host in range(hosts):
                fabric.cable(leaf, fabric.adapter(f"node{pod}{n}{host} HCA-1"))
            for spine in middle:
                fabric.cable(leaf, spine)
    return fabric
