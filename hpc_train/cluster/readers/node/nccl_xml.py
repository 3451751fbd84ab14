"""Read NCCL's topology XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE) and RCCL's: GPUs, NICs and links of a node.

Elements and attributes are those of NCCL, src/graph/xml.cc and topo.cc. From the bottom up: devices and where
each hangs (its processor and the PCI bridges above it); links (NVLink, xGMI, or what the PCI paths have in common); the
node.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hpc_train.cluster.readers.xml_elements import XmlElement, parse_xml, read_root_tag
from hpc_train.cluster.spec import UNNAMED_HOST, Cluster, Gpu, Link, Nic, Node
from hpc_train.cluster.sysfs import format_processors
from hpc_train.errors import UserError

_BUS_ID = re.compile(r"[0-9a-fA-F]{1,8}:[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}\.[0-9a-fA-F]{1,2}")
MAX_MASK_GROUPS = 1024
"""Groups of 32 processors in an affinity mask."""


@dataclass(frozen=True)
class NcclPlace:
    """Place of a device on the PCI tree."""

    host: str
    """host_hash, which NCCL writes if a file holds several nodes; "" otherwise."""
    processor: int
    """Index of the <cpu> in the file."""
    numa: int | None
    cpus: str | None
    bridges: tuple[str, ...]
    """PCI addresses from the processor down to the device itself; () for a NIC that is no PCI device."""


@dataclass(frozen=True)
class NcclDevice:
    """A GPU or NIC of the file, and its place on the PCI bus."""

    element: XmlElement
    """<gpu>, <net>, or the <pci> of a file that lists neither."""
    place: NcclPlace

    def number(self) -> int | None:
        """NCCL's own index of the device."""
        dev = self.element.attributes.get("dev", "")
        return int(dev) if re.fullmatch(r"\d{1,4}", dev) else None


def find_devices(root: XmlElement, name: str) -> tuple[list[NcclDevice], list[NcclDevice]]:
    """List the GPUs and NICs in the order of the file.

    A file without <gpu> (without <net>) is one that a vendor ships for NCCL_TOPO_FILE: there the PCI class tells the
    GPUs (NICs).
    """
    places = list(_find_places(root, name))
    gpus = [NcclDevice(device, place) for place, element in places for device in element.list_children("gpu")]
    nics = [NcclDevice(device, place) for place, element in places for device in _list_nets(element)]
    listed = [NcclDevice(element, place) for place, element in places if element.tag == "pci"]
    return (
        gpus or [device for device in listed if _read_class(device.element).startswith(("03", "12"))],
        nics or [device for device in listed if _read_class(device.element).startswith("02")],
    )


def read_bus_id(element: XmlElement, attribute: str, name: str) -> str:
    """Read a PCI address, as Linux writes it."""
    value = element.attributes.get(attribute, "")
    if not _BUS_ID.fullmatch(value):
        raise UserError(f"{name}:{element.line}: {attribute}={value!r} of <{element.tag}>; expected a PCI address")
    domain, rest = value.lower().split(":", 1)
    return f"{domain.lstrip('0'):0>4}:{rest}"


def read_number(element: XmlElement, attribute: str, name: str, default: str = "0") -> float:
    """Read an attribute as a number that is not negative."""
    value = element.attributes.get(attribute, default)
    if not re.fullmatch(r"\d{1,12}(\.\d{1,12})?", value):
        raise UserError(f"{name}:{element.line}: {attribute}={value!r} of <{element.tag}>; expected a number")
    return float(value)


def _list_nets(element: XmlElement) -> Iterator[XmlElement]:
    yield from element.list_children("net")
    for nic in element.list_children("nic"):
        yield from nic.list_children("net")


def _read_class(pci: XmlElement) -> str:
    return pci.attributes.get("class", "").lower().removeprefix("0x")


def _find_places(root: XmlElement, name: str) -> Iterator[tuple[NcclPlace, XmlElement]]:
    """Yield every <cpu> and <pci> with its place. A fragment may start at <cpu> or <pci>."""
    tops = root.children if root.tag == "system" else [root]
    for index, top in enumerate(tops):
        processor = top if top.tag == "cpu" else XmlElement("cpu", {}, top.line, [top])
        host = processor.attributes.get("host_hash", "")
        place = NcclPlace(host, index, _read_numa(processor, name), _format_cpus(processor, name), ())
        yield place, processor
        yield from _make_place_below(place, processor, name)


def _make_place_below(place: NcclPlace, element: XmlElement, name: str) -> Iterator[tuple[NcclPlace, XmlElement]]:
    for pci in element.list_children("pci"):
        bridges = (*place.bridges, read_bus_id(pci, "busid", name))
        deeper = NcclPlace(place.host, place.processor, place.numa, place.cpus, bridges)
        yield deeper, pci
        yield from _make_place_below(deeper, pci, name)


def _read_numa(processor: XmlElement, name: str) -> int | None:
    value = processor.attributes.get("numaid", "-1")
    if not re.fullmatch(r"-?\d{1,6}", value):
        raise UserError(f"{name}:{processor.line}: numaid={value!r} of <cpu>; expected a number")
    return int(value) if int(value) >= 0 else None


