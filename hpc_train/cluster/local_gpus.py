"""Read the GPUs of this machine: NVIDIA's through NVML, AMD's from the kernel driver (/sys/class/kfd).

Every NVML call may be unsupported, and a GPU may be lost: such facts are None. Without a driver there are no GPUs.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_train.cluster.sysfs import list_entries, normalise_pci_address, read_text

NVLINK_SWITCH = "switch"
_MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS of today's NVML, for bindings that do not have it."""


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU as NVML describes it; facts that NVML does not give are None."""

    index: int
    name: str | None = None
    pci: str | None = None
    """PCI address, such as 0000:07:00.0."""
    nvlinks: int | None = None
    """Number of active NVLinks; None for a GPU without any."""
    ends: dict[str, int] = field(default_factory=dict)
    """Number of active NVLinks to each end: `switch`, or the PCI address of another GPU."""
    clique: str | None = None
    """NVLink domain, if it spans nodes: <cluster uuid>.<clique id>."""


def load_nvml() -> Any | None:
    """Import nvidia-ml-py's pynvml; None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_nvml_gpus(nvml: Any | None) -> tuple[NvmlGpu, ...]:
    """List the GPUs in NVML's order, which is nvidia-smi's; empty without a driver.

    nvml: a module with the functions of pynvml. Warns of a driver that another version of the library would need, and
    of GPUs that do not answer.
    """
    if nvml is None:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if getattr(error, "value", None) == getattr(nvml, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", 18):
            warnings.warn(f"NVML: {error} No GPU is seen; the driver was updated: reload it or reboot", stacklevel=2)
        return ()
    try:
        return tuple(
            gpu
            for n in range(_call_nvml(nvml, nvml.nvmlDeviceGetCount) or 0)
            if (gpu := _read_nvml_gpu(nvml, n)) is not None
        )
    finally:
        _call_nvml(nvml, nvml.nvmlShutdown)


def _read_nvml_gpu(nvml: Any, index: int) -> NvmlGpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = _get_pci_address(nvml.nvmlDeviceGetPciInfo(handle))
    except nvml.NVMLError as error:
        warnings.warn(f"NVML: GPU {index} does not answer: {error}", stacklevel=3)
        return None
    nvlinks, ends = _read_nvlinks(nvml, handle)
    name = _call_nvml(nvml, nvml.nvmlDeviceGetName, handle)
    return NvmlGpu(index, _decode_string(name), pci, nvlinks, ends, _read_clique(nvml, handle))


def _call_nvml(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an NVML function; None if this GPU, driver or library does not support it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _decode_string(value: Any) -> str | None:
    """Return a string as text: older versions of pynvml return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _get_pci_address(info: Any) -> str | None:
    return normalise_pci_address(_decode_string(info.busId) or "")


def _read_nvlinks(nvml: Any, handle: Any) -> tuple[int | None, dict[str, int]]:
    links = range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS))
    states = {link: _call_nvml(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in links}
    if all(state is None for state in states.values()):
        return None, {}
    active = [link for link, state in states.items() if state == 1]
    ends = Counter(end for link in active if (end := _find_link_end(nvml, handle, link)) is not None)
    return len(active), dict(ends)


def _find_link_end(nvml: Any, handle: Any, link: int) -> str | None:
    """Return `switch`, the PCI address of a GPU, or None for any other device at the end of an NVLink."""
    kind = None
    if hasattr(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType"):
        kind = _call_nvml(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    # The PCI address behind a switch is the switch, not a GPU.
    if kind == getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2):
        return NVLINK_SWITCH
    info = _call_nvml(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return _get_pci_address(info) if info is not None else None


def _read_clique(nvml: Any, handle: Any) -> str | None:
    """Return the NVLink domain, or None.

    Until the fabric manager has finished, id and uuid are 0 on every node, which must not look like one domain.
    """
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfoV"):
        return None
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if _call_nvml(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.pointer(info)) is None:
        return None
    uuid = bytes(info.clusterUuid)
    # Only a finished registration with a status of success has an id that means anything.
    done = info.state == getattr(nvml, "NVML_GPU_FABRIC_STATE_COMPLETED", 3) and info.status == 0
    return f"{_format_uuid(uuid)}.{info.cliqueId}" if done and any(uuid) else None


def _format_uuid(value: bytes) -> str:
    text = value.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


_XGMI = 11
"""HSA_IOLINK_TYPE_XGMI of the Linux kernel's kfd_crat.h; 2 is PCIe."""


@dataclass(frozen=True)
class AmdGpu:
    """One GPU, or a partition of a GPU that is a device of its own."""

    node: int
    """Number of the device in kfd's topology, which also counts processors."""
    pci: str
    name: str | None
    peers: frozenset[int]
    """Numbers of the GPUs that it reaches over xGMI in one hop."""


def read_amd_gpus(root: Path) -> tuple[AmdGpu, ...]:
    """List the GPUs in the driver's order; empty without the driver.

    kfd also lists processors, which have no compute units.
    """
    gpus = [
        _read_amd_gpu(gpu) for gpu in list_entries(root / "sys/class/kfd/kfd/topology/nodes") if gpu.name.isdecimal()
    ]
    gpu_nodes = {gpu.node for gpu in gpus if gpu is not None}
    # Links to processors are left out: peers are GPUs only.
    return tuple(AmdGpu(gpu.node, gpu.pci, gpu.name, gpu.peers & gpu_nodes) for gpu in gpus if gpu is not None)


def _read_amd_gpu(node: Path) -> AmdGpu | None:
    facts = _read_properties(node / "properties")
    # Processors have a node in this topology too, without SIMD units.
    if not facts.get("simd_count") or "location_id" not in facts:
        return None
    # location_id is the PCI bus in bits 8 to 15, the device in 3 to 7, the function in 0 to 2 (kfd_topology.c).
    bus, device = divmod(facts["location_id"] & 0xFFFF, 256)
    pci = f"{facts.get('domain', 0):04x}:{bus:02x}:{device >> 3:02x}.{device & 7}"
    links = [_read_properties(entry / "properties") for entry in list_entries(node / "io_links")]
    peers = {link.get("node_to", -1) for link in links if link.get("type") == _XGMI}
    return AmdGpu(int(node.name), pci, read_text(node / "name") or None, frozenset(peers))


def _read_properties(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    return {
        name: int(value) for name, value in re.findall(r"^(\w+) ([0-9]{1,20})$", read_text(path) or "", re.MULTILINE)
    }
