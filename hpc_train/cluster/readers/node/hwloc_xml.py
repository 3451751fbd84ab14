"""Read hwloc's XML (`lstopo --of xml`, `lstopo node.xml`) of versions 1 and 2: GPUs, NICs and links of a node.

The objects are a tree: the machine, its packages and NUMA nodes, and below them host bridges, PCI bridges, PCI devices
and what the operating system makes of each (OSDev). A device is near the processors and the memory of the object that
its host bridge hangs on. Attributes as in hwloc's doc/hwloc.doxy and hwloc/topology-xml.c.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpc_train.cluster.readers.xml_elements import XmlElement, parse_xml, read_root_tag
from hpc_train.cluster.spec import UNNAMED_HOST, Cluster, Gpu, Link, Nic, Node
from hpc_train.cluster.sysfs import PciPath, classify_pci_distance, format_processors, get_pci_address
from hpc_train.errors import UserError

MAX_DEVICES = 512
"""Maximum number of devices of a node, since every pair of them becomes a link."""
_MAX_GROUPS = 1024
"""Groups of 32 bits in a set of processors or NUMA nodes."""
_IO_TYPES = ("Bridge", "PCIDev", "OSDev", "Misc")
_NVIDIA, _AMD, _INTEL, _CRAY = "10de", "1002", "8086", "17db"
_GPU_CLASSES = {_NVIDIA: ("0300", "0302"), _AMD: ("0300", "0302", "0380", "1200"), _INTEL: ("0380", "1200")}
"""PCI classes of the accelerators of each vendor. The displays of management controllers have other vendors."""
_RDMA_DEVICE = "3"
"""osdev_type of an RDMA device; 2 is a network interface."""


def matches_hwloc_xml(text: str) -> bool:
    """Whether the text is XML with hwloc's root element."""
    return text.lstrip("\ufeff \t\r\n")[:1] == "<" and read_root_tag(text) == "topology"


def read_hwloc_xml(text: str, name: str) -> Cluster:
    """Read one node. hwloc gives no link rates and no NVLink counts; where it saw NVLinks, a note says so.

    GPUs and NICs are numbered by PCI address, as CUDA numbers GPUs with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    Raises UserError for other XML, other versions, and truncated or odd files.
    """
    root = parse_xml(text, name, document_type="topology")
    version = root.attributes.get("version", "1")
    if root.tag != "topology" or version.partition(".")[0] not in ("1", "2"):
        raise UserError(f"{name}:{root.line}: <{root.tag} version={version!r}>; expected hwloc's <topology>, 1 or 2")
    machines = [top for top in root.list_children("object") if top.attributes.get("type") in ("Machine", "System")]
    if len(machines) != 1:
        raise UserError(f"{name}:{root.line}: {len(machines)} machines; expected one <object> of a machine")
    devices = sorted(_find_devices(machines[0], name), key=lambda device: device.address)
    _check_devices(devices, machines[0], name)
    gpus = [device for device in devices if _is_gpu(device)]
    nics = [device for device in devices if _is_nic(device)]
    host = _read_info(machines[0], "HostName") or UNNAMED_HOST
    node = Node(
        host,
        tuple(_make_gpu(f"GPU{n}", gpu) for n, gpu in enumerate(gpus)),
        tuple(_make_nic(f"NIC{n}", nic) for n, nic in enumerate(nics)),
    )
    links, notes = _make_links(host, gpus, nics, root, name)
    return Cluster("hwloc_xml", (node,), tuple(links), (), notes)


@dataclass(frozen=True)
class HwlocPlace:
    """Place of a device: near which processors and memory it is, and its path below their host bridge."""

    numa: int | None
    """None where the host bridge is near several NUMA nodes."""
    cpus: str | None
    path: PciPath


@dataclass(frozen=True)
class HwlocDevice:
    """A PCI device."""

    element: XmlElement
    place: HwlocPlace
    pci_class: str
    """Four hexadecimal digits, such as 0302."""
    vendor: str

    @property
    def address(self) -> str:
        return get_pci_address(self.place.path) or ""

    def list_functions(self, *types: str) -> list[XmlElement]:
        """Return the operating system's devices of these osdev_types, in the order of the file."""
        return [child for child in _list_objects(self.element, "OSDev") if child.attributes.get("osdev_type") in types]


