"""Limits of this machine and of this session: shared memory, locked memory, open files, the run's file system."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpc_train.cluster.filesystems import FileSystem, filesystem_of
from hpc_train.doctor.finding import Finding, bad, ok, warn

GIB = 2**30
LEAST_SHARED, LEAST_FILES = 1.0, 4096
"""GiB free in /dev/shm; file descriptors of a process."""
FULL = 0.97
"""Share of a file system beyond which little is left."""


def limits(run_dir: Path, several_nodes: bool) -> Iterator[Finding]:
    """Every check of this file."""
    yield shared_memory(_free_gib("/dev/shm"))
    yield memlock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], rdma=_has_rdma())
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield run_folder(run_dir, filesystem_of(run_dir), several_nodes)
    yield room(run_dir)


def shared_memory(free: float | None) -> Finding:
    """/dev/shm, which NCCL, MPI and data loaders exchange through. free: GiB."""
    if free is None:
        return bad("/dev/shm", "is not there", "mount it; in a container: --ipc=host, or --shm-size=16g")
    text = f"{free:.1f} GiB free"
    if free >= LEAST_SHARED:
        return ok("/dev/shm", text)
    what = "NCCL and MPI may fail with a bus error; remove what jobs have left there"
    return warn("/dev/shm", text, f"{what}, and start containers with --ipc=host or --shm-size=16g")


def memlock(limit: int, rdma: bool) -> Finding:
    """Memory that may be locked, in bytes; RDMA registers what it sends."""
    if limit == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    text = f"{limit / 2**20:.0f} MiB"
    if not rdma:
        return ok("memlock", f"{text}; there is no RDMA device here that would need more")
    advice = "RDMA needs it unlimited: `* - memlock unlimited` in /etc/security/limits.conf, LimitMEMLOCK=infinity for "
    return bad("memlock", text, f"{advice}slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf")


def open_files(soft: int, hard: int) -> Finding:
    """File descriptors of a process: a rank opens one or more for each rank that it talks to."""
    text = f"{soft} open files (at most {hard})" if soft != resource.RLIM_INFINITY else "any number of open files"
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return ok("nofile", text)
    return warn("nofile", text, "few for a job of many ranks: ulimit -n 65536 before it starts (launch.setup)")


def run_folder(folder: Path, found: FileSystem | None, several_nodes: bool) -> Finding:
    """Which file system runs are written to, and whether all nodes of a job see it."""
    if found is None:
        return warn("run_dir", f"{folder} is on no file system that the system lists", "choose another with run_dir=")
    text = f"{folder} is on {found.kind}, mounted at {found.mount}"
    if several_nodes and found.kind in ("tmpfs", "ramfs"):
        return bad("run_dir", text, "it is in this node's memory: choose a shared file system with run_dir=")
    if several_nodes and not found.shared:
        advice = "other nodes may not see it: give a folder on the shared file system with run_dir="
        return warn("run_dir", text, advice)
    return ok("run_dir", text)


def room(folder: Path) -> Finding:
    """Whether it can be written, and has space."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return bad("room", f"{folder} cannot be written by this user", "choose another with run_dir=")
    total, _, free = shutil.disk_usage(folder)
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free for runs"
    if total and free / total < 1 - FULL:
        return warn(
            "room", text, "checkpoints may not fit: remove old ones (checkpoint.keep), or choose another run_dir"
        )
    return ok("room", text)


def _free_gib(folder: str) -> float | None:
    try:
        return shutil.disk_usage(folder).free / GIB
    except OSError:
        return None


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())
