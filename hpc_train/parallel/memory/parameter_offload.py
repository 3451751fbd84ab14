"""Offload sharded parameters and optimizer state to CPU memory or to files, independently of each other.

parallel.offload.parameters: fully_shard keeps the shards in CPU memory, pinned if a GPU copies from it.
parallel.offload.optimizer: state and update of the optimizer are on the CPU, one part of the parameters at a time.
`file` for either: tensors are memory-mapped files on the node's disk (ZeRO-Infinity: Rajbhandari et al. 2021,
arXiv:2104.07857), whose pages the kernel reads when they are used.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor

from hpc_train._torch.dtensor import set_local
from hpc_train._torch.fully_shard import move_shards
from hpc_train.cluster.filesystems import MOUNT_TABLE, find_mount
from hpc_train.config.run import RunConfig
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.parallel.memory.copy_stream import CopyStream, HostMemory, HostPlace, Mark
from hpc_train.parallel.optimizer_step import OptimizerFactory, get_local

log = logging.getLogger(__name__)


_ALIGNMENT = 64
"""Tensors begin at multiples of this many bytes, as torch's own on the CPU do."""
_MIN_FILE_BYTES, _MAX_FILE_BYTES = 2**20, 2**30
"""Bounds of the size of a file, unless one tensor needs more; each file is as large as all before it together."""


@dataclass(frozen=True)
class _Place:
    """The memory of one tensor in a mapped file."""

    mapped: mmap.mmap
    offset: int
    size: int


class FileMemory:
    """Allocates tensors in memory-mapped files; the kernel reads pages when they are used and can reclaim all others.

    The files have no name, so that they vanish with the process, however it ends.
    """

    def __init__(self, folder: str | None) -> None:
        """folder: on a disk of the node; None: the temporary directory. Raises UserError if it does not exist."""
        self.folder = Path(folder or tempfile.gettempdir())
        self._places: dict[int, _Place] = {}
        """Places by the address of the tensor's storage."""
        self._mapped: mmap.mmap | None = None
        self._used = self._total = 0
        if not self.folder.is_dir():
            raise UserError(f"parallel.offload.dir={self.folder}: no such folder on this node")
        if is_memory_file_system(self.folder):
            log.warning("parallel.offload.dir=%s: is in memory itself, so offloading to it saves nothing", self.folder)

    def copy_to_file(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a CPU tensor in a file. Raises UserError if the disk is full."""
        if tensor.numel() == 0:
            return tensor.contiguous()
        place = self._allocate(tensor.nbytes)
        copy = torch.frombuffer(place.mapped, dtype=tensor.dtype, count=tensor.numel(), offset=place.offset)
        self._places[copy.data_ptr()] = place
        copy.copy_(tensor.flatten())
        self.release_pages(copy)
        return copy.view(tensor.shape)

    def contains(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in one of these files."""
        return tensor.untyped_storage().data_ptr() in self._places

    def release_pages(self, tensor: Tensor) -> None:
        """Release the pages of a tensor in a file; they are read again when used. Does nothing for other tensors."""
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is not None:
            begin = place.offset - place.offset % mmap.PAGESIZE
            place.mapped.madvise(mmap.MADV_DONTNEED, begin, place.offset + place.size - begin)

    def _allocate(self, size: int) -> _Place:
        if self._mapped is None or self._used + size > len(self._mapped):
            self._mapped = self._map(max(size, min(self._total, _MAX_FILE_BYTES), _MIN_FILE_BYTES))
            self._used, self._total = 0, self._total + len(self._mapped)
        place = _Place(self._mapped, self._used, size)
        self._used += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        return place

    def _map(self, size: int) -> mmap.mmap:
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="hpc_train-offload-") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, not by SIGBUS in a step
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise UserError(
                f"parallel.offload.dir={self.folder}: {reason}, for {size / 2**20:.3g} MiB more; give a folder on a "
                "disk that has room, or leave it out"
            ) from error


