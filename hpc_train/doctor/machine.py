"""Checks of this machine: memory, files, the run's file system, GPUs and NICs; check_machine runs all.

A check takes the figures and returns a Finding; reading them is apart, so that tests can give it any machine.
"""

from __future__ import annotations

import fnmatch
import os
import resource
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_train.cluster.filesystems import Mount, find_mount
from hpc_train.cluster.local_gpus import load_nvml
from hpc_train.cluster.spec import Gpu, Nic
from hpc_train.cluster.sysfs import list_entries
from hpc_train.cluster.this_machine import describe_this_node
from hpc_train.config.run import RunConfig
from hpc_train.doctor.findings import Finding, fail_check, pass_check, warn_check
from hpc_train.doctor.software import check_environment, check_software, check_tools
from hpc_train.resilience.heartbeat import remove_stale_entries
from hpc_train.runtime.binding import NodeSurvey, survey_node
from hpc_train.units import GIB, join_first

DEFAULT_RUN_DIR = "runs"
"""Default parent of run_dir."""


def check_machine(config: RunConfig, env: Mapping[str, str], host: str, nodes: int, local: int) -> list[Finding]:
    """Run all checks of this machine. nodes: nodes of the job; local: ranks on this one."""
    shared = nodes > 1 or config.launch.kind == "slurm"
    return [
        *check_software(),
        *check_gpus(env),
        *check_tools(env),
        *check_limits(Path(config.run_dir or DEFAULT_RUN_DIR).absolute(), shared),
        *check_environment(env, host, nodes, config.cluster.fabric.interface, local),
    ]


MIN_SHARED_GIB, MIN_OPEN_FILES = 1.0, 4096
"""GiB free in /dev/shm; file descriptors of a process."""
FULL_SHARE = 0.97
"""Used share of a file system above which space is short."""


def check_limits(run_dir: Path, several_nodes: bool) -> Iterator[Finding]:
    """Run the checks of memory, limits and file systems."""
    yield check_shared_memory(_measure_free_gib("/dev/shm"))
    if removed := remove_stale_entries():
        yield pass_check("heartbeats", f"removed what dead ranks of {removed} attempt(s) had left in /dev/shm")
    yield check_memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma=_has_rdma())
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_run_folder(run_dir, find_mount(run_dir), several_nodes)
    yield check_free_space(run_dir)


def check_shared_memory(free: float | None) -> Finding:
    """Check free space in /dev/shm, through which NCCL, MPI and data loaders exchange data. free: GiB."""
    if free is None:
        return fail_check("/dev/shm", "is not there", "mount it; in a container: --ipc=host, or --shm-size=16g")
    text = f"{free:.1f} GiB free"
    if free >= MIN_SHARED_GIB:
        return pass_check("/dev/shm", text)
    what = "NCCL and MPI may fail with a bus error; remove what jobs have left there"
    return warn_check("/dev/shm", text, f"{what}, and start containers with --ipc=host or --shm-size=16g")


def check_memlock(limit: int, rdma: bool) -> Finding:
    """Check the limit of locked memory in bytes: RDMA locks its buffers."""
    if limit == resource.RLIM_INFINITY:
        return pass_check("memlock", "unlimited")
    text = f"{limit / 2**20:.0f} MiB"
    if not rdma:
        return pass_check("memlock", f"{text}; there is no RDMA device here that would need more")
    advice = "RDMA needs it unlimited: `* - memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity for "
    return fail_check("memlock", text, f"{advice}slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")


def check_open_files(soft: int, hard: int) -> Finding:
    """Check the limit of open files: a rank opens one or more for each rank that it talks to."""
    text = f"{soft} open files (at most {hard})" if soft != resource.RLIM_INFINITY else "any number of open files"
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return pass_check("nofile", text)
    return warn_check("nofile", text, "few for a job of many ranks: ulimit -n 65536 before it starts (launch.setup)")


def check_run_folder(folder: Path, mount: Mount | None, several_nodes: bool) -> Finding:
    """Check that all nodes of a job see the file system of the run directory."""
    if mount is None:
        return warn_check(
            "run_dir", f"{folder} is on no file system that the system lists", "choose another with run_dir="
        )
    text = f"{folder} is on {mount.kind}, mounted at {mount.point}"
    if several_nodes and mount.kind in ("tmpfs", "ramfs"):
        return fail_check("run_dir", text, "it is in this node's memory: choose a shared file system with run_dir=")
    # A warning, not a failure: a file system of an unknown kind may well be shared.
    if several_nodes and not mount.shared:
        advice = "other nodes may not see it: give a folder on the shared file system with run_dir="
        return warn_check("run_dir", text, advice)
    return pass_check("run_dir", text)


