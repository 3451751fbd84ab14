"""A module with the functions of pynvml that are used, for invented GPUs; its structures are pynvml's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass
class FakeGpu:
    """One GPU. A field that is None is not supported by it."""

    pci: str
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    links: Sequence[str | None] = ()
    """Far end of each NVLink: switch, a PCI address, or None for one that is down."""
    fabric: tuple[bytes, int, int, int] | None = None
    """Cluster uuid, clique, state, status."""
    lost: bool = False


class FakeNvml:
    """The functions. They raise pynvml's own errors, because callers catch these."""

    NVMLError = pynvml.NVMLError
    c_nvmlGpuFabricInfoV_t = pynvml.c_nvmlGpuFabricInfoV_t
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, gpus: Sequence[FakeGpu] = (), init_error: int | None = None) -> None:
        self.gpus = list(gpus)
        self.init_error = init_error
        self.open = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str | bytes:
        return gpu.name

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.busId = f"0000{gpu.pci.upper()}".encode()
        return info

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if link >= len(gpu.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(gpu.links[link] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: FakeGpu, link: int) -> int:
        return (
            pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if gpu.links[link] == "switch" else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        )

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: FakeGpu, link: int) -> Any:
        return self.nvmlDeviceGetPciInfo(FakeGpu(gpu.links[link] or ""))

    def nvmlDeviceGetGpuFabricInfoV(self, gpu: FakeGpu, pointer: Any) -> int:
        if gpu.fabric is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        info = pointer.contents
        uuid, info.cliqueId, info.state, info.status = gpu.fabric
        info.clusterUuid[:] = uuid
        return 0