def is_memory_file_system(folder: Path, mounts: Path = MOUNT_TABLE) -> bool:
    """Return whether a folder is on a file system in memory. mounts: see cluster.filesystems.find_mount."""
    mount = find_mount(folder, mounts)
    return mount is not None and mount.kind in ("tmpfs", "ramfs")


PART_MIB = 64.0
"""MiB of parameters that are updated together; bounds the memory in use, unless one parameter is larger."""


@dataclass
class _PartOnHost:
    """Gradients of a part of the parameters on their way to where the optimizer is."""

    gradients: dict[nn.Parameter, Tensor]
    """As the optimizer takes them, by the parameter of the model; without those that have none."""
    places: list[HostPlace]
    """Their memory, where it is to be given back."""
    sources: list[Tensor]
    """Tensors that are copied. They must stay alive until then."""
    copied: Mark


class OffloadedOptimizer(torch.optim.Optimizer):
    """Runs the optimizer `inner`, with the same results to the bit, on device `place`, one part after the other.

    A parameter on another device has a copy on `place`, which `inner` updates. The state is on `place`, perhaps in
    files. Gradients are freed as they are used.

    From a GPU, parameters and gradients come by copies on a stream of their own into page-locked memory that is kept.
    While one part is updated the next one comes, and the one before goes back. The host waits once for each part.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        place: torch.device,
        files: FileMemory | None,
        state_in_files: bool,
        part_mib: float = PART_MIB,
    ) -> None:
        """inner: over sharded parameters, before its first step. files: of parameters or state, if any are in files."""
        parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        device = get_local(parameters[0]).device
        self._stream, self._memory = CopyStream(device), HostMemory(device)
        self._copies = {p: p if get_local(p).device == place else self._copy_parameter(p, place) for p in parameters}
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        for group in inner.param_groups:
            group["params"] = [self._copies[parameter] for parameter in group["params"]]
        self._inner, self._place, self._files, self._state_in_files = inner, place, files, state_in_files
        self._parts = _split_parameters(parameters, part_mib * 2**20)
        self.state = defaultdict(dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, and free the gradients."""
        assert closure is None
        for outer, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({name: value for name, value in outer.items() if name != "params"})
        gradients = {parameter: parameter.grad for parameter in self._copies}
        for parameter in self._copies:
            parameter.grad = None
        next_on_host = self._fetch(self._parts[0], gradients)
        for part, next_part in zip(self._parts, [*self._parts[1:], []], strict=True):
            on_host, next_on_host = next_on_host, self._fetch(next_part, gradients)
            self._update(part, on_host)
        self._stream.wait(self._stream.mark())  # the next forward needs all parameters

    def _fetch(self, part: list[nn.Parameter], gradients: dict[nn.Parameter, Tensor | None]) -> _PartOnHost:
        """Queue the copies of parameters and gradients of a part, whose gradients are taken out of `gradients`."""
        fetched, places, sources = dict[nn.Parameter, Tensor](), list[HostPlace](), list[Tensor]()
        with self._stream.queue():
            for parameter in part:
                copy, gradient = self._copies[parameter], gradients.pop(parameter)
                if copy is not parameter:
                    get_local(copy).copy_(get_local(parameter), non_blocking=True)
                if gradient is not None and copy is not parameter:
                    sources.append(get_local(gradient))
                    places.append(self._memory.take(sources[-1]))
                    places[-1].tensor.copy_(sources[-1], non_blocking=True)
                    fetched[parameter] = _put_into(copy, places[-1].tensor)
                elif gradient is not None:
                    fetched[parameter] = gradient.to(self._place)
        return _PartOnHost(fetched, places, sources, self._stream.mark())

    def _copy_parameter(self, parameter: nn.Parameter, place: torch.device) -> nn.Parameter:
        """Copy a parameter, for good, into memory that copies to and from its device are fast with."""
        copy = parameter.detach().to(place)
        local = get_local(copy)
        memory = self._memory.take(local).tensor.copy_(local)
        return nn.Parameter(_put_into(copy, memory), requires_grad=parameter.requires_grad)

    def _update(self, part: list[nn.Parameter], on_host: _PartOnHost) -> None:
        self._stream.wait_on_host(on_host.copied)
        on_host.sources.clear()
        for parameter in part:
            self._copies[parameter].grad = on_host.gradients.get(parameter)
        self._inner.step()
        with self._stream.queue():
            for parameter in part:
                copy = self._copies[parameter]
                copy.grad = None
                if copy is not parameter:
                    get_local(parameter).copy_(get_local(copy), non_blocking=True)
        for used in on_host.places:
            self._memory.give_back(used)
        for parameter in part:
            self._store_state(parameter, self._inner.state[self._copies[parameter]])

    def _store_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        self.state[parameter] = state
        if self._files is None:
            return
        tensors = [value for value in state.values() if isinstance(value, DTensor)]
        for value in tensors if self._state_in_files else []:
            if not self._files.contains(get_local(value)):
                set_local(value, self._files.copy_to_file(get_local(value)))
        for used in [parameter, *tensors]:
            self._files.release_pages(get_local(used))


