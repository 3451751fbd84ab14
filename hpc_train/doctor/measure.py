"""Short measurements that all ranks of a job make at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpc_train.bench.collectives.definitions import bus_factor
from hpc_train.bench.collectives.groups import WORLD, groups_of
from hpc_train.collectives import all_gather_values
from hpc_train.config.degrees import AXES, Degrees
from hpc_train.config.run import RunConfig
from hpc_train.doctor.report import Speed
from hpc_train.doctor.speeds import Reduction
from hpc_train.errors import UserError
from hpc_train.placement.cost import cost
from hpc_train.placement.from_config import fabric_of
from hpc_train.traffic.flow import Flow

_REPEATS = 5
_MATRIX = {"cuda": 8192, "cpu": 512}
"""Rows and columns: large enough that a GPU is busy for milliseconds, small enough for a CPU."""
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 25}
"""Bytes."""
_REDUCED = {"cuda": 1 << 26, "cpu": 1 << 22}
"""Bytes."""


def own_speed(device: torch.device) -> Speed:
    """This rank's, after all have come here."""
    dist.barrier()
    size, dtype = _MATRIX[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    product = timed(lambda: torch.mm(a, b), device)
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Speed(product, timed(lambda: target.copy_(source), device), device.type)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds, the median of a few after one that does not count."""
    taken = []
    for _ in range(_REPEATS + 1):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def axis_reductions(
    config: RunConfig, degrees: Degrees, hosts: Sequence[str], mesh: DeviceMesh, device: torch.device
) -> list[Reduction]:
    """An all-reduce on every axis of the mesh. hosts: of every rank. Every rank calls it, and gets the same."""
    found = []
    buffer = torch.zeros(_REDUCED[device.type], dtype=torch.uint8, device=device)
    for axis in [group.axis for group in groups_of(degrees, dist.get_rank())]:
        everywhere = all_gather_values(_reduction(None if axis == WORLD else mesh[axis].get_group(), buffer))
        slowest = max(seconds for seconds, _ in everywhere)
        why = next((reason for _, reason in everywhere if reason), "")
        ranks = degrees.world if axis == WORLD else getattr(degrees, axis)
        bus = buffer.nbytes / slowest * bus_factor("all_reduce", ranks) if slowest else 0.0
        predicted = None if why else prediction(config, degrees, hosts, axis, buffer.nbytes, device.type)
        found.append(Reduction(axis, ranks, buffer.nbytes, slowest, bus, predicted, why))
    return found


def _reduction(group: dist.ProcessGroup | None, buffer: torch.Tensor) -> tuple[float, str]:
    """(seconds of this rank, why it failed)."""
    try:
        return timed(lambda: dist.all_reduce(buffer, group=group), buffer.device), ""
    except RuntimeError as error:
        return 0.0, f"rank {dist.get_rank()}: {' '.join(str(error).split())[:200]}"


def prediction(
    config: RunConfig, degrees: Degrees, hosts: Sequence[str], axis: str, size: int, device: str
) -> float | None:
    """Seconds by the model that ranks are placed by; None where the cluster is not calibrated or nodes are unequal."""
    nodes = list(dict.fromkeys(hosts))
    each = len(hosts) // len(nodes)
    if config.cluster.calibration is None or list(hosts) != [node for node in nodes for _ in range(each)]:
        return None
    axes = tuple(name for name in AXES if getattr(degrees, name) > 1) if axis == WORLD else (axis,)
    flow = Flow(axes, "all_reduce", size, 1, "probe")
    try:
        fabric = fabric_of(config, nodes, each)
        told = cost(fabric, asdict(degrees), [flow], backend="nccl" if device == "cuda" else "gloo").total
    except UserError:
        return None
    return told if math.isfinite(told) and told > 0 else None
