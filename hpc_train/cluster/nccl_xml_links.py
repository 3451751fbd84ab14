"""How two devices of an NCCL topology reach each other: NVLink, xGMI, or what the PCI paths have in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpc_train.cluster.nccl_xml_devices import Device, Place, bus_id, number
from hpc_train.cluster.nccl_xml_tree import Element

_SWITCH = "0x068000"
"""PCI class of an NVSwitch."""


@dataclass
class Bonds:
    """NVLinks, or xGMI links, of one GPU."""

    nvlink: bool = True
    """False: xGMI."""
    total: int = 0
    switched: int = 0
    """Those that go to NVSwitches."""
    targets: dict[str, int] = field(default_factory=dict)
    """Links to each other end, by PCI address (RCCL's newer files: by GPU number)."""


def bonds_of(gpu: Device, name: str) -> Bonds | None:
    """None for a GPU that a vendor's file tells by its class only; such files never list links."""
    if gpu.element.tag != "gpu":
        return None
    found = Bonds(nvlink=not gpu.element.of("xgmi"))
    for outer in (*gpu.element.of("nvlink"), *gpu.element.of("xgmi")):
        for link in outer.of("link") or [outer]:
            count = int(number(link, "count", name, "1"))
            target = _target(link, name)
            found.total += count
            found.targets[target] = found.targets.get(target, 0) + count
            if link.attributes.get("tclass", "").lower() == _SWITCH:
                found.switched += count
    return found


def _target(link: Element, name: str) -> str:
    target = link.attributes.get("target", "")
    return target if target.isdigit() and len(target) <= 4 else bus_id(link, "target", name)


def bond_kind(a: Device, b: Device, bonds: tuple[Bonds | None, Bonds | None]) -> str | None:
    """NV<count>, of the links that both have, or XGMI where both sides say so. None where PCI joins them."""
    from_a, from_b = bonds
    if from_a is None or from_b is None:
        return None
    count = min(_towards(from_a, b), _towards(from_b, a)) or min(from_a.switched, from_b.switched)
    if not count:
        return None
    return f"NV{count}" if from_a.nvlink and from_b.nvlink else "XGMI"


def _towards(bonds: Bonds, other: Device) -> int:
    address = other.place.bridges[-1] if other.place.bridges else ""
    return bonds.targets.get(address, 0) + bonds.targets.get(str(other.number()), 0)


def closeness(a: Place, b: Place) -> str | None:
    """What the way over PCI crosses at worst: one bridge PIX, several PXB, the host bridge PHB (both paths start on one
    root bus), the processor NODE (one <cpu>, or one NUMA node), the link between processors SYS. None for a NIC that is
    no PCI device. NCCL itself writes PHB for NODE: it does not tell host bridges apart."""
    if not a.bridges or not b.bridges:
        return None
    if a.processor == b.processor:
        shared = _shared(a.bridges, b.bridges)
        if shared:
            return "PIX" if max(len(a.bridges), len(b.bridges)) - shared <= 1 else "PXB"
        return "PHB" if _root_bus(a) == _root_bus(b) else "NODE"
    return "NODE" if a.numa is not None and a.numa == b.numa else "SYS"


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    return next((at for at, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b)))


def _root_bus(place: Place) -> str:
    return place.bridges[0].rpartition(":")[0]
