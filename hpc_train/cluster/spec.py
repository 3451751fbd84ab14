"""Cluster: the result of every topology reader. Facts that a source does not give are empty or None."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

UNNAMED_HOST = "localhost"
"""Name of the node of a source that describes one machine without naming it, such as `nvidia-smi topo -m`."""


@dataclass(frozen=True)
class Gpu:
    """One accelerator of a node."""

    id: str
    """GPU0, GPU1, ... in the source's own order."""
    numa: int | str | None = None
    """NUMA node of its host memory; the source's own list, such as 0,3-9, where there are several."""
    cpus: str | None = None
    """Processors next to it, as Linux writes a list: 0-31,64-95."""
    name: str | None = None
    pci: str | None = None
    """PCI address in full, lower case: 0000:07:00.0."""
    nvlinks: int | None = None
    """Active NVLinks (AMD: xGMI links)."""
    clique: str | None = None
    """NVLink domain that spans nodes: <cluster uuid>.<clique id>; GPUs of one clique reach each other over NVLink."""


@dataclass(frozen=True)
class Nic:
    """One network device of a node."""

    id: str
    """NIC0, NIC1, ... in the source's own order."""
    device: str | None = None
    """Name of the device on its host: mlx5_0, hsn0, rdmap16s27."""
    numa: int | None = None
    pci: str | None = None
    guid: str | None = None
    """Node GUID, 16 hexadecimal digits, lower case; what identifies it in a fabric's own listing."""
    active: bool | None = None
    """Whether a port is up."""
    gbit_s: float | None = None
    """Line rate of all its ports that are up, one direction, 10^9 bit/s."""
    layer: str | None = None
    """infiniband, ethernet, slingshot or efa."""
    switches: tuple[str, ...] | None = None
    """Names of the switches that its ports hang on, where the source tells."""


@dataclass(frozen=True)
class Node:
    """One host."""

    name: str
    """Name of the host in the source; `localhost` if it has none."""
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()


@dataclass(frozen=True)
class Link:
    """The connection between two devices of a node; one entry a pair, `a` before `b` in the source's order."""

    node: str
    a: str
    """Id of a GPU or a NIC."""
    b: str
    kind: str
    """NV<count>, PIX, PXB, PHB, NODE, SYS, XGMI, C2C, ...: the worst hop between the two."""


@dataclass(frozen=True)
class Trunk:
    """The cables between a switch and one other switch that is not below it."""

    switch: str
    """The other switch: one level up, or on the same level if switches are joined directly."""
    cables: int
    gbit_s: float | None = None
    """Total line rate of these cables, one direction, 10^9 bit/s; None if the source does not give it."""


@dataclass(frozen=True)
class Switch:
    """A switch, block, ring or other unit of a fabric, with the nodes and switches directly attached to it."""

    name: str
    level: int
    """0 where only nodes hang on it; else one more than the highest below it."""
    nodes: tuple[str, ...] = ()
    """Nodes that hang on it directly, in the source's order."""
    switches: tuple[str, ...] = ()
    """Switches below it."""
    uplinks: tuple[Trunk, ...] = ()
    """Cables to switches that are not below this one, if the source lists cables."""
    link_speed: int | None = None
    """Slurm's LinkSpeed=, a number without a unit; None if not given, or if it is Slurm's default of 1."""


@dataclass(frozen=True)
class Cluster:
    """A machine as one source describes it."""

    kind: str
    """The source: nvidia_smi, rocm_smi, nccl_xml, sysfs, slurm_tree, slurm_block, ibnetdiscover, ..."""
    nodes: tuple[Node, ...] = ()
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()
    notes: tuple[str, ...] = ()
    """Parts of the source that this tree leaves out, one line each."""


LINK_LAYERS = {"infiniband": "infiniband", "ib": "infiniband", "ethernet": "ethernet"}
"""Link layers of RDMA ports, in lower case as sysfs, ibstat and ibstatus name them."""
PORT_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(?: Gb/sec)?(?: \([^()]*\))?")
"""Line rate of an RDMA port: `100` or `100 (FDR10)` of ibstat, `100 Gb/sec (4X EDR)` of sysfs and ibstatus."""


def parse_port_rate(text: str | None) -> float | None:
    """Parse the line rate of an RDMA port in Gbit/s: 100 for `100 Gb/sec (4X EDR)`; None for other text."""
    match = PORT_RATE.fullmatch(text or "")
    return float(match[1]) if match else None


def sum_rates(rates: Iterable[float | None]) -> float | None:
    """Add up line rates. Returns None if there are none, or any is unknown: a sum of the others would be too low."""
    listed = list(rates)
    return sum(rate for rate in listed if rate is not None) if listed and None not in listed else None


def cluster_to_json(cluster: Cluster) -> dict[str, Any]:
    """Convert a cluster to the JSON of `topology read`. Devices have their optional facts only where known."""
    return {
        "kind": cluster.kind,
        "nodes": [
            {
                "name": node.name,
                "gpus": [
                    {"id": gpu.id, "numa": gpu.numa, "cpus": gpu.cpus, **_list_known_facts(gpu, _GPU)}
                    for gpu in node.gpus
                ],
                "nics": [{"id": nic.id, "device": nic.device, **_list_known_facts(nic, _NIC)} for nic in node.nics],
            }
            for node in cluster.nodes
        ],
        "links": [{"node": link.node, "a": link.a, "b": link.b, "kind": link.kind} for link in cluster.links],
        "switches": [
            {
                "name": switch.name,
                "level": switch.level,
                "nodes": list(switch.nodes),
                "switches": list(switch.switches),
                **_uplinks_to_json(switch),
            }
            for switch in cluster.switches
        ],
        **({"notes": list(cluster.notes)} if cluster.notes else {}),
    }


def _uplinks_to_json(switch: Switch) -> dict[str, Any]:
    """Describe the known uplinks of a switch."""
    capacity: dict[str, Any] = {}
    if switch.uplinks:
        capacity["uplinks"] = [
            {"switch": trunk.switch, "cables": trunk.cables, "gbit_s": trunk.gbit_s} for trunk in switch.uplinks
        ]
    if switch.link_speed is not None:
        capacity["link_speed"] = switch.link_speed
    return capacity


_GPU = ("name", "pci", "nvlinks", "clique")
_NIC = ("numa", "pci", "guid", "active", "gbit_s", "layer", "switches")


def _list_known_facts(device: Gpu | Nic, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(device, name)) is not None}
