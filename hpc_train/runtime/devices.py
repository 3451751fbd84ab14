"""This process's GPU, and what is next to it, as torch, NVML and sysfs tell."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hpc_train.cluster.machine import this_node
from hpc_train.cluster.spec import Cluster
from hpc_train.placement.binding import parse_cpus
from hpc_train.placement.nics import DOWN, assign

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """What one process finds out for all of its node."""

    cliques: dict[str, str] = field(default_factory=dict)
    """PCI address of a GPU -> NVLink domain that spans nodes."""
    nics: list[str] = field(default_factory=list)
    """Devices fit for GPU traffic."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Other devices that are up -> why they are not fit."""
    nic_of: dict[str, str] = field(default_factory=dict)
    """PCI address of a GPU -> the device that serves it."""


def pci_address(device: torch.device) -> str | None:
    """PCI address in full, lower case (0000:07:00.0), of a GPU of torch's; None for the CPU."""
    if device.type != "cuda":
        return None
    its: Any = torch.cuda.get_device_properties(device)
    bus = getattr(its, "pci_bus_id", None)
    return None if bus is None else f"{its.pci_domain_id:04x}:{bus:02x}:{its.pci_device_id:02x}.0"


def near_gpu(pci: str, root: Path = Path("/")) -> frozenset[int]:
    """Processors next to a PCI device; empty where the machine does not tell."""
    try:
        return parse_cpus((root / "sys/bus/pci/devices" / pci / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def survey(read: Callable[[], Cluster] = this_node) -> Survey:
    """The GPUs and NICs of this node. What cannot be read is left out, with a warning: it must not stop a job."""
    try:
        cluster = read()
        node = cluster.nodes[0]
        found = assign(node, cluster.links)
    except Exception as error:
        log.warning("the GPUs and NICs of this node could not be read", exc_info=error)
        return Survey()
    devices = {nic.id: nic.device or nic.id for nic in node.nics}
    pci = {gpu.id: gpu.pci or gpu.id for gpu in node.gpus}
    return Survey(
        cliques={pci[gpu.id]: gpu.clique for gpu in node.gpus if gpu.clique is not None},
        nics=[devices[nic.id] for nic in node.nics if nic.id not in found.dropped],
        dropped={devices[nic]: why for nic, why in found.dropped.items() if why != DOWN},
        nic_of={pci[gpu]: devices[nic] for gpu, nic in found.nic_of.items()},
    )
