"""Describe this machine as a cluster of one node: its GPUs, its NICs, and the link between any two of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from hpc_train.cluster import local_gpus
from hpc_train.cluster.local_gpus import NVLINK_SWITCH, NvmlGpu, load_nvml, read_nvml_gpus
from hpc_train.cluster.local_nics import read_local_nics
from hpc_train.cluster.spec import Cluster, Gpu, Link, Node
from hpc_train.cluster.sysfs import (
    NumaNode,
    PciPath,
    classify_pci_distance,
    find_numa_of_address,
    find_pci_path_of_address,
    read_host_name,
    read_numa_nodes,
)


@dataclass(frozen=True)
class _Place:
    """Place of a device on the PCI bus."""

    id: str
    path: PciPath
    numa: int | None


def describe_this_node(root: str | Path = "/", nvml: Any | None = None) -> Cluster:
    """Describe this machine as one node of kind `machine`. GPUs need a driver that answers; the rest comes from sysfs.

    root: of another tree than this machine's own /sys and /proc, for which the GPUs of this machine are not asked.
    nvml: a module with the functions of pynvml; by default pynvml itself, if installed.
    """
    root = Path(root)
    if nvml is None and root == Path("/"):
        nvml = load_nvml()
    numa = read_numa_nodes(root)
    nvidia, radeon = read_nvml_gpus(nvml), local_gpus.read_amd_gpus(root)
    gpus = [_make_nvidia_gpu(n, device, numa, root) for n, device in enumerate(nvidia)]
    gpus += [_make_amd_gpu(n, device, numa, root) for n, device in enumerate(radeon, len(gpus))]
    nics = read_local_nics(root)
    places = [
        _Place(device.id, find_pci_path_of_address(device.pci, root) if device.pci else (), _get_number(device.numa))
        for device in gpus
    ]
    places += [_Place(device.nic.id, device.path, device.nic.numa) for device in nics]
    direct = _list_nvlinks(nvidia) | _list_xgmi(radeon, len(nvidia))
    name = read_host_name(root)
    links = [
        Link(name, a.id, b.id, direct.get((a.id, b.id)) or _classify_distance(a, b, numa))
        for a, b in combinations(places, 2)
        if (a.path and b.path) or (a.id, b.id) in direct
    ]
    return Cluster("machine", (Node(name, tuple(gpus), tuple(device.nic for device in nics)),), tuple(links))


def _make_nvidia_gpu(position: int, gpu: NvmlGpu, numa: tuple[NumaNode, ...], root: Path) -> Gpu:
    node = find_numa_of_address(gpu.pci, root) if gpu.pci else None
    return Gpu(
        id=f"GPU{position}",
        numa=node,
        cpus=_find_cpus(node, numa),
        name=gpu.name,
        pci=gpu.pci,
        nvlinks=gpu.nvlinks,
        clique=gpu.clique,
    )


def _make_amd_gpu(position: int, gpu: local_gpus.AmdGpu, numa: tuple[NumaNode, ...], root: Path) -> Gpu:
    node = find_numa_of_address(gpu.pci, root)
    return Gpu(f"GPU{position}", node, _find_cpus(node, numa), gpu.name, gpu.pci, len(gpu.peers))


def _find_cpus(node: int | None, numa: tuple[NumaNode, ...]) -> str | None:
    return next((numa_node.cpus or None for numa_node in numa if numa_node.id == node), None)


def _get_number(numa: int | str | None) -> int | None:
    return numa if isinstance(numa, int) else None


def _classify_distance(a: _Place, b: _Place, numa: tuple[NumaNode, ...]) -> str:
    """Classify the way between two devices.

    With one NUMA node every device is on it, whatever the firmware says (often -1).
    """
    only = numa[0].id if len(numa) == 1 else None
    domains = [only if place.numa is None else place.numa for place in (a, b)]
    return classify_pci_distance(a.path, b.path, *domains)


def _list_nvlinks(gpus: tuple[NvmlGpu, ...]) -> dict[tuple[str, str], str]:
    """Name the NVLinks between GPUs: NV<count>; through NVSwitches the count of the GPU with fewer links."""
    kinds = {}
    for (n, a), (m, b) in combinations(enumerate(gpus), 2):
        straight = a.ends.get(b.pci or "", 0)
        count = straight or min(a.ends.get(NVLINK_SWITCH, 0), b.ends.get(NVLINK_SWITCH, 0))
        if count:
            kinds[f"GPU{n}", f"GPU{m}"] = f"NV{count}"
    return kinds


def _list_xgmi(gpus: tuple[local_gpus.AmdGpu, ...], first: int) -> dict[tuple[str, str], str]:
    return {
        (f"GPU{n}", f"GPU{m}"): "XGMI"
        for (n, a), (m, b) in combinations(enumerate(gpus, first), 2)
        if b.node in a.peers or a.node in b.peers
    }
