"""Measure all ranks at the same time to find slow ranks, and a network that is slower than its calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpc_train.config.parallel import AXES, Degrees
from hpc_train.config.run import RunConfig
from hpc_train.doctor.agreement import RankReport, RankSpeed
from hpc_train.doctor.findings import Finding, fail_check, pass_check, warn_check
from hpc_train.errors import UserError
from hpc_train.messages import all_gather_values
from hpc_train.placement.cost.cost_model import estimate_cost
from hpc_train.placement.fabric_from_config import build_located_fabric
from hpc_train.placement.node_locations import NodeLocations
from hpc_train.resilience.preflight import Preflight, find_outliers
from hpc_train.timing import time_calls
from hpc_train.traffic.axes import Flow
from hpc_train.traffic.rank_groups import WORLD_AXIS, compute_bus_factor, list_groups_of_rank
from hpc_train.units import join_first

_REPEATS = 5
_MATRIX = {"cuda": 8192, "cpu": 512}
"""Rows and columns: large enough that a GPU is busy for milliseconds, small enough for a CPU."""
_COPIED = {"cuda": 1 << 30, "cpu": 1 << 25}
"""Bytes."""
_REDUCED = {"cuda": 1 << 26, "cpu": 1 << 22}
"""Bytes."""


def measure_speed(device: torch.device) -> RankSpeed:
    """Time a matrix product and a copy on this rank, while all ranks do the same."""
    dist.barrier()
    size, dtype = _MATRIX[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    product = _measure_median_seconds(lambda: torch.mm(a, b), device)
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return RankSpeed(product, _measure_median_seconds(lambda: target.copy_(source), device), device.type)


def _measure_median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return seconds of one call, the median of a few after a warm-up."""
    work()
    return median(time_calls(work, 1, device) for _ in range(_REPEATS))


def measure_reductions(
    config: RunConfig, degrees: Degrees, hosts: Sequence[str], mesh: DeviceMesh, device: torch.device
) -> list[AxisReduction]:
    """Time an all-reduce on every axis of the mesh. hosts: node of each rank. Every rank must call this."""
    reductions = []
    buffer = torch.zeros(_REDUCED[device.type], dtype=torch.uint8, device=device)
    for axis in [group.axis for group in list_groups_of_rank(degrees, dist.get_rank())]:
        everywhere = all_gather_values(
            _measure_reduction(None if axis == WORLD_AXIS else mesh[axis].get_group(), buffer)
        )
        slowest = max(seconds for seconds, _ in everywhere)
        why = next((reason for _, reason in everywhere if reason), "")
        ranks = degrees.world if axis == WORLD_AXIS else getattr(degrees, axis)
        bus = buffer.nbytes / slowest * compute_bus_factor("all_reduce", ranks) if slowest else 0.0
        predicted = None if why else predict_seconds(config, degrees, hosts, axis, buffer.nbytes, device.type)
        reductions.append(
            AxisReduction(
                axis=axis, ranks=ranks, bytes=buffer.nbytes, seconds=slowest, bus=bus, predicted=predicted, failed=why
            )
        )
    return reductions


def _measure_reduction(group: dist.ProcessGroup | None, buffer: torch.Tensor) -> tuple[float, str]:
    """Return (seconds of this rank, why it failed)."""
    try:
        return _measure_median_seconds(lambda: dist.all_reduce(buffer, group=group), buffer.device), ""
    except RuntimeError as error:
        return 0.0, f"rank {dist.get_rank()}: {' '.join(str(error).split())[:200]}"


def predict_seconds(
    config: RunConfig, degrees: Degrees, hosts: Sequence[str], axis: str, size: int, device: str
) -> float | None:
    """Predict the seconds with the placement's cost model; None without calibration, or if nodes are unequal."""
    nodes = list(dict.fromkeys(hosts))
    each = len(hosts) // len(nodes)
    if config.cluster.calibration is None or list(hosts) != [node for node in nodes for _ in range(each)]:
        return None
    axes = tuple(name for name in AXES if getattr(degrees, name) > 1) if axis == WORLD_AXIS else (axis,)
    flow = Flow(axes, "all_reduce", size, 1, "probe")
    try:
        fabric = build_located_fabric(config, NodeLocations(tuple(nodes)), each)
        seconds = estimate_cost(fabric, asdict(degrees), [flow], backend="nccl" if device == "cuda" else "gloo").total
    except UserError:
        return None
    return seconds if math.isfinite(seconds) and seconds > 0 else None