def _find_devices(machine: XmlElement, name: str) -> Iterator[HwlocDevice]:
    host_bridges = itertools.count()
    stack = [(machine, HwlocPlace(*_read_sets(machine, name), ()))]
    while stack:
        element, place = stack.pop()
        for child in element.list_children("object"):
            kind = child.attributes.get("type", "")
            # Packages, groups and NUMA nodes set which processors are near; a new path begins below each.
            if kind not in _IO_TYPES:
                below = HwlocPlace(*_read_sets(child, name, place), ())
            # A bridge without an address is a host bridge: the root of a PCI tree. They get numbers, since two devices
            # below different ones are never joined by a switch.
            elif kind == "Bridge" and "pci_busid" not in child.attributes:
                below = replace(place, path=(f"host bridge {next(host_bridges)}",))
            elif kind in ("PCIDev", "Bridge"):
                below = replace(place, path=(*place.path, _read_bus_id(child, name)))
            else:
                below = place
            if kind == "PCIDev":
                yield HwlocDevice(child, below, *_read_pci_type(child, name))
            stack.append((child, below))


def _read_sets(element: XmlElement, name: str, above: HwlocPlace | None = None) -> tuple[int | None, str | None]:
    """Read (NUMA node, processors) of a package, a group or the machine; several NUMA nodes: None."""
    nodes = _read_mask(element, "nodeset", name)
    processors = _read_mask(element, "cpuset", name)
    if nodes is None and processors is None and above is not None:
        return above.numa, above.cpus
    # With several bits set the object spans NUMA nodes, so no single one is the nearest.
    numa = nodes.bit_length() - 1 if nodes and nodes.bit_count() == 1 else None
    return numa, format_processors(processors or 0)


def _read_mask(element: XmlElement, attribute: str, name: str) -> int | None:
    """Read a set: groups of 32 bits, the highest first, an empty one is zero; None for a set without end, `0xf...f`."""
    value = element.attributes.get(attribute)
    if not value or value.startswith("0xf...f"):
        return None
    groups = value.split(",")
    if len(groups) > _MAX_GROUPS or not all(re.fullmatch(r"(0x[0-9a-fA-F]{1,8})?", group) for group in groups):
        raise UserError(f"{name}:{element.line}: {attribute}={value[:40]!r}; expected a set like 0x00ff,0xffffffff")
    mask = 0
    for group in groups:
        mask = mask << 32 | int(group or "0", 16)
    return mask


