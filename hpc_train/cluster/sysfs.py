"""Read NUMA nodes and PCI devices from sysfs, below any root, and classify how far two PCI devices are apart.

Files that are missing or unreadable give None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.hostlist import natural_key
from hpc_train.cluster.spec import UNNAMED_HOST

_COMPONENT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

PciPath = tuple[str, ...]
"""Host bridge, the bridges below it, the device: ("pci0000:00", "0000:00:01.0", "0000:01:00.0"); empty: not known."""


def parse_pci_path(components: Iterable[str]) -> PciPath:
    """Keep the PCI components of a sysfs path; those below a PCI device, such as virtio2/net/eth0, do not count."""
    return tuple(component for component in components if _COMPONENT.fullmatch(component))


def get_pci_address(path: PciPath) -> str | None:
    """Return the device's own address, such as 0000:07:00.0; None for a path without a device."""
    return path[-1] if len(path) > 1 else None


def normalise_pci_address(text: str) -> str | None:
    """Write a PCI address as Linux does: 00000000:07:00.0 (NVML), 07:00.0 -> 0000:07:00.0; None for other text."""
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", text.strip().lower())
    if match is None:
        return None
    domain, bus, device = (int(digits or "0", 16) for digits in match.group(1, 2, 3))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match[4]}"


def classify_pci_distance(a: PciPath, b: PciPath, numa_a: int | None = None, numa_b: int | None = None) -> str:
    """Return the worst hop between two devices, in NVIDIA's words.

    PIX: one PCIe switch; PXB: several; PHB: their host bridge; NODE: two host bridges of one NUMA node; SYS: beyond it,
    or not known. Legend of `nvidia-smi topo -m`. A switch is two components of a path, its port upstream and one
    downstream, so two devices on one switch have a longest common prefix that ends two before each.
    """
    common = _count_common(a, b)
    if common == 0:
        return "NODE" if numa_a is not None and numa_a == numa_b else "SYS"
    if common == 1:
        return "PHB"
    return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"


def _count_common(a: PciPath, b: PciPath) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count


def format_processors(mask: int) -> str | None:
    """Write a bit mask of processors as Linux writes a list: 0-31,64-95; None for an empty mask."""
    runs = ((run.start(), run.end() - 1) for run in re.finditer("1+", f"{mask:b}"[::-1]))
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs) or None


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node."""

    id: int
    cpus: str
    """Its processors, as Linux writes a list: 0-31,64-95; empty where it has memory only, as a GPU's may."""
    memory: int | None
    """Bytes."""


def read_text(path: Path) -> str | None:
    """Read a file of sysfs, stripped; None if it is missing or cannot be read, as of devices that are down."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return None


def read_number(path: Path) -> int | None:
    """Read a file that holds one whole number."""
    content = read_text(path)
    return int(content) if content and re.fullmatch(r"-?[0-9]{1,18}", content) else None


def list_entries(directory: Path) -> list[Path]:
    """List a directory in natural order: mlx5_10 after mlx5_9."""
    try:
        return sorted(directory.iterdir(), key=lambda entry: natural_key(entry.name))
    except OSError:
        return []


def read_numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """Read all NUMA nodes of the machine, including those that this process may not use."""
    directories = [
        directory
        for directory in list_entries(root / "sys/devices/system/node")
        if re.fullmatch(r"node[0-9]{1,9}", directory.name)
    ]
    return tuple(
        NumaNode(int(directory.name[4:]), read_text(directory / "cpulist") or "", _read_memory(directory / "meminfo"))
        for directory in directories
    )


def _read_memory(path: Path) -> int | None:
    match = re.search(r"MemTotal:\s*([0-9]+) kB", read_text(path) or "")
    return int(match[1]) * 1024 if match else None


def find_pci_path(device: Path) -> PciPath:
    """Return the PCI path of a device's directory; empty if it is on no PCI bus."""
    try:
        return parse_pci_path(device.resolve().parts)
    except (OSError, RuntimeError):
        return ()


def find_pci_path_of_address(address: str, root: Path) -> PciPath:
    """Return the PCI path of the device at an address such as 0000:07:00.0."""
    link = root / "sys/bus/pci/devices" / address
    return find_pci_path(link) if link.exists() else ()


def find_numa_of_address(address: str, root: Path) -> int | None:
    """Return the NUMA node of a PCI device; None for -1, which the firmware of many virtual machines gives."""
    return find_numa_node(root / "sys/bus/pci/devices" / address)


def find_numa_node(device: Path) -> int | None:
    """Return the NUMA node of a device's directory."""
    number = read_number(device / "numa_node")
    return number if number is not None and number >= 0 else None


def read_host_name(root: Path) -> str:
    """Return the kernel's name of this host."""
    return read_text(root / "proc/sys/kernel/hostname") or UNNAMED_HOST
