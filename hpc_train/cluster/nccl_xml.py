"""NCCL's topology XML (NCCL_TOPO_DUMP_FILE, NCCL_TOPO_FILE) and RCCL's: GPUs, NICs and links of a node.

Elements and attributes are those of NCCL, src/graph/xml.cc and topo.cc."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hpc_train.cluster.nccl_xml_devices import Device, Place, devices, number
from hpc_train.cluster.nccl_xml_links import Bonds, bond_kind, bonds_of, closeness
from hpc_train.cluster.nccl_xml_tree import Element, parse, root_tag
from hpc_train.cluster.spec import Cluster, Gpu, Link, Nic, Node
from hpc_train.errors import UserError

HOST = "localhost"
MOST_DEVICES = 512
"""Of one node: every pair of them becomes a link."""
_OTHERS = {
    "graphs": "an NCCL graph (NCCL_GRAPH_DUMP_FILE), not a topology; expected the file of NCCL_TOPO_DUMP_FILE",
    "topology": "hwloc is not read; expected NCCL's topology (NCCL_TOPO_DUMP_FILE)",
}
_ROOTS = ("system", "cpu", "pci")


def matches(text: str) -> bool:
    """Whether it is XML with NCCL's root element, or a fragment of it, or XML that is often mistaken for it."""
    return text.lstrip("\ufeff \t\r\n")[:1] == "<" and root_tag(text) in (*_ROOTS, *_OTHERS)


def read(text: str, name: str) -> Cluster:
    """One node, or several where the file holds those that NVLink joins (host_hash), named by that hash.

    GPUs are named by NCCL's own index. `nvlinks` counts what each GPU itself lists, so that one that lost its links
    shows; None in files of vendors, which list none. Raises UserError for other XML and for truncated or odd files."""
    tag = root_tag(text)
    if tag in _OTHERS:
        raise UserError(f"{name}:1: {_OTHERS[tag]}")
    root = parse(text, name)
    if root.tag not in _ROOTS:
        raise UserError(f"{name}:{root.line}: <{root.tag}>; expected NCCL's <system version=...>")
    _check_version(root, name)
    gpus, nics = devices(root, name)
    hosts = list(dict.fromkeys(it.place.host for it in (*gpus, *nics))) or [""]
    parts = [_node(host if len(hosts) > 1 else HOST, _of(gpus, host), _of(nics, host), name) for host in hosts]
    return Cluster("nccl_xml", tuple(node for node, _ in parts), tuple(link for _, links in parts for link in links))


def _check_version(root: Element, name: str) -> None:
    version = root.attributes.get("version", "1")
    if root.tag == "system" and version not in ("1", "2"):
        raise UserError(f"{name}:{root.line}: <system version={version!r}>; expected 1 (NCCL) or 2 (RCCL)")


def _of(found: list[Device], host: str) -> list[Device]:
    return [it for it in found if it.place.host == host]


def _node(host: str, gpus: list[Device], nets: list[Device], name: str) -> tuple[Node, list[Link]]:
    nics = _ports(nets, name)
    if len(gpus) + len(nics) > MOST_DEVICES:
        raise UserError(f"{name}:1: more than {MOST_DEVICES} GPUs and NICs in one node; not a real topology")
    gpus, gpu_ids = _numbered(gpus, "GPU")
    ports, nic_ids = _numbered([it[0] for it in nics], "NIC")
    _check_addresses(gpus, name)
    bonds = [bonds_of(it, name) for it in gpus]
    rates = {id(first.element): rate for first, rate in nics}
    node = Node(
        host,
        tuple(_gpu(*it) for it in zip(gpu_ids, gpus, bonds, strict=True)),
        tuple(_nic(label, it, rates[id(it.element)]) for label, it in zip(nic_ids, ports, strict=True)),
    )
    return node, _links(host, [*gpu_ids, *nic_ids], [*gpus, *ports], [*bonds, *[None] * len(ports)])


def _ports(nets: list[Device], name: str) -> list[tuple[Device, float | None]]:
    """Devices and the rate of all their ports: NCCL lists every port that is up as a <net>, in Mbit/s."""
    found: dict[object, tuple[Device, float | None]] = {}
    for net in nets:
        device = net.element.attributes.get("name")
        rate = number(net.element, "speed", name) / 1000 if net.element.tag == "net" else 0.0
        key = (device, net.place) if device else id(net)
        first, before = found.get(key, (net, None))
        found[key] = first, (before or 0.0) + rate or None
    return list(found.values())


def _numbered(found: list[Device], kind: str) -> tuple[list[Device], list[str]]:
    """By NCCL's index where every one has its own, else in the order of the file."""
    numbers = [it.number() for it in found]
    if None in numbers or len(set(numbers)) < len(numbers):
        return found, [f"{kind}{at}" for at in range(len(found))]
    ordered = sorted(found, key=lambda it: it.number() or 0)
    return ordered, [f"{kind}{it.number()}" for it in ordered]


def _check_addresses(gpus: list[Device], name: str) -> None:
    """Several GPUs may share one <pci> (partitions), but no address may stand at two places."""
    places: dict[str, Place] = {}
    for gpu in gpus:
        bridges = gpu.place.bridges
        if bridges and places.setdefault(bridges[-1], gpu.place) != gpu.place:
            raise UserError(f"{name}:{gpu.element.line}: a second GPU at {bridges[-1]}; expected one place for it")


def _gpu(label: str, gpu: Device, bonds: Bonds | None) -> Gpu:
    return Gpu(
        label,
        numa=gpu.place.numa,
        cpus=gpu.place.cpus,
        pci=gpu.place.bridges[-1] if gpu.place.bridges else None,
        nvlinks=bonds.total if bonds else None,
    )


def _nic(label: str, net: Device, rate: float | None) -> Nic:
    bridges = net.place.bridges
    device = net.element.attributes.get("name") if net.element.tag == "net" else None
    numa = net.place.numa if bridges else None
    return Nic(label, device or None, numa=numa, pci=bridges[-1] if bridges else None, gbit_s=rate)


def _links(host: str, ids: list[str], found: list[Device], bonds: Sequence[Bonds | None]) -> list[Link]:
    links = []
    for a, b in itertools.combinations(range(len(found)), 2):
        kind = bond_kind(found[a], found[b], (bonds[a], bonds[b])) or closeness(found[a].place, found[b].place)
        if kind is not None:
            links.append(Link(host, ids[a], ids[b], kind))
    return links
