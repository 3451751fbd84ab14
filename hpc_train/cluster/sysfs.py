"""sysfs under any root: what Linux tells of NUMA nodes and PCI devices. What is not there, or not readable, is None."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.pci import PciPath, pci_path


@dataclass(frozen=True)
class NumaNode:
    """One NUMA node."""

    id: int
    cpus: str
    """Its processors, as Linux writes a list: 0-31,64-95; empty where it has memory only, as a GPU's may."""
    memory: int | None
    """Bytes."""


def text(path: Path) -> str | None:
    """The content of a file of sysfs, stripped; some files of devices that are down answer with an error."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except (OSError, ValueError):
        return None


def number(path: Path) -> int | None:
    """A file that holds one whole number."""
    content = text(path)
    return int(content) if content and re.fullmatch(r"-?[0-9]{1,18}", content) else None


def entries(directory: Path) -> list[Path]:
    """What a directory holds, sorted as a person would: mlx5_10 after mlx5_9."""
    try:
        return sorted(directory.iterdir(), key=lambda it: natural(it.name))
    except OSError:
        return []


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that takes numbers in names as numbers."""
    return [(int(it), "") if it.isdecimal() else (-1, it) for it in re.split(r"([0-9]{1,18})", name) if it]


def numa_nodes(root: Path = Path("/")) -> tuple[NumaNode, ...]:
    """The NUMA nodes of the machine, whatever part of it this process may use."""
    found = [it for it in entries(root / "sys/devices/system/node") if re.fullmatch(r"node[0-9]{1,9}", it.name)]
    return tuple(NumaNode(int(it.name[4:]), text(it / "cpulist") or "", _memory(it / "meminfo")) for it in found)


def _memory(path: Path) -> int | None:
    match = re.search(r"MemTotal:\s*([0-9]+) kB", text(path) or "")
    return int(match[1]) * 1024 if match else None


def path_of(device: Path) -> PciPath:
    """The PCI path of a device by where sysfs keeps it; empty if it is on no PCI bus."""
    try:
        return pci_path(device.resolve().parts)
    except (OSError, RuntimeError):
        return ()


def path_of_address(address: str, root: Path = Path("/")) -> PciPath:
    """The same by the PCI address: 0000:07:00.0."""
    link = root / "sys/bus/pci/devices" / address
    return path_of(link) if link.exists() else ()


def numa_of_address(address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device; None for -1, which firmware of many virtual machines says."""
    return numa_of(root / "sys/bus/pci/devices" / address)


def numa_of(device: Path) -> int | None:
    """The NUMA node of a device's directory."""
    found = number(device / "numa_node")
    return found if found is not None and found >= 0 else None


def host_name(root: Path = Path("/")) -> str:
    """What the kernel calls this host; `localhost` where it does not say."""
    return text(root / "proc/sys/kernel/hostname") or "localhost"