def check_free_space(folder: Path) -> Finding:
    """Check that the run directory can be written and its file system has space."""
    # The run directory is made later, so its nearest parent is looked at.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return fail_check("room", f"{folder} cannot be written by this user", "choose another with run_dir=")
    total, _, free = shutil.disk_usage(folder)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free for runs"
    if total and free / total < 1 - FULL_SHARE:
        return warn_check(
            "room", text, "checkpoints may not fit: remove old ones (checkpoint.keep), or choose another run_dir"
        )
    return pass_check("room", text)


def _measure_free_gib(folder: str) -> float | None:
    try:
        return shutil.disk_usage(folder).free / GIB
    except OSError:
        return None


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


SLOWDOWN_REASONS = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that no healthy GPU shows; a power cap (0x4) is usual under load."""


@dataclass(frozen=True)
class GpuClock:
    """Clocks of the streaming multiprocessors of one GPU, in MHz."""

    index: int
    now: int
    most: int
    reasons: int
    """Bits of the reasons why the clock is lowered."""


def check_gpus(env: Mapping[str, str]) -> Iterator[Finding]:
    """Run the checks of GPUs and NICs. env: in which variables may name NICs."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cluster = describe_this_node()
    node = cluster.nodes[0]
    for warning in caught:
        yield fail_check("driver", str(warning.message), "see dmesg for the GPU that fell off, and drain the node")
    visible = torch.cuda.device_count()
    yield check_gpus_in_torch(node.gpus, visible, torch.version.cuda is not None or torch.version.hip is not None)
    yield from check_nvlinks(node.gpus)
    yield from check_ports(node.nics)
    yield from check_nic_variables(survey_node(lambda: cluster), len(node.gpus))
    yield from check_named_nics(env)
    yield from check_clocks(read_clocks(load_nvml()))


def check_gpus_in_torch(listed: Sequence[Gpu], seen: int, able: bool) -> Finding:
    """Check that torch sees the GPUs that the driver lists. able: torch is built for GPUs."""
    names = Counter(gpu.name or "unnamed" for gpu in listed)
    text = ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    if seen == len(listed):
        return pass_check("gpus", text)
    if not able:
        advice = "install a build of torch for CUDA or ROCm, see pytorch.org; this one computes on CPUs"
        return fail_check("gpus", f"{text}, but torch is built for CPUs only", advice)
    if seen == 0:
        advice = "check the job's GPU request, CUDA_VISIBLE_DEVICES, and that the driver is as new as torch's CUDA"
        return fail_check("gpus", f"{text}, but torch sees none", advice)
    if seen < len(listed):
        return pass_check("gpus", f"{text}; this process may use {seen}")
    return warn_check(
        "gpus", f"{text}, but torch sees {seen}", "the driver's library does not list them all: is it old?"
    )


def check_nvlinks(listed: Sequence[Gpu]) -> Iterator[Finding]:
    """Check that GPUs of one model have equally many NVLinks: one that lost some silently slows every ring."""
    for name in dict.fromkeys(gpu.name for gpu in listed):
        same_model = [gpu for gpu in listed if gpu.name == name]
        counts = Counter(gpu.nvlinks or 0 for gpu in same_model)
        # At a draw the larger number counts as usual: links get lost, they do not appear.
        usual = max(counts, key=lambda count: (counts[count], count))
        odd = [f"{gpu.id} has {gpu.nvlinks or 0}" for gpu in same_model if (gpu.nvlinks or 0) != usual]
        if odd:
            advice = (
                "NCCL takes a slow path without a word: drain the node and have it looked at (nvidia-smi nvlink -s)"
            )
            yield fail_check("nvlinks", f"{usual} up on most GPUs, but {join_first(odd)}", advice)
        elif usual:
            yield pass_check("nvlinks", f"{usual} up on each GPU")


