"""Read the NICs of this machine from sysfs: RDMA devices (InfiniBand, RoCE, EFA), Slingshot, Ethernet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_train.cluster.spec import LINK_LAYERS, Nic, parse_port_rate, sum_rates
from hpc_train.cluster.sysfs import (
    PciPath,
    find_numa_node,
    find_pci_path,
    get_pci_address,
    list_entries,
    read_number,
    read_text,
)

_ETHERNET = 1
"""Value of /sys/class/net/*/type for Ethernet (ARPHRD_ETHER); it is 32 for IP over InfiniBand."""


@dataclass(frozen=True)
class LocalNic:
    """A NIC and its place on the PCI bus."""

    nic: Nic
    path: PciPath


@dataclass(frozen=True)
class NicPort:
    """Port and addresses of a NIC, by which the libraries of its fabric name it."""

    number: int | None = None
    """The first port of an RDMA device that is up."""
    subnet: str | None = None
    """InfiniBand subnet prefix of that port, 16 hexadecimal digits."""
    cxi: str | None = None
    """Slingshot device, such as cxi0, whose network interface may have another name."""


def read_nic_ports(nics: Iterable[Nic], root: Path = Path("/")) -> dict[str, NicPort]:
    """Map the ids of RDMA and Slingshot NICs to their ports; other NICs are left out."""
    rdma, cxi = root / "sys/class/infiniband", root / "sys/class/cxi"
    cxi_of = {get_pci_address(find_pci_path(device)): device.name for device in list_entries(cxi)}
    ports = {}
    for nic in nics:
        if nic.layer == "slingshot":
            ports[nic.id] = NicPort(cxi=cxi_of.get(nic.pci) if nic.pci else None)
        elif nic.device and (rdma / nic.device).exists():
            ports[nic.id] = _read_rdma_port(rdma / nic.device)
    return ports


def _read_rdma_port(device: Path) -> NicPort:
    for port in list_entries(device / "ports"):
        if port.name.isdecimal() and (read_text(port / "state") or "").endswith("ACTIVE"):
            prefix = re.sub("[^0-9a-f]", "", (read_text(port / "gids/0") or "").lower())[:16]
            return NicPort(int(port.name), prefix if len(prefix) == 16 else None)
    return NicPort()


def read_local_nics(root: Path) -> tuple[LocalNic, ...]:
    """List the physical NICs: RDMA devices first, then Slingshot, then the remaining Ethernet.

    A network interface of a PCI device that is also an RDMA device is the same NIC. Virtual devices and virtual
    functions beside their physical one are left out.
    """
    nics: list[LocalNic] = []
    for kind in (_list_rdma_nics, _list_slingshot_nics, _list_ethernet_nics):
        used_paths = {local.path for local in nics if local.path}
        nics += [local for local in kind(root) if local.path not in used_paths]
    return tuple(LocalNic(replace(local.nic, id=f"NIC{n}"), local.path) for n, local in enumerate(nics))


def _list_rdma_nics(root: Path) -> Iterator[LocalNic]:
    for device in list_entries(root / "sys/class/infiniband"):
        path = find_pci_path(device)
        if path and not _is_virtual_function(device / "device"):
            yield LocalNic(_read_rdma_nic(device, path), path)


def _read_rdma_nic(device: Path, path: PciPath) -> Nic:
    ports = list_entries(device / "ports")
    up = [port for port in ports if (read_text(port / "state") or "").endswith("ACTIVE")]
    guid = re.sub("[^0-9a-f]", "", (read_text(device / "node_guid") or "").lower())
    layers = [LINK_LAYERS.get((read_text(port / "link_layer") or "").lower()) for port in [*up, *ports]]
    return Nic(
        id="",
        device=device.name,
        numa=find_numa_node(device / "device"),
        pci=get_pci_address(path),
        guid=guid if len(guid) == 16 and guid.strip("0") else None,
        active=bool(up),
        gbit_s=sum_rates(parse_port_rate(read_text(port / "rate")) for port in up),
        layer="efa" if _find_driver(device / "device") == "efa" else next(iter(layers), None),
    )


def _list_slingshot_nics(root: Path) -> Iterator[LocalNic]:
    """Yield Slingshot NICs, named by their interface hsn<n> or, if they have none, by their device cxi<n>."""
    interfaces = {
        find_pci_path(entry): entry
        for entry in list_entries(root / "sys/class/net")
        if re.fullmatch(r"hsn[0-9]+", entry.name)
    }
    interfaces.pop((), None)
    devices = [find_pci_path(entry) for entry in list_entries(root / "sys/class/cxi")]
    for path, interface in interfaces.items():
        if path not in devices or not _is_virtual_function(interface / "device"):
            yield LocalNic(_read_interface_nic(interface, path, "slingshot"), path)
    for device in list_entries(root / "sys/class/cxi"):
        path = find_pci_path(device)
        if path and path not in interfaces and not _is_virtual_function(device / "device"):
            yield LocalNic(
                Nic("", device.name, find_numa_node(device / "device"), get_pci_address(path), layer="slingshot"), path
            )


def _list_ethernet_nics(root: Path) -> Iterator[LocalNic]:
    for interface in list_entries(root / "sys/class/net"):
        hardware = interface / "device"
        if read_number(interface / "type") not in (_ETHERNET, None) or not hardware.exists():
            continue
        parts = interface.resolve().parts
        if "virtual" in parts or (interface / "wireless").exists() or any(part.startswith("usb") for part in parts):
            continue
        if not _is_virtual_function(hardware):
            path = find_pci_path(interface)
            yield LocalNic(_read_interface_nic(interface, path, "ethernet"), path)


def _read_interface_nic(interface: Path, path: PciPath, layer: str) -> Nic:
    up = (read_text(interface / "operstate") or "unknown").lower()
    active = None if up == "unknown" else up == "up"
    speed = read_number(interface / "speed")
    rate = speed / 1000 if active and speed is not None and speed > 0 else None
    return Nic(
        "", interface.name, _find_numa(interface), get_pci_address(path), active=active, gbit_s=rate, layer=layer
    )


def _find_numa(interface: Path) -> int | None:
    """Return the NUMA node of an interface; a virtio device has that of the PCI device around it."""
    numa = find_numa_node(interface / "device")
    return numa if numa is not None else find_numa_node((interface / "device").resolve().parent)


def _is_virtual_function(hardware: Path) -> bool:
    return (hardware / "physfn").exists()


def _find_driver(hardware: Path) -> str | None:
    link = hardware / "driver"
    return link.resolve().name if link.exists() else None