BROKEN_SHARE = 0.3
"""A GPU that is slower by this share is broken; CPUs are shared with others, so they never are."""
MIN_DIFFERENCE = 0.10
"""Share of the median below which a difference does not matter, however steady the others are."""
POOR_SHARE = 0.5
"""Share of the predicted bandwidth below which a link is reported."""


@dataclass(frozen=True)
class AxisReduction:
    """All-reduce over all groups of one axis at once."""

    axis: str
    ranks: int
    """Ranks of a group."""
    bytes: int
    seconds: float
    """Median of several calls, on the slowest rank."""
    bus: float
    """Bus bandwidth in bytes/s, as nccl-tests define it."""
    predicted: float | None
    """Predicted seconds; None without calibration."""
    failed: str = ""
    """Why it failed; empty if it did not."""


def check_speeds(reports: Sequence[RankReport], measured: Sequence[RankSpeed]) -> Iterator[Finding]:
    """Report slow ranks. measured: speeds in the order of the reports."""
    names = [f"rank {report.rank} on {report.host}" for report in reports]
    if len({speed.device for speed in measured}) > 1:
        yield fail_check("speed", "some ranks compute on GPUs, others on CPUs", "see the finding about GPUs")
        return
    gpus = measured[0].device == "cuda"
    yield check_outliers("matrix product", names, [speed.product for speed in measured], gpus)
    yield check_outliers("memory copy", names, [speed.copy for speed in measured], gpus)


def check_outliers(name: str, names: Sequence[str], seconds: Sequence[float], firm: bool) -> Finding:
    """Report ranks that are much slower than the median. firm: a large difference is a failure, not a warning."""
    outliers = find_outliers(seconds, MIN_DIFFERENCE)
    middle = median(seconds)
    if not outliers:
        return pass_check(name, f"{1e3 * middle:.3g} ms on most ranks, {1e3 * max(seconds):.3g} on the slowest")
    odd = [f"{names[index]} {seconds[index] / middle:.2f} x" for index in outliers]
    text = f"{1e3 * middle:.3g} ms on most ranks, but slower: {join_first(odd)}"
    if firm and max(seconds) > middle * (1 + BROKEN_SHARE):
        return fail_check(
            name, text, "leave these nodes out (launch.exclude); clocks, heat or a failing memory module?"
        )
    return warn_check(name, text, "every step waits for the slowest: is anything else running there?")


def check_slow_nodes(result: Preflight) -> Finding:
    """Report the nodes that the pre-flight of a run would name (resilience.preflight)."""
    product, exchange = (
        median(values) for values in zip(*((n.product, n.exchange) for n in result.nodes), strict=True)
    )
    usual = f"matrix product {1e3 * product:.3g} ms, exchange with another node {1e3 * exchange:.3g} ms"
    if not result.slow:
        return pass_check("nodes", f"none of {len(result.nodes)} stands out: {usual}")
    odd = [node.describe() + ("" if node.blamed else ", or its partner is slow") for node in result.slow]
    advice = "leave it out (launch.exclude); with launch.spares, resilience.preflight=quick does that by itself"
    return warn_check("nodes", f"{join_first(odd)} ({usual} on most)", advice)


def check_reductions(measured: Sequence[AxisReduction]) -> Iterator[Finding]:
    """Compare each all-reduce with its prediction, if there is one."""
    for reduction in measured:
        name = f"all-reduce {reduction.axis}"
        if reduction.failed:
            yield fail_check(name, reduction.failed, "NCCL_DEBUG=INFO says more; compare `hpc-train bench collectives`")
            continue
        speed = f"{1e3 * reduction.seconds:.3g} ms, {reduction.bus / 1e9:.3g} GB/s"
        text = f"{reduction.bytes / 2**20:g} MiB over {reduction.ranks} ranks: {speed}"
        if reduction.predicted is None:
            yield pass_check(
                name, f"{text}; nothing to compare with before `hpc-train bench collectives` (cluster.calibration)"
            )
        elif reduction.seconds > reduction.predicted / POOR_SHARE:
            ratio = reduction.seconds / reduction.predicted
            text = f"{text}, {ratio:.1f} x the predicted {1e3 * reduction.predicted:.3g} ms"
            yield warn_check(
                name, text, "a slow link, a wrong interface, or other jobs on the same switches; see nics, network"
            )
        else:
            yield pass_check(name, f"{text}, predicted {1e3 * reduction.predicted:.3g} ms")
