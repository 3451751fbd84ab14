"""The columns of a machine: speeds and memory of its GPUs, links and switches; and which of them are assumed."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_train.cluster.calibration import DeviceMeasurement as Measured
from hpc_train.config.cluster import PCIE_BANDWIDTH, ClusterConfig
from hpc_train.placement.fabric_from_config import collect_figures
from hpc_train.planner.model.accelerators import attention_peak, find_accelerator
from hpc_train.planner.model.fabric import switch_sizes
from hpc_train.units import GIB

_BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16}
_UNKNOWN_FLOPS, _UNKNOWN_BANDWIDTH, _UNKNOWN_MEMORY = 1e12, 1e11, 16.0
"""Assumed for a machine without a description: FLOP/s, bytes/s, GiB. Ratios of times are still meaningful, seconds are
not; list_assumptions says so to the user."""


@dataclass(frozen=True)
class _Speeds:
    """Speed and memory of a device: FLOP/s, bytes, bytes/s."""

    flops: float
    memory: float
    bandwidth: float
    ceiling: float
    """Share of `flops` that the fastest matrix product reaches."""


def _find_speeds(cluster: ClusterConfig, precision: str, measured: Measured | None) -> _Speeds:
    """Return the device's figures: from the configuration, else the table of accelerators, else a measurement.

    The ceiling comes from this cluster's own measurement if there is one.
    """
    gpu, listed_gpu = cluster.gpu, find_accelerator(cluster.gpu.name or "")
    reached = measured.tflops.get(precision, 0.0) * 1e12 if measured else 0.0
    listed = gpu.peak_tflops.get(precision, 0.0) * 1e12
    flops = listed or (listed_gpu.flops.get(_BITS[precision], 0.0) if listed_gpu else 0.0) or reached or _UNKNOWN_FLOPS
    memory = (gpu.memory_gib or _UNKNOWN_MEMORY) * GIB
    listed_bandwidth = gpu.memory_bandwidth_gb_s * 1e9 or (listed_gpu.bandwidth if listed_gpu else _UNKNOWN_BANDWIDTH)
    bandwidth = measured.memory_gb_s * 1e9 if measured else listed_bandwidth
    return _Speeds(flops, memory, bandwidth, reached / flops or (listed_gpu.ceiling if listed_gpu else 0.8))


def make_machine_columns(cluster: ClusterConfig, precision: str, ranks: int) -> dict[str, float]:
    """Return the columns of a machine. ranks: per node. Raises UserError for a calibration that cannot be read."""
    node, figures = cluster.node, collect_figures(cluster)
    leaf, group = switch_sizes(cluster, figures)
    listed_gpu = find_accelerator(cluster.gpu.name or "")
    speeds = _find_speeds(cluster, precision, figures.measured.device if figures.measured else None)
    measured = figures.measured.get_level("node") if figures.measured else None
    uplink = measured.bandwidth if measured else figures.nic_uplink
    return {
        "gpus_per_node": ranks,
        "nvlink_domain": max(node.nvlink_domain_gpus, ranks),
        "peak_flops": speeds.flops,
        "peak_flops_attention": speeds.flops,
        "gemm_ceiling": speeds.ceiling,
        "attention_ceiling": attention_peak(listed_gpu, True) if listed_gpu else 0.5,
        "host_computes": bool(figures.measured and figures.measured.device and figures.measured.device.name == "cpu"),
        "multiprocessors": listed_gpu.multiprocessors if listed_gpu else 0,
        "memory_bytes": speeds.memory,
        "memory_bandwidth": speeds.bandwidth,
        "link_bandwidth": figures.inside_bandwidth,
        "pair_bandwidth": figures.pair_bandwidth,
        "nic_bandwidth": uplink / ranks,
        "host_bandwidth": node.pcie_gb_s * 1e9 or PCIE_BANDWIDTH,
        "checkpoint_bandwidth": node.pcie_gb_s * 1e9 or PCIE_BANDWIDTH,
        "leaf_gpus": leaf.nodes * ranks,
        "leaf_oversubscription": leaf.oversubscription,
        "group_gpus": group.nodes * ranks,
        "group_oversubscription": group.oversubscription,
    }


def list_assumptions(cluster: ClusterConfig, precision: str) -> tuple[str, ...]:
    """List the figures of the device that are unknown, and what is assumed instead, one line each."""
    gpu, listed_gpu, calibration = (
        cluster.gpu,
        find_accelerator(cluster.gpu.name or ""),
        collect_figures(cluster).measured,
    )
    measured = calibration.device if calibration else None
    missing = []
    listed = gpu.peak_tflops.get(precision) or (listed_gpu and _BITS[precision] in listed_gpu.flops)
    if not listed and not (measured and precision in measured.tflops):
        assumed = f"{_UNKNOWN_FLOPS / 1e12:g} TFLOP/s assumed"
        missing.append(f"cluster.gpu.peak_tflops of {precision} is not known: {assumed}")
    if not gpu.memory_gib:
        missing.append(f"cluster.gpu.memory_gib is not known: {_UNKNOWN_MEMORY:g} GiB assumed")
    if not gpu.memory_bandwidth_gb_s and not listed_gpu and not measured:
        missing.append(f"cluster.gpu.memory_bandwidth_gb_s is not known: {_UNKNOWN_BANDWIDTH / 1e9:g} GB/s assumed")
    return tuple(missing)
