"""GPUs of this machine: NVIDIA's by their management library (NVML), AMD's by the kernel driver (/sys/class/kfd).

Every call of NVML may be unsupported, and a GPU may be lost: what is not told is None. Without a driver there are none.
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


@dataclass(frozen=True)
class NvmlGpu:
    """What the library tells of one GPU; None is what it does not."""

    index: int
    name: str | None = None
    pci: str | None = None
    """0000:07:00.0"""
    nvlinks: int | None = None
    """Active ones; None if it has none to ask for."""
    ends: dict[str, int] = field(default_factory=dict)
    """Where its active NVLinks lead: `switch`, or the PCI address of another GPU -> how many."""
    clique: str | None = None
    """NVLink domain that spans nodes: <cluster uuid>.<clique id>."""


def load_nvml() -> Any | None:
    """The library's module, nvidia-ml-py's pynvml; None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def read_nvml_gpus(nvml: Any | None) -> tuple[NvmlGpu, ...]:
    """The GPUs that it lists, in its order, which is that of nvidia-smi; none without a driver.

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
            it
            for n in range(_call_nvml(nvml, nvml.nvmlDeviceGetCount) or 0)
            if (it := _read_nvml_gpu(nvml, n)) is not None
        )
    finally:
        _call_nvml(nvml, nvml.nvmlShutdown)


def _read_nvml_gpu(nvml: Any, index: int) -> NvmlGpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = _address(nvml.nvmlDeviceGetPciInfo(handle))
    except nvml.NVMLError as error:
        warnings.warn(f"NVML: GPU {index} does not answer: {error}", stacklevel=3)
        return None
    nvlinks, ends = _nvlinks(nvml, handle)
    name = _call_nvml(nvml, nvml.nvmlDeviceGetName, handle)
    return NvmlGpu(index, _decode_string(name), pci, nvlinks, ends, _clique(nvml, handle))


def _call_nvml(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Its answer; None where this GPU, driver or library has none."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _decode_string(value: Any) -> str | None:
    """Older versions of the module give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _address(info: Any) -> str | None:
    return normalise_pci_address(_decode_string(info.busId) or "")


def _nvlinks(nvml: Any, handle: Any) -> tuple[int | None, dict[str, int]]:
    links = range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS))
    states = {link: _call_nvml(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in links}
    if all(state is None for state in states.values()):
        return None, {}
    active = [link for link, state in states.items() if state == 1]
    ends = Counter(end for link in active if (end := _find_link_end(nvml, handle, link)) is not None)
    return len(active), dict(ends)


def _find_link_end(nvml: Any, handle: Any, link: int) -> str | None:
    """`switch`, a PCI address, or None for what is neither a switch nor a GPU."""
    kind = None
    if hasattr(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType"):
        kind = _call_nvml(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2):
        return NVLINK_SWITCH
    info = _call_nvml(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return _address(info) if info is not None else None


def _clique(nvml: Any, handle: Any) -> str | None:
    """Only where the fabric manager has finished, and has a cluster: before, id and uuid are 0 on every node."""
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfoV"):
        return None
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if _call_nvml(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.pointer(info)) is None:
        return None
    uuid = bytes(info.clusterUuid)
    done = info.state == getattr(nvml, "NVML_GPU_FABRIC_STATE_COMPLETED", 3) and info.status == 0
    return f"{_uuid(uuid)}.{info.cliqueId}" if done and any(uuid) else None


def _uuid(value: bytes) -> str:
    text = value.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


_XGMI = 11
"""HSA_IOLINK_TYPE_XGMI of the Linux kernel's kfd_crat.h; 2 is PCIe."""


@dataclass(frozen=True)
class AmdGpu:
    """One GPU, or a part of one that is a device of its own."""

    node: int
    """Its number in this topology, which counts processors too."""
    pci: str
    name: str | None
    peers: frozenset[int]
    """Nodes of the GPUs that it reaches over xGMI at one hop."""


def read_amd_gpus(root: Path = Path("/")) -> tuple[AmdGpu, ...]:
    """Nodes with compute units, in the driver's order; none without the driver."""
    found = [_read_amd_gpu(it) for it in list_entries(root / "sys/class/kfd/kfd/topology/nodes") if it.name.isdecimal()]
    known = {it.node for it in found if it is not None}
    return tuple(AmdGpu(it.node, it.pci, it.name, it.peers & known) for it in found if it is not None)


def _read_amd_gpu(node: Path) -> AmdGpu | None:
    facts = _read_properties(node / "properties")
    if not facts.get("simd_count") or "location_id" not in facts:
        return None
    bus, device = divmod(facts["location_id"] & 0xFFFF, 256)
    pci = f"{facts.get('domain', 0):04x}:{bus:02x}:{device >> 3:02x}.{device & 7}"
    links = [_read_properties(it / "properties") for it in list_entries(node / "io_links")]
    peers = {it.get("node_to", -1) for it in links if it.get("type") == _XGMI}
    return AmdGpu(int(node.name), pci, read_text(node / "name") or None, frozenset(peers))


def _read_properties(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {
        name: int(value) for name, value in re.findall(r"^(\w+) ([0-9]{1,20})$", read_text(path) or "", re.MULTILINE)
    }
