"""This machine as one node: its GPUs, its NICs, and how each reaches each."""

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
    """Where a device sits."""

    id: str
    path: PciPath
    numa: int | None


def describe_this_node(root: str | Path = "/", nvml: Any | None = None) -> Cluster:
    """One node of kind `machine`; without GPUs where no driver answers, and with whatever sysfs shows.

    root: of another tree than this machine's own /sys and /proc, for which the GPUs of this machine are not asked.
    nvml: a module with the functions of pynvml; by default pynvml itself, if installed.
    """
    root = Path(root)
    if nvml is None and root == Path("/"):
        nvml = load_nvml()
    numa = read_numa_nodes(root)
    nvidia, radeon = read_nvml_gpus(nvml), local_gpus.read_amd_gpus(root)
    gpus = [_nvidia_gpu(n, it, numa, root) for n, it in enumerate(nvidia)]
    gpus += [_amd_gpu(n, it, numa, root) for n, it in enumerate(radeon, len(gpus))]
    nics = read_local_nics(root)
    places = [_Place(it.id, find_pci_path_of_address(it.pci, root) if it.pci else (), _whole(it.numa)) for it in gpus]
    places += [_Place(it.nic.id, it.path, it.nic.numa) for it in nics]
    direct = _nvlinks(nvidia) | _xgmi(radeon, len(nvidia))
    name = read_host_name(root)
    links = [
        Link(name, a.id, b.id, direct.get((a.id, b.id)) or _closeness(a, b, numa))
        for a, b in combinations(places, 2)
        if (a.path and b.path) or (a.id, b.id) in direct
    ]
    return Cluster("machine", (Node(name, tuple(gpus), tuple(it.nic for it in nics)),), tuple(links))


def _nvidia_gpu(position: int, gpu: NvmlGpu, numa: tuple[NumaNode, ...], root: Path) -> Gpu:
    node = find_numa_of_address(gpu.pci, root) if gpu.pci else None
    return Gpu(f"GPU{position}", node, _cpus(node, numa), gpu.name, gpu.pci, gpu.nvlinks, gpu.clique)


def _amd_gpu(position: int, gpu: local_gpus.AmdGpu, numa: tuple[NumaNode, ...], root: Path) -> Gpu:
    node = find_numa_of_address(gpu.pci, root)
    return Gpu(f"GPU{position}", node, _cpus(node, numa), gpu.name, gpu.pci, len(gpu.peers))


def _cpus(node: int | None, numa: tuple[NumaNode, ...]) -> str | None:
    return next((it.cpus or None for it in numa if it.id == node), None)


def _whole(numa: int | str | None) -> int | None:
    return numa if isinstance(numa, int) else None


def _closeness(a: _Place, b: _Place, numa: tuple[NumaNode, ...]) -> str:
    """On a machine of one NUMA node everything is on it, though firmware may say -1."""
    only = numa[0].id if len(numa) == 1 else None
    own = [only if it.numa is None else it.numa for it in (a, b)]
    return classify_pci_distance(a.path, b.path, *own)


def _nvlinks(gpus: tuple[NvmlGpu, ...]) -> dict[tuple[str, str], str]:
    """NV<links between the two>; through NVSwitches as many as the one with fewer has."""
    found = {}
    for (n, a), (m, b) in combinations(enumerate(gpus), 2):
        straight = a.ends.get(b.pci or "", 0)
        count = straight or min(a.ends.get(NVLINK_SWITCH, 0), b.ends.get(NVLINK_SWITCH, 0))
        if count:
            found[f"GPU{n}", f"GPU{m}"] = f"NV{count}"
    return found


def _xgmi(gpus: tuple[local_gpus.AmdGpu, ...], first: int) -> dict[tuple[str, str], str]:
    return {
        (f"GPU{n}", f"GPU{m}"): "XGMI"
        for (n, a), (m, b) in combinations(enumerate(gpus, first), 2)
        if b.node in a.peers or a.node in b.peers
    }
