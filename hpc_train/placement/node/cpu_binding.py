"""Divide the processors and memory of a node among its ranks, and bind a process to its share."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

_MPOL_PREFERRED = 1
"""MPOL_PREFERRED of linux/mempolicy.h. Not MPOL_BIND: a full NUMA node would kill the rank instead of slowing it."""
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237, "ppc64le": 261}
"""Number of the system call; glibc has no function for it."""


@dataclass(frozen=True)
class RankSeat:
    """The facts about one local rank that decide its share of the node."""

    allowed: frozenset[int]
    """Processors that the launcher allows it to use."""
    near: frozenset[int] = frozenset()
    """Processors next to its GPU; empty without a GPU, or if unknown."""


@dataclass(frozen=True)
class CpuBinding:
    """The processors and memory that one rank is bound to."""

    cpus: tuple[int, ...]
    """Processors to bind to; empty: keep the launcher's binding."""
    cores: int
    """Number of physical cores among them, and so of threads that are useful."""
    memory: int | None
    """NUMA node of all of them; None if they are on several, or if unknown."""
    reason: str


@dataclass(frozen=True)
class NodeProcessors:
    """The processors of this node: their NUMA nodes and physical cores."""

    numa: Mapping[int, frozenset[int]]
    """Processors by NUMA node; nodes without processors are left out."""
    siblings: Mapping[int, frozenset[int]]
    """Hardware threads of each processor's core, the processor itself included."""

    def find_numa_node(self, cpus: Iterable[int]) -> int | None:
        """Return the NUMA node that holds all these processors; None if none does, or the machine has only one."""
        numbers = frozenset(cpus)
        nodes = [node for node, members in self.numa.items() if numbers <= members]
        return nodes[0] if nodes and len(self.numa) > 1 else None

    def list_cores(self, cpus: frozenset[int]) -> list[tuple[int, ...]]:
        """List the physical cores among these processors, whole or in part, grouped by NUMA node."""
        place = {cpu: node for node, members in self.numa.items() for cpu in members}
        groups = {tuple(sorted(self.siblings.get(cpu, frozenset({cpu})) & cpus)) for cpu in cpus}
        return sorted(groups, key=lambda core: (place.get(core[0], -1), core))


def read_processors(root: Path = Path("/")) -> NodeProcessors:
    """Read the node's processors from sysfs under `root`; missing facts are empty."""
    system = root / "sys/devices/system"
    numa = {int(path.parent.name[4:]): _read_list(path) for path in system.glob("node/node[0-9]*/cpulist")}
    threads = {
        int(path.parts[-3][3:]): _read_list(path) for path in system.glob("cpu/cpu[0-9]*/topology/thread_siblings_list")
    }
    return NodeProcessors({node: cpus for node, cpus in sorted(numa.items()) if cpus}, threads)


def parse_cpus(text: str) -> frozenset[int]:
    """Parse Linux's list of processors, such as 0-3,8. Raises ValueError for other text."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            numbers.update(range(int(low), int(high or low) + 1))
    return frozenset(numbers)


def assign_cpus(seats: Sequence[RankSeat], processors: NodeProcessors) -> list[CpuBinding]:
    """Assign processors to every local rank of a node, in the ranks' order.

    A rank gets whole physical cores next to its GPU, shared evenly with the other ranks there; without GPUs its share
    of all that is allowed. All are left alone where the launcher has given each its own processors already, and where
    there are more ranks than processors.
    """
    # Disjoint sets are the launcher's own binding (srun --cpu-bind, mpirun --bind-to), which the user may have chosen.
    if len(seats) > 1 and all(not a.allowed & b.allowed for a, b in combinations(seats, 2)):
        return [
            _leave_unbound(seat, processors, "the launcher has given each rank its own processors") for seat in seats
        ]
    preferred = [seat.allowed & seat.near or seat.allowed for seat in seats]
    if any(a & b and a != b for a, b in combinations(preferred, 2)):
        return [_leave_unbound(seat, processors, "the ranks' processors overlap in part") for seat in seats]
    bindings: dict[int, CpuBinding] = {}
    for cpus in set(preferred):
        sharing = [index for index, preferred_cpus in enumerate(preferred) if preferred_cpus == cpus]
        if len(cpus) < len(sharing):
            why = f"{len(sharing)} ranks share {len(cpus)} CPUs"
            return [_leave_unbound(seat, processors, why) for seat in seats]
        bindings |= zip(sharing, _split_evenly(cpus, len(sharing), processors), strict=True)
    return [_name_binding(bindings[index], seats[index]) for index in range(len(seats))]


def _leave_unbound(seat: RankSeat, processors: NodeProcessors, why: str) -> CpuBinding:
    return CpuBinding((), len(processors.list_cores(seat.allowed)), None, f"not bound: {why}")


def _name_binding(binding: CpuBinding, seat: RankSeat) -> CpuBinding:
    if seat.near and not seat.allowed & seat.near:
        reason = "a share of the node: this job may use no CPU next to the GPU"
    else:
        reason = "next to its GPU" if seat.near else "its share of the node"
    return CpuBinding(binding.cpus, binding.cores, binding.memory, reason)


def _split_evenly(cpus: frozenset[int], ranks: int, processors: NodeProcessors) -> list[CpuBinding]:
    """Split processors evenly, by physical cores if there is one for each rank, else by hardware threads."""
    shares = _make_shares(cpus, ranks, processors)
    flat = [tuple(sorted(cpu for core in share for cpu in core)) for share in shares]
    return [
        CpuBinding(cpus_of_rank, len(share), processors.find_numa_node(cpus_of_rank), "")
        for cpus_of_rank, share in zip(flat, shares, strict=True)
    ]


def split_cpus(cpus: frozenset[int], parts: int, processors: NodeProcessors) -> list[tuple[int, ...]]:
    """Split processors evenly; physical cores stay whole if there are at least as many as parts."""
    return [tuple(sorted(cpu for core in share for cpu in core)) for share in _make_shares(cpus, parts, processors)]


def _make_shares(cpus: frozenset[int], parts: int, processors: NodeProcessors) -> list[list[tuple[int, ...]]]:
    cores = processors.list_cores(cpus)
    if len(cores) < parts:
        cores = [(cpu,) for core in cores for cpu in core]
    return [cores[index * len(cores) // parts : (index + 1) * len(cores) // parts] for index in range(parts)]


def bind_process(binding: CpuBinding) -> str | None:
    """Bind this process, with all present and future threads. Returns why its memory is not bound, or None.

    Raises OSError if the kernel refuses the processors.
    """
    if not binding.cpus:
        return None
    done: set[str] = set()
    # The kernel binds one thread at a time, and libraries have started some at import: repeat until none is new.
    while new := {entry.name for entry in Path("/proc/self/task").iterdir()} - done:  # one may start another meanwhile
        for thread in new:
            try:
                os.sched_setaffinity(int(thread), binding.cpus)
            except ProcessLookupError:
                continue
        done |= new
    return None if binding.memory is None else prefer_numa_memory(binding.memory)


def prefer_numa_memory(node: int) -> str | None:
    """Make this thread, and those it starts, prefer memory of a NUMA node. Returns why that failed, or None."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return f"the system call is not known for {platform.machine()}"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit fewer than maxnode says (get_nodes in mm/mempolicy.c).
    if libc.syscall(number, _MPOL_PREFERRED, mask, len(mask) * bits + 1):
        return os.strerror(ctypes.get_errno())
    return None


def _read_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpus(path.read_text())
    except (OSError, ValueError):
        return frozenset()
