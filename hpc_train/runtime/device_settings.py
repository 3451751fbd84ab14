"""Settings of torch and of its libraries for the device of a rank, made before it is first used.

Environment variables that the user or the site (cluster.environment) has set stay as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from hpc_train._torch.versions import release_numbers
from hpc_train.config.run import RunConfig
from hpc_train.interfaces import Task
from hpc_train.placement.communication_environment import VariableSetting
from hpc_train.processes import keep_freed_memory

log = logging.getLogger(__name__)

LAZY_GLOO_FROM = 128
"""Ranks from which on gloo connects two ranks when they first exchange something.

Otherwise each group connects each rank with all others at once: 2,048 ranks have two million connections a group."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The name that newer releases prefer, and the one that all know."""
_KEPT_BYTES = 1 << 30
"""Bytes that a rank may keep free between steps."""
_DEVICE_ID_RELEASE = (2, 13)
"""Releases before this one split groups of a bound device without their gloo half, which offloaded tensors need."""


def choose_gloo_settings(ranks: int) -> list[VariableSetting]:
    """Let the ranks of a large job connect on demand."""
    if ranks < LAZY_GLOO_FROM:
        return []
    return [VariableSetting("TORCH_GLOO_LAZY_INIT", "1", f"{ranks} ranks connect when they first exchange something")]


def choose_allocator_settings(device: torch.device, env: Mapping[str, str]) -> list[VariableSetting]:
    """Let the allocator of an NVIDIA GPU grow its segments, so that blocks of changing sizes leave no holes."""
    if device.type != "cuda" or torch.version.hip is not None or any(name in env for name in _ALLOCATOR):
        return []
    return [VariableSetting(_ALLOCATOR[1], "expandable_segments:True", "blocks of changing sizes leave no holes")]


def keep_memory_of_steps(device: torch.device, env: Mapping[str, str]) -> None:
    """Let a rank on a CPU keep the memory that a step frees, because the next step allocates it again.

    Without that, giving it back and getting it again takes 1.5 % of the processor time of a small model's step with
    zero1.
    """
    if device.type == "cpu":
        keep_freed_memory(_KEPT_BYTES, env)


def separate_ranks_on_one_gpu(task: Task, device: torch.device, env: MutableMapping[str, str] = os.environ) -> None:
    """Let this rank share its GPU with others of the job, where there are more ranks than GPUs. Each rank calls this.

    NCCL refuses two ranks of a host on one GPU. All but the first of them say that they are hosts of their own, so that
    NCCL connects them through sockets: slow, but every layout can be tried on one GPU.
    """
    if device.type != "cuda" or task.processes == 1:
        return
    assert task.store is not None
    key = f"gpu/{task.host}/{torch.cuda.get_device_properties(device).uuid}"
    first = int(task.store.compare_set(key, "", str(task.process)))
    if first != task.process:
        env.setdefault("NCCL_HOSTID", f"{task.host}-{task.process}")
        log.warning(
            "several ranks share a GPU: NCCL connects them through sockets, and they wait for each other; this is for "
            "trying a layout, not for speed"
        )


def choose_group_options(device: torch.device) -> dict[str, Any]:
    """Return options of init_process_group: the GPU, so that NCCL connects at once and splits groups from the first.

    Without it each axis of the mesh would make its connections in its first collective, in the first step.
    """
    bound = device.type == "cuda" and release_numbers(torch.__version__) >= _DEVICE_ID_RELEASE
    return {"device_id": device} if bound else {}


def apply_matmul_precision(config: RunConfig) -> None:
    """Set how products of float32 matrices round, for this process."""
    torch.set_float32_matmul_precision(config.precision.matmul)


def describe_device(config: RunConfig, device: torch.device) -> str | None:
    """Return a line about this rank's GPU and what was set for it; None on a CPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    allocator = next((os.environ[name] for name in _ALLOCATOR if name in os.environ), "torch's defaults")
    products = {"highest": "fp32", "high": "TF32", "medium": "bf16"}[config.precision.matmul]
    return (
        f"GPU: {properties.name}, {properties.total_memory / 2**30:.1f} GiB; allocator {allocator}; "
        f"fp32 products in {products}; {_describe_collection(config.train.gc_every)}"
    )


def _describe_collection(interval: int) -> str:
    return f"garbage collected every {interval} steps" if interval else "garbage collected when Python wants to"
