"""Write trees like /sys and /proc of invented machines, from a compact description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FakeMachine:
    """Writes one machine below `root`. PCI devices are given by their path below the host bridge, as
    "0000:00/0000:00:01.0/0000:01:00.0"."""

    root: Path

    def numa(self, nodes: Mapping[int, str], memory_kb: int = 1024) -> None:
        for number, cpus in nodes.items():
            where = f"sys/devices/system/node/node{number}"
            self.file(f"{where}/cpulist", cpus)
            self.file(f"{where}/meminfo", f"Node {number} MemTotal:       {memory_kb} kB\nNode {number} MemFree: 1 kB")

    def host(self, name: str) -> None:
        self.file("proc/sys/kernel/hostname", name)

    def file(self, path: str, content: str) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content + "\n")

    def link(self, path: str, target: Path) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.is_symlink():
            place.symlink_to(target)

    def pci(self, path: str, numa: int = -1) -> Path:
        bridge, *rest = path.split("/")
        place = self.root / "sys/devices" / f"pci{bridge}" / "/".join(rest)
        self.file(str((place / "numa_node").relative_to(self.root)), str(numa))
        self.link(f"sys/bus/pci/devices/{rest[-1]}", place)
        return place

    def rdma(
        self,
        name: str,
        path: str,
        numa: int = -1,
        ports: tuple[tuple[str, str, str], ...] = (("4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),),
        guid: str = "0002:c903:0000:0001",
        driver: str = "mlx5_core",
        subnet: str = "fe80:0000:0000:0000",
    ) -> Path:
        """Add an RDMA device. ports: state, rate and link layer of each. subnet: prefix of every first GID."""
        device = self.pci(path, numa)
        place = device / "infiniband" / name
        own = str(place.relative_to(self.root))
        self.file(f"{own}/node_guid", guid)
        for number, (state, rate, layer) in enumerate(ports, 1):
            for what, content in (("state", state), ("rate", rate), ("link_layer", layer)):
                self.file(f"{own}/ports/{number}/{what}", content)
            self.file(f"{own}/ports/{number}/gids/0", f"{subnet}:{guid}")
        self.link(f"{own}/device", device)
        self.link(f"sys/class/infiniband/{name}", place)
        (self.root / "sys/bus/drivers" / driver).mkdir(parents=True, exist_ok=True)
        self.link(str((device / "driver").relative_to(self.root)), self.root / "sys/bus/drivers" / driver)
        return device

    def interface(
        self,
        name: str,
        path: str,
        numa: int = -1,
        speed: str = "25000",
        state: str = "up",
        kind: str = "1",
        below: str = "",
    ) -> Path:
        """Add a network interface. below: directories between the PCI device and its interfaces, such as virtio2."""
        device = self.pci(path, numa) / below
        place = device / "net" / name
        own = str(place.relative_to(self.root))
        for what, content in (("speed", speed), ("operstate", state), ("type", kind)):
            self.file(f"{own}/{what}", content)
        self.link(f"{own}/device", device)
        self.link(f"sys/class/net/{name}", place)
        return device

    def virtual_interface(self, name: str, slaves: str | None = None) -> None:
        place = self.root / "sys/devices/virtual/net" / name
        self.file(f"sys/devices/virtual/net/{name}/operstate", "up")
        self.file(f"sys/devices/virtual/net/{name}/type", "1")
        if slaves is not None:
            self.file(f"sys/devices/virtual/net/{name}/bonding/slaves", slaves)
        self.link(f"sys/class/net/{name}", place)

    def cxi(self, name: str, path: str, numa: int = -1) -> None:
        device = self.pci(path, numa)
        place = device / "cxi" / name
        place.mkdir(parents=True)
        self.link(str((place / "device").relative_to(self.root)), device)
        self.link(f"sys/class/cxi/{name}", place)

    def kfd(self, number: int, location: int, peers: Mapping[int, int], simd: int = 304, domain: int = 0) -> None:
        """Add a node of AMD's topology. peers: node -> type of the link, 11 for xGMI, 2 for PCIe."""
        where = f"sys/class/kfd/kfd/topology/nodes/{number}"
        self.file(
            f"{where}/properties", f"cpu_cores_count 0\nsimd_count {simd}\nlocation_id {location}\ndomain {domain}"
        )
        self.file(f"{where}/name", "gfx942" if simd else "")
        for link, (peer, kind) in enumerate(peers.items()):
            self.file(
                f"{where}/io_links/{link}/properties", f"type {kind}\nnode_from {number}\nnode_to {peer}\nweight 15"
            )


GPUS = ("1b", "43", "52", "61", "9d", "c3", "d1", "df")
"""Buses of the GPUs of `dgx`."""


def dgx(root: Path) -> FakeMachine:
    """Write a machine with 8 GPUs, each with a NIC on its own PCIe switch, 2 NICs for storage and 2 NUMA nodes."""
    machine = FakeMachine(root)
    machine.host("dgx01")
    machine.numa({0: "0-55,112-167", 1: "56-111,168-223"}, 1 << 30)
    for n, bus in enumerate(GPUS):
        switch = f"0000:{n:x}0/0000:{n:x}0:01.0/0000:{n:x}1:00.0"
        machine.pci(f"{switch}/0000:{n:x}2:00.0/0000:{bus}:00.0", n // 4)
        machine.rdma(
            f"mlx5_{n}", f"{switch}/0000:{n:x}2:01.0/0000:{n:x}3:00.0", n // 4, guid=f"0002:c903:0000:00{n:02x}"
        )
        machine.interface(f"ib{n}", f"{switch}/0000:{n:x}2:01.0/0000:{n:x}3:00.0", n // 4, kind="32")
    for n in (8, 9):
        ports = (
            (("4: ACTIVE", "200 Gb/sec (4X HDR)", "Ethernet"),)
            if n == 8
            else (("1: DOWN", "10 Gb/sec (4X SDR)", "Ethernet"),)
        )
        machine.rdma(f"mlx5_{n}", f"0000:e0/0000:e0:01.0/0000:e1:00.{n - 8}", 1, ports)
        machine.interface(f"ens{n}", f"0000:e0/0000:e0:01.0/0000:e1:00.{n - 8}", 1)
    machine.interface("eno1", "0000:00/0000:00:1c.0/0000:05:00.0", 0, "10000")
    machine.virtual_interface("lo")
    machine.virtual_interface("bond0", "ens8 ens9")
    machine.virtual_interface("docker0")
    return machine
