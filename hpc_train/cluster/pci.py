"""PCI paths, and how far two devices of a node are apart by theirs."""

from __future__ import annotations

import re
from collections.abc import Iterable

_COMPONENT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

PciPath = tuple[str, ...]
"""Host bridge, the bridges below it, the device: ("pci0000:00", "0000:00:01.0", "0000:01:00.0"); empty: not known."""


def pci_path(components: Iterable[str]) -> PciPath:
    """The PCI part of a sysfs path: what is below a PCI device, as virtio2/net/eth0, does not count."""
    return tuple(it for it in components if _COMPONENT.fullmatch(it))


def address(path: PciPath) -> str | None:
    """The device's own address, 0000:07:00.0; None of a path without a device."""
    return path[-1] if len(path) > 1 else None


def full_address(text: str) -> str | None:
    """0000:07:00.0 of 00000000:07:00.0, as NVML writes it, and of 07:00.0; None of what is no address."""
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", text.strip().lower())
    if match is None:
        return None
    domain, bus, device = (int(it or "0", 16) for it in match.group(1, 2, 3))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match[4]}"


def closeness(a: PciPath, b: PciPath, numa_a: int | None = None, numa_b: int | None = None) -> str:
    """The worst hop between two devices, in NVIDIA's words.

    PIX: one PCIe switch; PXB: several; PHB: their host bridge; NODE: two host bridges of one NUMA node; SYS: beyond it,
    or not known. Legend of `nvidia-smi topo -m`. A switch is two components of a path, its port upstream and one
    downstream, so two devices on one switch have a longest common prefix that ends two before each.
    """
    common = _common(a, b)
    if common == 0:
        return "NODE" if numa_a is not None and numa_a == numa_b else "SYS"
    if common == 1:
        return "PHB"
    return "PIX" if max(len(a), len(b)) - common <= 2 else "PXB"


def _common(a: PciPath, b: PciPath) -> int:
    count = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        count += 1
    return count
