"""GPUs and NICs of an NCCL topology and where each hangs: its processor and the PCI bridges above it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_train.cluster.nccl_xml_tree import Element
from hpc_train.errors import UserError

_BUS_ID = re.compile(r"[0-9a-fA-F]{1,8}:[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\.[0-9a-fA-F]{1,2}")
MOST_MASK = 1024
"""Groups of 32 processors in an affinity mask."""


@dataclass(frozen=True)
class Place:
    """Where a device hangs."""

    host: str
    """host_hash, which NCCL writes where one file holds several nodes; "" where it does not."""
    processor: int
    """Which <cpu> of the file."""
    numa: int | None
    cpus: str | None
    bridges: tuple[str, ...]
    """PCI addresses from the processor down to the device itself; () for a NIC that is no PCI device."""


@dataclass(frozen=True)
class Device:
    element: Element
    """<gpu>, <net>, or the <pci> of a file that lists neither."""
    place: Place

    def number(self) -> int | None:
        """NCCL's own index of it."""
        dev = self.element.attributes.get("dev", "")
        return int(dev) if re.fullmatch(r"\d{1,4}", dev) else None


def devices(root: Element, name: str) -> tuple[list[Device], list[Device]]:
    """GPUs and NICs in the order of the file. A file without <gpu> (without <net>) is one that a vendor ships for
    NCCL_TOPO_FILE: there the PCI class tells the GPUs (NICs)."""
    places = list(_places(root, name))
    gpus = [Device(it, place) for place, element in places for it in element.of("gpu")]
    nics = [Device(it, place) for place, element in places for it in _nets(element)]
    listed = [Device(element, place) for place, element in places if element.tag == "pci"]
    return (
        gpus or [it for it in listed if _class(it.element).startswith(("03", "12"))],
        nics or [it for it in listed if _class(it.element).startswith("02")],
    )


def bus_id(element: Element, attribute: str, name: str) -> str:
    """A PCI address as Linux writes it."""
    value = element.attributes.get(attribute, "")
    if not _BUS_ID.fullmatch(value):
        raise UserError(f"{name}:{element.line}: {attribute}={value!r} of <{element.tag}>; expected a PCI address")
    domain, rest = value.lower().split(":", 1)
    return f"{domain.lstrip('0'):0>4}:{rest}"


def number(element: Element, attribute: str, name: str, default: str = "0") -> float:
    """A number that is not negative."""
    value = element.attributes.get(attribute, default)
    if not re.fullmatch(r"\d{1,12}(\.\d{1,12})?", value):
        raise UserError(f"{name}:{element.line}: {attribute}={value!r} of <{element.tag}>; expected a number")
    return float(value)


def _nets(element: Element) -> Iterator[Element]:
    yield from element.of("net")
    for nic in element.of("nic"):
        yield from nic.of("net")


def _class(pci: Element) -> str:
    return pci.attributes.get("class", "").lower().removeprefix("0x")


def _places(root: Element, name: str) -> Iterator[tuple[Place, Element]]:
    """Every <cpu> and <pci> and its place. A fragment may start at <cpu> or <pci>."""
    tops = root.children if root.tag == "system" else [root]
    for index, top in enumerate(tops):
        processor = top if top.tag == "cpu" else Element("cpu", {}, top.line, [top])
        host = processor.attributes.get("host_hash", "")
        place = Place(host, index, _numa(processor, name), _cpus(processor, name), ())
        yield place, processor
        yield from _below(place, processor, name)


def _below(place: Place, element: Element, name: str) -> Iterator[tuple[Place, Element]]:
    for pci in element.of("pci"):
        bridges = (*place.bridges, bus_id(pci, "busid", name))
        deeper = Place(place.host, place.processor, place.numa, place.cpus, bridges)
        yield deeper, pci
        yield from _below(deeper, pci, name)


def _numa(processor: Element, name: str) -> int | None:
    value = processor.attributes.get("numaid", "-1")
    if not re.fullmatch(r"-?\d{1,6}", value):
        raise UserError(f"{name}:{processor.line}: numaid={value!r} of <cpu>; expected a number")
    return int(value) if int(value) >= 0 else None


def _cpus(processor: Element, name: str) -> str | None:
    """Linux's list for an affinity mask: hexadecimal groups of 32 processors, the highest first."""
    value = processor.attributes.get("affinity", "").strip()
    groups = value.removeprefix("0x").split(",") if value else []
    if len(groups) > MOST_MASK or not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", it) for it in groups):
        raise UserError(
            f"{name}:{processor.line}: affinity={value[:40]!r} of <cpu>; expected a mask like 00ff,ffffffff"
        )
    mask = 0
    for group in groups:
        mask = mask << 32 | int(group, 16)
    return ",".join(_ranges(mask)) or None


def _ranges(mask: int) -> Iterator[str]:
    for found in re.finditer("1+", f"{mask:b}"[::-1]):
        first, last = found.start(), found.end() - 1
        yield f"{first}-{last}" if last > first else f"{first}"