def _read_bus_id(element: XmlElement, name: str) -> str:
    value = element.attributes.get("pci_busid", "")
    if not re.fullmatch(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", value):
        raise UserError(f"{name}:{element.line}: pci_busid={value!r}; expected a PCI address")
    return value.lower()


def _read_pci_type(element: XmlElement, name: str) -> tuple[str, str]:
    value = element.attributes.get("pci_type", "")
    match = re.match(r"([0-9a-f]{4}) \[([0-9a-f]{4}):", value.lower())
    if not match:
        raise UserError(f"{name}:{element.line}: pci_type={value!r}; expected a class and ids like 0302 [10de:2330]")
    return match[1], match[2]


def _check_devices(devices: list[HwlocDevice], machine: XmlElement, name: str) -> None:
    if not devices:
        raise UserError(
            f"{name}:{machine.line}: no PCI device; expected a file with them (lstopo --whole-io --of xml), which a "
            "container or a topology exported without I/O does not have"
        )
    for before, device in itertools.pairwise(devices):
        if before.address == device.address:
            raise UserError(f"{name}:{device.element.line}: a second device at {device.address}; expected one")
    if sum(_is_gpu(device) or _is_nic(device) for device in devices) > MAX_DEVICES:
        raise UserError(f"{name}:{machine.line}: more than {MAX_DEVICES} GPUs and NICs; not a real node")


def _is_gpu(device: HwlocDevice) -> bool:
    return device.pci_class in _GPU_CLASSES.get(device.vendor, ())


def _is_nic(device: HwlocDevice) -> bool:
    """Whether a device is a NIC for RDMA. Slingshot's are network interfaces to hwloc, so their vendor tells."""
    return bool(device.list_functions(_RDMA_DEVICE)) or (device.vendor == _CRAY and bool(device.list_functions("2")))


def _make_gpu(id: str, device: HwlocDevice) -> Gpu:
    place = device.place
    models = [_read_info(function, "GPUModel") for function in device.list_functions("1", "5")]
    model = next((model for model in models if model), None) or _read_info(device.element, "PCIDevice")
    return Gpu(id, numa=place.numa, cpus=place.cpus, name=model, pci=device.address)


def _make_nic(id: str, device: HwlocDevice) -> Nic:
    function = (device.list_functions(_RDMA_DEVICE) or device.list_functions("2"))[0]
    states = [info.attributes.get("value") for info in function.list_children("info") if _names_port_state(info)]
    guid = (_read_info(function, "NodeGUID") or "").replace(":", "").lower()
    device_name = function.attributes.get("name")
    return Nic(
        id,
        device_name or None,
        numa=device.place.numa,
        pci=device.address,
        guid=guid if re.fullmatch(r"[0-9a-f]{16}", guid) else None,
        active="4" in states if states else None,
        layer=_find_layer(device),
    )


def _names_port_state(info: XmlElement) -> bool:
    """Whether this is the state of an RDMA port; 4 means active."""
    return re.fullmatch(r"Port\d{1,3}State", info.attributes.get("name", "")) is not None


def _find_layer(device: HwlocDevice) -> str | None:
    """Tell the link layer of an RDMA device by its PCI class; None if that does not say.

    0207 is InfiniBand; 0200 may be RoCE, or an InfiniBand card in Ethernet mode.
    """
    if device.vendor == _CRAY:
        return "slingshot"
    return "infiniband" if device.pci_class == "0207" else None


def _list_objects(element: XmlElement, kind: str) -> list[XmlElement]:
    return [child for child in element.list_children("object") if child.attributes.get("type") == kind]


def _read_info(element: XmlElement, key: str) -> str | None:
    for info in element.list_children("info"):
        if info.attributes.get("name") == key:
            return info.attributes.get("value")
    return None


def _make_links(
    host: str, gpus: list[HwlocDevice], nics: list[HwlocDevice], root: XmlElement, name: str
) -> tuple[list[Link], tuple[str, ...]]:
    ids = [*(f"GPU{n}" for n in range(len(gpus))), *(f"NIC{n}" for n in range(len(nics)))]
    places = [device.place for device in (*gpus, *nics)]
    matrices = {matrix.attributes.get("name", ""): matrix for matrix in root.list_children("distances2")}
    # hwloc 2 gives xGMI as a matrix of hops: one hop is a direct link.
    bonds = _find_xgmi_bonds(gpus, matrices["XGMIHops"], name) if "XGMIHops" in matrices else {}
    links = [
        Link(host, ids[a], ids[b], bonds.get((a, b)) or _classify_distance(places[a], places[b]))
        for a, b in itertools.combinations(range(len(ids)), 2)
    ]
    notes = (
        ("NVLinks are in this file as bandwidths, not as counts, and are not read: give `nvidia-smi topo -m`",)
        if "NVLinkBandwidth" in matrices
        else ()
    )
    return links, notes


def _classify_distance(a: HwlocPlace, b: HwlocPlace) -> str:
    return classify_pci_distance(a.path, b.path, a.numa, b.numa)


def _find_xgmi_bonds(gpus: list[HwlocDevice], matrix: XmlElement, name: str) -> dict[tuple[int, int], str]:
    """Find the pairs of GPUs that are one xGMI hop apart in a matrix of hops between devices."""
    indexes = _read_numbers(matrix, "indexes", name)
    hops = _read_numbers(matrix, "u64values", name)
    if len(hops) != len(indexes) ** 2:
        raise UserError(
            f"{name}:{matrix.line}: {len(hops)} distances between {len(indexes)} devices; expected {len(indexes) ** 2}"
        )
    owners = {
        function.attributes.get("gp_index", ""): index
        for index, gpu in enumerate(gpus)
        for function in _list_objects(gpu.element, "OSDev")
    }
    bonds = {}
    for a, b in itertools.permutations(range(len(indexes)), 2):
        first, second = owners.get(str(indexes[a])), owners.get(str(indexes[b]))
        if hops[a * len(indexes) + b] == 1 and first is not None and second is not None and first < second:
            bonds[first, second] = "XGMI"
    return bonds


def _read_numbers(matrix: XmlElement, tag: str, name: str) -> list[int]:
    words = " ".join(child.text for child in matrix.list_children(tag)).split()
    if len(words) > MAX_DEVICES**2 or not all(re.fullmatch(r"[0-9]{1,20}", word) for word in words):
        raise UserError(f"{name}:{matrix.line}: <{tag}> of {matrix.attributes.get('name')}; expected numbers")
    return [int(word) for word in words]
