"""GPUs and NICs of this machine: what drivers list against what torch sees, links, ports, clocks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_train.cluster.machine import this_node
from hpc_train.cluster.nvml import load_nvml
from hpc_train.cluster.spec import Gpu, Nic
from hpc_train.doctor.finding import Finding, bad, ok, short, warn

SLOWED = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that no healthy GPU shows; a power cap (0x4) is usual under load."""


@dataclass(frozen=True)
class Clock:
    """Of one GPU, MHz of its streaming multiprocessors."""

    index: int
    now: int
    most: int
    reasons: int
    """Bits that say what holds it back."""


def gpus() -> Iterator[Finding]:
    """Every check of this file."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        node = this_node().nodes[0]
    for warning in said:
        yield bad("driver", str(warning.message), "see dmesg for the GPU that fell off, and drain the node")
    seen = torch.cuda.device_count()
    yield seen_by_torch(node.gpus, seen, torch.version.cuda is not None or torch.version.hip is not None)
    yield from nvlinks(node.gpus)
    yield from ports(node.nics)
    yield from clocks(read_clocks(load_nvml()))


def seen_by_torch(listed: Sequence[Gpu], seen: int, able: bool) -> Finding:
    """listed: by the driver. able: whether torch is built for GPUs."""
    names = Counter(gpu.name or "unnamed" for gpu in listed)
    text = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    if seen == len(listed):
        return ok("gpus", text)
    if not able:
        advice = "install a build of torch for CUDA or ROCm, see pytorch.org; this one computes on CPUs"
        return bad("gpus", f"{text}, but torch is built for CPUs only", advice)
    if seen == 0:
        advice = "check the job's GPU request, CUDA_VISIBLE_DEVICES, and that the driver is as new as torch's CUDA"
        return bad("gpus", f"{text}, but torch sees none", advice)
    if seen < len(listed):
        return ok("gpus", f"{text}; this process may use {seen}")
    return warn("gpus", f"{text}, but torch sees {seen}", "the driver's library does not list them all: is it old?")


def nvlinks(listed: Sequence[Gpu]) -> Iterator[Finding]:
    """GPUs of one model in a node have equally many: one that lost some makes every ring through it slow, silently."""
    for name in dict.fromkeys(gpu.name for gpu in listed):
        alike = [gpu for gpu in listed if gpu.name == name]
        counts = Counter(gpu.nvlinks or 0 for gpu in alike)
        usual = max(counts, key=lambda count: (counts[count], count))
        odd = [f"{gpu.id} has {gpu.nvlinks or 0}" for gpu in alike if (gpu.nvlinks or 0) != usual]
        if odd:
            advice = (
                "NCCL takes a slow path without a word: drain the node and have it looked at (nvidia-smi nvlink -s)"
            )
            yield bad("nvlinks", f"{usual} up on most GPUs, but {short(odd)}", advice)
        elif usual:
            yield ok("nvlinks", f"{usual} up on each GPU")


def ports(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Ports of a fabric are up, and as fast as most; Ethernet beside one may well be unplugged."""
    fabric = [nic for nic in nics if nic.layer != "ethernet" or all(it.layer == "ethernet" for it in nics)]
    up = [nic for nic in fabric if nic.active is not False]
    down = [nic.device or nic.id for nic in fabric if nic.active is False]
    if not fabric:
        return
    rates = Counter(nic.gbit_s for nic in up if nic.gbit_s is not None)
    usual = max(rates, key=lambda rate: (rates[rate], rate)) if rates else None
    slow = [
        f"{nic.device or nic.id} {nic.gbit_s:g} Gbit/s" for nic in up if nic.gbit_s and usual and nic.gbit_s < usual
    ]
    speed = f" at {usual:g} Gbit/s" if usual else ""
    if not up:
        yield bad("nics", f"no port is up of {short(down)}", "is the cable plugged in, and the subnet manager running?")
    elif slow:
        advice = (
            "a link that came up slower than its like slows every job on it: ibstat, then reseat or replace the cable"
        )
        yield warn("nics", f"most are up{speed}, but {short(slow)}", advice)
    elif down and fabric[0].layer != "ethernet":
        yield warn(
            "nics", f"{len(up)} up{speed}, down: {short(down)}", "fine if they are not cabled; else ask the site"
        )
    else:
        yield ok("nics", f"{short([nic.device or nic.id for nic in up], 8)} up{speed}")


def read_clocks(nvml: Any | None) -> list[Clock]:
    """What NVML says of each GPU; none where it does not."""
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                found.append(_clock(nvml, index))
            except nvml.NVMLError:
                continue
    finally:
        nvml.nvmlShutdown()
    return found


def _clock(nvml: Any, index: int) -> Clock:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    # Older libraries know it by the name that was "throttle reasons".
    names = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    ask = next(getattr(nvml, name) for name in names if hasattr(nvml, name))
    now = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    return Clock(index, now, nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM), ask(handle))


def clocks(found: Sequence[Clock]) -> Iterator[Finding]:
    """None is held back by heat or by a failing power supply."""
    held = [(clock, why) for clock in found for bit, why in SLOWED.items() if clock.reasons & bit]
    if held:
        odd = list(dict.fromkeys(f"GPU{clock.index} {why}, {clock.now} of {clock.most} MHz" for clock, why in held))
        yield bad("clocks", short(odd), "cooling or power of this node fails: drain it (nvidia-smi -q -d PERFORMANCE)")
    elif found:
        yield ok("clocks", f"nothing holds back {len(found)} GPUs, {max(clock.most for clock in found)} MHz at most")