def _format_cpus(processor: XmlElement, name: str) -> str | None:
    """Convert an affinity mask (hexadecimal groups of 32 processors, highest first) to Linux's list of processors."""
    value = processor.attributes.get("affinity", "").strip()
    groups = value.removeprefix("0x").split(",") if value else []
    if len(groups) > MAX_MASK_GROUPS or not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", group) for group in groups):
        raise UserError(
            f"{name}:{processor.line}: affinity={value[:40]!r} of <cpu>; expected a mask like 00ff,ffffffff"
        )
    mask = 0
    for group in groups:
        mask = mask << 32 | int(group, 16)
    return format_processors(mask)


_SWITCH = "0x068000"
"""PCI class of an NVSwitch."""


@dataclass
class GpuBonds:
    """NVLinks, or xGMI links, of one GPU."""

    nvlink: bool = True
    """True for NVLink, False for xGMI."""
    total: int = 0
    switched: int = 0
    """Number of links to NVSwitches."""
    targets: dict[str, int] = field(default_factory=dict)
    """Number of links to each other end, by PCI address (in RCCL's newer files by GPU number)."""


def read_bonds(gpu: NcclDevice, name: str) -> GpuBonds | None:
    """Read the links of a GPU.

    None for a GPU that a vendor's file gives by class only, since such files never list links.
    """
    if gpu.element.tag != "gpu":
        return None
    bonds = GpuBonds(nvlink=not gpu.element.list_children("xgmi"))
    for outer in (*gpu.element.list_children("nvlink"), *gpu.element.list_children("xgmi")):
        for link in outer.list_children("link") or [outer]:
            count = int(read_number(link, "count", name, "1"))
            target = _read_target(link, name)
            bonds.total += count
            bonds.targets[target] = bonds.targets.get(target, 0) + count
            if link.attributes.get("tclass", "").lower() == _SWITCH:
                bonds.switched += count
    return bonds


def _read_target(link: XmlElement, name: str) -> str:
    target = link.attributes.get("target", "")
    return target if target.isdigit() and len(target) <= 4 else read_bus_id(link, "target", name)


def classify_bond(a: NcclDevice, b: NcclDevice, bonds: tuple[GpuBonds | None, GpuBonds | None]) -> str | None:
    """Name the bond of two GPUs; None if only PCI joins them.

    NV<count> of the links that both have, or XGMI if both sides say so.
    """
    from_a, from_b = bonds
    if from_a is None or from_b is None:
        return None
    # Each side lists its own links, and a broken one may be missing on one side only. Behind NVSwitches links have no
    # GPU at their end: then both sides' links to switches count.
    count = min(_count_towards(from_a, b), _count_towards(from_b, a)) or min(from_a.switched, from_b.switched)
    if not count:
        return None
    return f"NV{count}" if from_a.nvlink and from_b.nvlink else "XGMI"


def _count_towards(bonds: GpuBonds, other: NcclDevice) -> int:
    address = other.place.bridges[-1] if other.place.bridges else ""
    return bonds.targets.get(address, 0) + bonds.targets.get(str(other.number()), 0)


def classify_pci_distance(a: NcclPlace, b: NcclPlace) -> str | None:
    """Return the worst hop of the way over PCI, in NVIDIA's words; None for a NIC that is no PCI device.

    PIX: one bridge; PXB: several; PHB: the host bridge (both paths start on one root bus); NODE: the processor (one
    <cpu>, or one NUMA node); SYS: the link between processors. NCCL itself writes PHB for NODE, because it does not
    tell host bridges apart.
    """
    if not a.bridges or not b.bridges:
        return None
    if a.processor == b.processor:
        shared = _count_shared(a.bridges, b.bridges)
        if shared:
            return "PIX" if max(len(a.bridges), len(b.bridges)) - shared <= 1 else "PXB"
        return "PHB" if _get_root_bus(a) == _get_root_bus(b) else "NODE"
    return "NODE" if a.numa is not None and a.numa == b.numa else "SYS"


def _count_shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    return next(
        (index for index, (left, right) in enumerate(zip(a, b, strict=False)) if left != right), min(len(a), len(b))
    )


def _get_root_bus(place: NcclPlace) -> str:
    return place.bridges[0].rpartition(":")[0]


MAX_DEVICES = 512
"""Maximum number of devices of a node, since every pair of them becomes a link."""
_ROOTS = ("system", "cpu", "pci")


def matches_nccl_xml(text: str) -> bool:
    """Whether the text is XML with NCCL's root element, or a fragment of it."""
    return text.lstrip("\ufeff \t\r\n")[:1] == "<" and read_root_tag(text) in _ROOTS