def _put_into(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is split over ranks as `tensor` is, of which `local` is what this rank holds."""
    if not isinstance(tensor, DTensor):
        return local
    other = tensor.detach()
    assert isinstance(other, DTensor)
    set_local(other, local)
    return other


def _split_parameters(parameters: list[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = []
    filled = 0
    for parameter in parameters:
        size = get_local(parameter).nbytes  # 0 if other ranks have all rows
        if not parts or filled + size > limit:
            parts.append([])
            filled = 0
        parts[-1].append(parameter)
        filled += size
    return parts


CPU = torch.device("cpu")


def make_offload_policy(config: RunConfig, device: torch.device) -> OffloadPolicy:
    """Make fully_shard's policy: parameters in CPU memory, pinned if a GPU copies from it."""
    storage = config.parallel.offload.parameters
    if storage == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=storage == "cpu" and device.type == "cuda")


def get_parameter_device(config: RunConfig, device: torch.device) -> torch.device:
    """Return the device of sharded parameters and reduced gradients between uses. device: the rank's own."""
    return device if config.parallel.offload.parameters == "none" else CPU


def get_optimizer_device(config: RunConfig, device: torch.device) -> torch.device:
    """Return the device of the optimizer's state and update. device: the rank's own.

    If parameters are offloaded the optimizer is too: an update on the GPU would need all of them there, with twice as
    much state.
    """
    offload = config.parallel.offload
    return device if (offload.optimizer, offload.parameters) == ("none", "none") else CPU


def open_offload_files(config: RunConfig) -> FileMemory | None:
    """Open the files of this rank; None if nothing is offloaded to files."""
    offload = config.parallel.offload
    return FileMemory(offload.dir) if "file" in (offload.parameters, offload.optimizer) else None


def place_offloaded_parameters(part: nn.Module, config: RunConfig, world: World, files: FileMemory | None) -> str:
    """Move the buffers of `part` to this rank's device and its sharded parameters, if so configured, into `files`.

    part: with values on get_parameter_device(). Returns a line for the log.
    """
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))
    if config.parallel.offload.parameters == "file":
        assert files is not None
        for module in part.modules():
            if isinstance(module, FSDPModule):
                move_shards(module, files.copy_to_file)
        return f"offload: sharded parameters in files in {files.folder}"
    note = ", where this rank computes anyway" if world.device.type == "cpu" else ""
    return f"offload: sharded parameters in CPU memory{note}"


def offload_optimizer(
    make: OptimizerFactory, config: RunConfig, world: World, files: FileMemory | None
) -> OptimizerFactory:
    """Wrap an optimizer factory so that state and updates are on get_optimizer_device()."""
    if config.parallel.offload.optimizer == "none" and config.parallel.offload.parameters == "none":
        return make
    place = get_optimizer_device(config, world.device)
    keeps_state = config.parallel.offload.optimizer == "file"

    def make_offloaded(split: nn.Module) -> torch.optim.Optimizer:
        storage = f"in files in {files.folder}" if files is not None and keeps_state else f"in {place} memory"
        log.info("offload: optimizer state %s, updated on %s", storage, place)
        return OffloadedOptimizer(make(split), place, files, keeps_state)

    return make_offloaded