def check_ports(nics: Sequence[Nic]) -> Iterator[Finding]:
    """Check that the ports of the fabric are up and equally fast; Ethernet ports may be unplugged."""
    # Where there is a fabric besides Ethernet, an unplugged Ethernet port is no finding.
    fabric = [nic for nic in nics if nic.layer != "ethernet" or all(other.layer == "ethernet" for other in nics)]
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
        yield fail_check(
            "nics", f"no port is up of {join_first(down)}", "is the cable plugged in, and the subnet manager running?"
        )
    elif slow:
        advice = (
            "a link that came up slower than its like slows every job on it: ibstat, then reseat or replace the cable"
        )
        yield warn_check("nics", f"most are up{speed}, but {join_first(slow)}", advice)
    elif down and fabric[0].layer != "ethernet":
        yield warn_check(
            "nics", f"{len(up)} up{speed}, down: {join_first(down)}", "fine if they are not cabled; else ask the site"
        )
    else:
        yield pass_check("nics", f"{join_first([nic.device or nic.id for nic in up], 8)} up{speed}")


def check_nic_variables(survey: NodeSurvey, gpus: int) -> Iterator[Finding]:
    """Report the NIC that UCX is told to use on each rank with a GPU, or why it is told nothing."""
    if not gpus or len(survey.fit_nics) < 2:
        return
    name = "UCX_NET_DEVICES"
    values = [survey.nic_variables.get(nic, {}).get(name) for nic in survey.nic_of.values()]
    chosen = [value for value in values if value is not None]
    if len(survey.fit_nics) > gpus:
        yield pass_check("nic of a rank", f"UCX chooses: {len(survey.fit_nics)} NICs for {gpus} GPUs")
    elif chosen:
        yield pass_check("nic of a rank", f"{name} by GPU, unless it is set: {join_first(chosen, 8)}")


NIC_VARIABLES = {
    "UCX_NET_DEVICES": ("infiniband", "net"),
    "FI_VERBS_DEVICE_NAME": ("infiniband",),
    "FI_EFA_IFACE": ("infiniband",),
    "FI_CXI_DEVICE_NAME": ("cxi",),
}
"""Variables that name NICs -> the classes of /sys/class whose devices they name."""


def check_named_nics(env: Mapping[str, str], root: Path = Path("/")) -> Iterator[Finding]:
    """Check that the NICs that variables of UCX and libfabric name are on this host."""
    for name, kinds in NIC_VARIABLES.items():
        value = env.get(name, "")
        wanted = [part.partition(":")[0] for part in value.split(",") if part]
        if not wanted or "all" in wanted or value.startswith("^"):
            continue
        have = sorted(device.name for kind in kinds for device in list_entries(root / "sys/class" / kind))
        # libfabric's verbs provider takes beginnings of names.
        prefix = name == "FI_VERBS_DEVICE_NAME"
        absent = [
            part
            for part in wanted
            if not any(device.startswith(part) if prefix else fnmatch.fnmatchcase(device, part) for device in have)
        ]
        if absent:
            text = f"{name}={value}: this host has {join_first(have, 12) or 'none'}"
            yield fail_check("environment", text, f"unset {name}; `train` gives each rank the NIC nearest to it")


def read_clocks(nvml: Any | None) -> list[GpuClock]:
    """Read the clocks of each GPU from NVML; empty where NVML does not answer."""
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    clocks = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                clocks.append(_read_clock(nvml, index))
            except nvml.NVMLError:
                continue
    finally:
        nvml.nvmlShutdown()
    return clocks


def _read_clock(nvml: Any, index: int) -> GpuClock:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    # Older libraries know it by the name that was "throttle reasons".
    names = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    ask = next(getattr(nvml, name) for name in names if hasattr(nvml, name))
    now = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    return GpuClock(index, now, nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM), ask(handle))


def check_clocks(clocks: Sequence[GpuClock]) -> Iterator[Finding]:
    """Check that no GPU is slowed down by heat or a failing power supply."""
    slowed = [(clock, why) for clock in clocks for bit, why in SLOWDOWN_REASONS.items() if clock.reasons & bit]
    if slowed:
        odd = list(dict.fromkeys(f"GPU{clock.index} {why}, {clock.now} of {clock.most} MHz" for clock, why in slowed))
        yield fail_check(
            "clocks", join_first(odd), "cooling or power of this node fails: drain it (nvidia-smi -q -d PERFORMANCE)"
        )
    elif clocks:
        yield pass_check(
            "clocks", f"nothing holds back {len(clocks)} GPUs, {max(clock.most for clock in clocks)} MHz at most"
        )