def read_nccl_xml(text: str, name: str) -> Cluster:
    """Read one node, or several if the file holds nodes joined by NVLink (host_hash), named by that hash.

    GPUs are named by NCCL's own index. `nvlinks` counts what each GPU itself lists, so that one that lost its links
    shows; None in files of vendors, which list none. Raises UserError for other XML and for truncated or odd files.
    """
    root = parse_xml(text, name)
    if root.tag not in _ROOTS:
        raise UserError(f"{name}:{root.line}: <{root.tag}>; expected NCCL's <system version=...>")
    _check_version(root, name)
    gpus, nics = find_devices(root, name)
    hosts = list(dict.fromkeys(device.place.host for device in (*gpus, *nics))) or [""]
    parts = [
        _make_node(
            host if len(hosts) > 1 else UNNAMED_HOST, _select_devices(gpus, host), _select_devices(nics, host), name
        )
        for host in hosts
    ]
    return Cluster("nccl_xml", tuple(node for node, _ in parts), tuple(link for _, links in parts for link in links))


def _check_version(root: XmlElement, name: str) -> None:
    version = root.attributes.get("version", "1")
    if root.tag == "system" and version not in ("1", "2"):
        raise UserError(f"{name}:{root.line}: <system version={version!r}>; expected 1 (NCCL) or 2 (RCCL)")


def _select_devices(devices: list[NcclDevice], host: str) -> list[NcclDevice]:
    return [device for device in devices if device.place.host == host]


def _make_node(host: str, gpus: list[NcclDevice], nets: list[NcclDevice], name: str) -> tuple[Node, list[Link]]:
    nics = _group_ports(nets, name)
    if len(gpus) + len(nics) > MAX_DEVICES:
        raise UserError(f"{name}:1: more than {MAX_DEVICES} GPUs and NICs in one node; not a real topology")
    gpus, gpu_ids = _order_devices(gpus, "GPU")
    ports, nic_ids = _order_devices([nic[0] for nic in nics], "NIC")
    _check_addresses(gpus, name)
    bonds = [read_bonds(gpu, name) for gpu in gpus]
    rates = {id(first.element): rate for first, rate in nics}
    node = Node(
        host,
        tuple(_make_gpu(*gpu_id) for gpu_id in zip(gpu_ids, gpus, bonds, strict=True)),
        tuple(
            _make_nic(label, nic_id, rates[id(nic_id.element)]) for label, nic_id in zip(nic_ids, ports, strict=True)
        ),
    )
    return node, _make_links(host, [*gpu_ids, *nic_ids], [*gpus, *ports], [*bonds, *[None] * len(ports)])


def _group_ports(nets: list[NcclDevice], name: str) -> list[tuple[NcclDevice, float | None]]:
    """Group the ports by device, with their total rate: NCCL lists every port that is up as a <net>, in Mbit/s."""
    ports: dict[object, tuple[NcclDevice, float | None]] = {}
    for net in nets:
        device = net.element.attributes.get("name")
        rate = read_number(net.element, "speed", name) / 1000 if net.element.tag == "net" else 0.0
        key = (device, net.place) if device else id(net)
        first, before = ports.get(key, (net, None))
        ports[key] = first, (before or 0.0) + rate or None
    return list(ports.values())


def _order_devices(devices: list[NcclDevice], kind: str) -> tuple[list[NcclDevice], list[str]]:
    """Order and name devices by NCCL's index if every one has its own, else by the order of the file."""
    numbers = [device.number() for device in devices]
    if None in numbers or len(set(numbers)) < len(numbers):
        return devices, [f"{kind}{index}" for index in range(len(devices))]
    ordered = sorted(devices, key=lambda device: device.number() or 0)
    return ordered, [f"{kind}{device.number()}" for device in ordered]


def _check_addresses(gpus: list[NcclDevice], name: str) -> None:
    """Refuse an address at two places. Several GPUs may share one <pci>: partitions."""
    places: dict[str, NcclPlace] = {}
    for gpu in gpus:
        bridges = gpu.place.bridges
        if bridges and places.setdefault(bridges[-1], gpu.place) != gpu.place:
            raise UserError(f"{name}:{gpu.element.line}: a second GPU at {bridges[-1]}; expected one place for it")


def _make_gpu(label: str, gpu: NcclDevice, bonds: GpuBonds | None) -> Gpu:
    return Gpu(
        label,
        numa=gpu.place.numa,
        cpus=gpu.place.cpus,
        pci=gpu.place.bridges[-1] if gpu.place.bridges else None,
        nvlinks=bonds.total if bonds else None,
    )


def _make_nic(label: str, net: NcclDevice, rate: float | None) -> Nic:
    bridges = net.place.bridges
    device = net.element.attributes.get("name") if net.element.tag == "net" else None
    numa = net.place.numa if bridges else None
    return Nic(label, device or None, numa=numa, pci=bridges[-1] if bridges else None, gbit_s=rate)


def _make_links(host: str, ids: list[str], devices: list[NcclDevice], bonds: Sequence[GpuBonds | None]) -> list[Link]:
    links = []
    for a, b in itertools.combinations(range(len(devices)), 2):
        kind = classify_bond(devices[a], devices[b], (bonds[a], bonds[b])) or classify_pci_distance(
            devices[a].place, devices[b].place
        )
        if kind is not None:
            links.append(Link(host, ids[a], ids[b], kind))
    return links
