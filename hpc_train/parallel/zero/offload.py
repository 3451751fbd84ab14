"""Offload: the sharded parameters and the optimizer state in CPU memory or in a file, each by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy

from hpc_train.api import World
from hpc_train.compat import move_shards
from hpc_train.config.run import RunConfig
from hpc_train.parallel.zero.offload_file import FileMemory
from hpc_train.parallel.zero.offload_optimizer import PlacedOptimizer

log = logging.getLogger(__name__)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
CPU = torch.device("cpu")


def sharded_offload(config: RunConfig, device: torch.device) -> OffloadPolicy:
    """What fully_shard is told: parameters in CPU memory, pinned where a GPU copies from it."""
    where = config.parallel.offload.parameters
    if where == "none":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=where == "cpu" and device.type == "cuda")


def home(config: RunConfig, world: World) -> torch.device:
    """Where the sharded parameters live."""
    return parameter_device(config, world.device)


def parameter_device(config: RunConfig, device: torch.device) -> torch.device:
    """Device of the sharded parameters and their reduced gradients between uses; device: the rank's own."""
    return device if config.parallel.offload.parameters == "none" else CPU


def optimizer_device(config: RunConfig, device: torch.device) -> torch.device:
    """Device of the optimizer's state and of its update; device: the rank's own.

    Offloaded parameters take their optimizer with them: an update on the GPU would need all of them there, plus twice
    as much state.
    """
    offload = config.parallel.offload
    return device if (offload.optimizer, offload.parameters) == ("none", "none") else CPU


def open_files(config: RunConfig) -> FileMemory | None:
    """The files of this rank, where anything goes into one."""
    offload = config.parallel.offload
    return FileMemory(offload.dir) if "file" in (offload.parameters, offload.optimizer) else None


def settle(part: nn.Module, config: RunConfig, world: World, files: FileMemory | None) -> str | None:
    """After materialising in `home`: buffers go to the device, parameters into `files`. Returns what was done."""
    offload = config.parallel.offload
    if offload.parameters == "none":
        return None
    for module in part.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(world.device))
    if offload.parameters == "file":
        assert files is not None
        for module in part.modules():
            if isinstance(module, FSDPModule):
                move_shards(module, files.take)
        return f"offload: sharded parameters in files in {files.folder}"
    beside = ", where this rank computes anyway" if world.device.type == "cpu" else ""
    return f"offload: sharded parameters in CPU memory{beside}"


def placing(make: MakeOptimizer, config: RunConfig, world: World, files: FileMemory | None) -> MakeOptimizer:
    """Wrap an optimizer factory so that its state and updates are on `optimizer_device`."""
    offload = config.parallel.offload
    if offload.optimizer == "none" and offload.parameters == "none":
        return make
    place = optimizer_device(config, world.device)
    keeps_state = offload.optimizer == "file"

    def placed(split: nn.Module) -> torch.optim.Optimizer:
        where = f"in files in {files.folder}" if files is not None and keeps_state else f"in {place} memory"
        log.info("offload: optimizer state %s, updated on %s", where, place)
        return PlacedOptimizer(make(split), place, files, keeps_state)

    return placed
