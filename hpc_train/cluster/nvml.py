"""The GPUs of this machine by NVIDIA's management library. Every call may be unsupported, and a GPU may be lost."""

from __future__ import annotations

import ctypes
import importlib
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpc_train.cluster.pci import full_address

SWITCH = "switch"
_MOST_LINKS = 36


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


def nvml_gpus(nvml: Any | None) -> tuple[NvmlGpu, ...]:
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
        return tuple(it for n in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0) if (it := _gpu(nvml, n)) is not None)
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def _gpu(nvml: Any, index: int) -> NvmlGpu | None:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        pci = _address(nvml.nvmlDeviceGetPciInfo(handle))
    except nvml.NVMLError as error:
        warnings.warn(f"NVML: GPU {index} does not answer: {error}", stacklevel=3)
        return None
    nvlinks, ends = _nvlinks(nvml, handle)
    name = _ask(nvml, nvml.nvmlDeviceGetName, handle)
    return NvmlGpu(index, _string(name), pci, nvlinks, ends, _clique(nvml, handle))


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Its answer; None where this GPU, driver or library has none."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


def _string(value: Any) -> str | None:
    """Older versions of the module give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _address(info: Any) -> str | None:
    return full_address(_string(info.busId) or "")


def _nvlinks(nvml: Any, handle: Any) -> tuple[int | None, dict[str, int]]:
    links = range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MOST_LINKS))
    states = {link: _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link) for link in links}
    if all(state is None for state in states.values()):
        return None, {}
    active = [link for link, state in states.items() if state == 1]
    ends = Counter(end for link in active if (end := _end(nvml, handle, link)) is not None)
    return len(active), dict(ends)


def _end(nvml: Any, handle: Any, link: int) -> str | None:
    """`switch`, a PCI address, or None for what is neither a switch nor a GPU."""
    kind = None
    if hasattr(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType"):
        kind = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind == getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2):
        return SWITCH
    info = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return _address(info) if info is not None else None


def _clique(nvml: Any, handle: Any) -> str | None:
    """Only where the fabric manager has finished, and has a cluster: before, id and uuid are 0 on every node."""
    if not hasattr(nvml, "nvmlDeviceGetGpuFabricInfoV"):
        return None
    info = nvml.c_nvmlGpuFabricInfoV_t()
    if _ask(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.pointer(info)) is None:
        return None
    uuid = bytes(info.clusterUuid)
    done = info.state == getattr(nvml, "NVML_GPU_FABRIC_STATE_COMPLETED", 3) and info.status == 0
    return f"{_uuid(uuid)}.{info.cliqueId}" if done and any(uuid) else None


def _uuid(value: bytes) -> str:
    text = value.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
