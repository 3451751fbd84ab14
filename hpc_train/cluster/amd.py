"""AMD's GPUs of this machine by the kernel driver's own topology, /sys/class/kfd."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hpc_train.cluster.sysfs import entries, text

_XGMI = 11
"""HSA_IOLINK_TYPE_XGMI of the Linux kernel's kfd_crat.h; 2 is PCIe."""


@dataclass(frozen=True)
class AmdGpu:
    """One GPU, or a part of one that is a device of its own."""

    node: int
    """Its number in this topology, which counts processors too."""
    pci: str
    name: str | None
    peers: frozenset[int]
    """Nodes of the GPUs that it reaches over xGMI at one hop."""


def gpus(root: Path = Path("/")) -> tuple[AmdGpu, ...]:
    """Nodes with compute units, in the driver's order; none without the driver."""
    found = [_gpu(it) for it in entries(root / "sys/class/kfd/kfd/topology/nodes") if it.name.isdecimal()]
    known = {it.node for it in found if it is not None}
    return tuple(AmdGpu(it.node, it.pci, it.name, it.peers & known) for it in found if it is not None)


def _gpu(node: Path) -> AmdGpu | None:
    facts = _properties(node / "properties")
    if not facts.get("simd_count") or "location_id" not in facts:
        return None
    bus, device = divmod(facts["location_id"] & 0xFFFF, 256)
    pci = f"{facts.get('domain', 0):04x}:{bus:02x}:{device >> 3:02x}.{device & 7}"
    links = [_properties(it / "properties") for it in entries(node / "io_links")]
    peers = {it.get("node_to", -1) for it in links if it.get("type") == _XGMI}
    return AmdGpu(int(node.name), pci, text(node / "name") or None, frozenset(peers))


def _properties(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(value) for name, value in re.findall(r"^(\w+) ([0-9]{1,20})$", text(path) or "", re.MULTILINE)}
