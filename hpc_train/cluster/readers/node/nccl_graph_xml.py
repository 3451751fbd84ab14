"""Read the graph that NCCL chose (NCCL_GRAPH_DUMP_FILE): the GPUs and NICs of one node, in the order of its channels.

A channel lists GPUs in the order in which data passes them, between the NICs by which it enters and leaves the node.
Elements and attributes are those of NCCL, src/graph/search.cc (ncclTopoGetXmlFromGraph).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_train.cluster.readers.xml_elements import XmlElement, parse_xml, read_root_tag
from hpc_train.cluster.spec import UNNAMED_HOST, Cluster, Gpu, Link, Nic, Node
from hpc_train.errors import UserError

MAX_DEVICE_NUMBER = 511
MAX_CHANNELS = 1024
"""Channels of a graph; NCCL has at most 64."""
_DEVICE = re.compile(r"\d{1,18}|0x[0-9a-fA-F]{1,16}")
_PATTERNS = {"1": "tree", "2": "tree", "3": "tree", "4": "ring", "5": "NVLink SHARP", "6": "CollNet"}
"""Names of NCCL_TOPO_PATTERN_*, src/include/graph.h."""
_NEAR_TO_FAR = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "NODE", "SYS", "NET", "DIS")
"""Types of NCCL's paths from near to far, src/graph/topo.h."""


@dataclass(frozen=True)
class NcclChannel:
    """One channel of a graph."""

    devices: tuple[str, ...]
    """Ids of its NICs and GPUs in order."""
    inside: str
    """Type of the worst path between its GPUs."""
    outside: str
    """Type of the worst path between a GPU and a NIC."""


def matches_nccl_graph(text: str) -> bool:
    """Whether the text is XML whose root element is NCCL's <graphs>."""
    return text.lstrip("\ufeff \t\r\n")[:1] == "<" and read_root_tag(text) == "graphs"


def read_nccl_graph(text: str, name: str) -> Cluster:
    """Read the node. Links are those that channels use; each has the worst path type that its graph allows.

    GPUs and NICs are named by NCCL's own index. Raises UserError for a file that is cut, and for one without channels.
    """
    root = parse_xml(text, name)
    if root.tag != "graphs":
        raise UserError(f"{name}:{root.line}: <{root.tag}>; expected NCCL's <graphs version=...>")
    graphs = [(graph, list(_read_channels(graph, name))) for graph in root.list_children("graph")]
    channels = [channel for _, of_graph in graphs for channel in of_graph]
    devices = sorted({device for channel in channels for device in channel.devices}, key=_sort_key)
    gpus = [device for device in devices if device.startswith("GPU")]
    if not gpus:
        raise UserError(f"{name}:{root.line}: no channel with a GPU; expected the file of NCCL_GRAPH_DUMP_FILE")
    nics = [device for device in devices if not device.startswith("GPU")]
    node = Node(UNNAMED_HOST, tuple(Gpu(gpu) for gpu in gpus), tuple(Nic(nic, None) for nic in nics))
    notes = (
        "links are the pairs that NCCL's channels use, with the worst path that it allowed there; those of other pairs "
        "are not in a graph (NCCL_TOPO_DUMP_FILE has them)",
        *(_describe_graph(graph, of_graph) for graph, of_graph in graphs if of_graph),
    )
    return Cluster("nccl_graph", (node,), tuple(_list_links(channels, devices)), notes=notes)


def _read_channels(graph: XmlElement, name: str) -> Iterator[NcclChannel]:
    channels = graph.list_children("channel")
    if len(channels) > MAX_CHANNELS:
        raise UserError(f"{name}:{graph.line}: {len(channels)} channels; expected at most {MAX_CHANNELS}")
    stated = graph.attributes.get("nchannels", str(len(channels)))
    if channels and stated != str(len(channels)):
        raise UserError(f"{name}:{graph.line}: {len(channels)} channels where nchannels={stated[:20]!r}")
    inside, outside = (_read_type(graph, attribute, name) for attribute in ("typeintra", "typeinter"))
    for channel in channels:
        devices = tuple(
            _read_device(element, name) for element in channel.children if element.tag.lower() in ("gpu", "net")
        )
        yield NcclChannel(devices, inside, outside)


def _read_type(graph: XmlElement, attribute: str, name: str) -> str:
    value = graph.attributes.get(attribute, "")
    if value not in _NEAR_TO_FAR:
        expected = ", ".join(_NEAR_TO_FAR)
        raise UserError(f"{name}:{graph.line}: {attribute}={value[:20]!r} of <graph>; expected one of {expected}")
    return value


def _read_device(element: XmlElement, name: str) -> str:
    value = element.attributes.get("dev", "")
    # Newer versions put the node's number in the upper bits of a NIC's index.
    number = int(value, 0 if value.startswith("0x") else 10) & ((1 << 56) - 1) if _DEVICE.fullmatch(value) else -1
    if not 0 <= number <= MAX_DEVICE_NUMBER:
        raise UserError(
            f"{name}:{element.line}: dev={value[:20]!r} of <{element.tag}>; expected 0 to {MAX_DEVICE_NUMBER}"
        )
    return f"{'GPU' if element.tag.lower() == 'gpu' else 'NIC'}{number}"


def _sort_key(device: str) -> tuple[bool, int]:
    return device.startswith("NIC"), int(device[3:])


def _list_links(channels: list[NcclChannel], order: list[str]) -> Iterator[Link]:
    """Yield each pair that is next to one another in a channel, with the nearest type that a graph gives for it."""
    place = {device: index for index, device in enumerate(order)}
    kinds: dict[tuple[str, str], str] = {}
    for channel in channels:
        for pair in itertools.pairwise(channel.devices):
            a, b = sorted(pair, key=place.__getitem__)
            both_gpus = b.startswith("GPU")
            if a == b or a.startswith("NIC"):
                continue
            kind = channel.inside if both_gpus else channel.outside
            kinds[a, b] = min(kinds.get((a, b), kind), kind, key=_NEAR_TO_FAR.index)
    for a, b in sorted(kinds, key=lambda pair: (place[pair[0]], place[pair[1]])):
        yield Link(UNNAMED_HOST, a, b, kinds[a, b])


def _describe_graph(graph: XmlElement, channels: list[NcclChannel]) -> str:
    pattern = _PATTERNS.get(graph.attributes.get("pattern", ""), "graph")
    plural = "s" if len(channels) > 1 else ""
    shown = " ".join(channels[0].devices[:20]) + (" ..." if len(channels[0].devices) > 20 else "")
    return f"NCCL's {pattern}: {len(channels)} channel{plural}; the first is {shown}"
