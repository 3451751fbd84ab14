"""Find this rank's GPU, nearest NIC and CPUs, and bind the rank to its share of the node's processors and memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hpc_train.cluster.local_nics import NicPort, read_nic_ports
from hpc_train.cluster.spec import Cluster, Nic
from hpc_train.cluster.this_machine import describe_this_node
from hpc_train.config.launch import LaunchConfig
from hpc_train.placement.node.cpu_binding import (
    CpuBinding,
    RankSeat,
    assign_cpus,
    bind_process,
    parse_cpus,
    read_processors,
)
from hpc_train.placement.node.nic_assignment import NO_PORT_UP, assign_nics
from hpc_train.placement.node.nic_variables import name_nics
from hpc_train.units import format_ranges

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeSurvey:
    """GPUs and NICs of a node, read by one process for all of them."""

    cliques: dict[str, str] = field(default_factory=dict)
    """PCI address of a GPU -> NVLink domain that spans nodes."""
    fit_nics: list[Nic] = field(default_factory=list)
    """NICs fit for GPU traffic."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Other devices that are up -> why they are not fit."""
    nic_of: dict[str, str] = field(default_factory=dict)
    """PCI address of a GPU -> the device that serves it."""
    gpu_links: dict[str, str] = field(default_factory=dict)
    """Two PCI addresses of GPUs, with a blank between -> kind of the link between them."""
    nic_variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Device of a NIC -> the variables that make UCX or libfabric use it and no other."""

    @property
    def nics(self) -> list[str]:
        """Devices fit for GPU traffic."""
        return [nic.device or nic.id for nic in self.fit_nics]


def find_pci_address(device: torch.device) -> str | None:
    """Return the full PCI address of a torch device in lower case (0000:07:00.0); None for the CPU."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    # The function of a GPU is always 0, and torch does not tell it.
    bus = getattr(properties, "pci_bus_id", None)
    return None if bus is None else f"{properties.pci_domain_id:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"


def find_nearby_processors(pci: str, root: Path = Path("/")) -> frozenset[int]:
    """Return the processors next to a PCI device; empty if the machine does not tell."""
    try:
        return parse_cpus((root / "sys/bus/pci/devices" / pci / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def survey_node(
    read: Callable[[], Cluster] = describe_this_node,
    read_ports: Callable[[Iterable[Nic]], dict[str, NicPort]] = read_nic_ports,
) -> NodeSurvey:
    """Read the GPUs and NICs of this node. If that fails it warns and returns nothing: it must not stop a job."""
    try:
        cluster = read()
        node = cluster.nodes[0]
        assignment = assign_nics(node, cluster.links)
        fit = [nic for nic in node.nics if nic.id not in assignment.dropped]
        ports = read_ports(fit)
    except Exception as error:
        log.warning("the GPUs and NICs of this node could not be read", exc_info=error)
        return NodeSurvey()
    devices = {nic.id: nic.device or nic.id for nic in node.nics}
    pci = {gpu.id: gpu.pci or gpu.id for gpu in node.gpus}
    return NodeSurvey(
        cliques={pci[gpu.id]: gpu.clique for gpu in node.gpus if gpu.clique is not None},
        fit_nics=fit,
        dropped={devices[nic]: reason for nic, reason in assignment.dropped.items() if reason != NO_PORT_UP},
        nic_of={pci[gpu]: devices[nic] for gpu, nic in assignment.nic_of.items()},
        gpu_links={
            f"{pci[link.a]} {pci[link.b]}": link.kind for link in cluster.links if link.a in pci and link.b in pci
        },
        nic_variables=name_nics(fit, ports),
    )


@dataclass(frozen=True)
class RankBinding:
    """Processors, memory and threads that a rank was bound to."""

    binding: CpuBinding
    threads: int
    """Threads of one torch operation."""
    memory_problem: str | None = None
    """Why the memory is not bound though its node is known."""

    def describe(self) -> str:
        """Describe in a few words what this rank is bound to, or why it is not."""
        if not self.binding.cpus:
            return self.binding.reason
        description = f"CPUs {format_ranges(self.binding.cpus)}, {self.binding.reason}"
        if self.binding.memory is None:
            return description
        if self.memory_problem:
            return f"{description}; memory not bound: {self.memory_problem}"
        return f"{description}, and memory of NUMA node {self.binding.memory}"

    def as_json(self) -> dict[str, Any]:
        """Return this rank's fields of rankmap.json."""
        cpus = self.binding.cpus or os.sched_getaffinity(0)
        memory = None if self.memory_problem else self.binding.memory
        return {"cpus": format_ranges(cpus), "memory": memory, "threads": self.threads, "binding": self.binding.reason}


def bind_rank(
    launch: LaunchConfig, seats: Sequence[RankSeat], local: int, env: MutableMapping[str, str], mpi: bool
) -> RankBinding:
    """Bind this process to its share of the node, and give torch as many threads as that has cores.

    seats: of all ranks of the node, by local rank; `local` is this one's. A number of threads that the user has set
    stays; if it is more than a rank's share, no rank is bound. mpi: MPI moves data in this run, so its launcher binds:
    MPI libraries wait by spinning, and must know which cores are theirs.
    """
    # More threads than processors would fight for them, so then nothing is bound.
    requested = launch.threads or read_user_threads(env, seats)
    binding = _choose_binding(launch, seats, local, requested)
    if mpi and binding.cpus:
        binding = CpuBinding((), 0, None, "not bound: MPI's own launcher does that (mpirun --bind-to, srun --cpu-bind)")
    try:
        problem = bind_process(binding)
    except OSError as error:
        binding = replace(binding, cpus=(), memory=None, reason=f"not bound: {error.strerror}")
        problem = None
    if binding.cpus:
        threads = requested or min(binding.cores, _read_number(env) or binding.cores)
        env["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    return RankBinding(binding, torch.get_num_threads(), problem)


def _choose_binding(launch: LaunchConfig, seats: Sequence[RankSeat], local: int, threads: int | None) -> CpuBinding:
    if not launch.bind:
        return CpuBinding((), 0, None, "not bound: launch.bind=false")
    shares = assign_cpus(seats, read_processors())
    fewest = min((len(share.cpus) for share in shares if share.cpus), default=0)
    if fewest and threads is not None and threads > fewest:
        return CpuBinding((), 0, None, f"not bound: {threads} threads per rank, {fewest} processors")
    return shares[local]


def read_user_threads(env: Mapping[str, str], seats: Sequence[RankSeat]) -> int | None:
    """Return OMP_NUM_THREADS if the user has set it; None if it looks like a launcher's default.

    Launchers set the processors of a task, or those of the node divided by its ranks.
    """
    number = _read_number(env)
    all_processors = len(frozenset[int]().union(*(seat.allowed for seat in seats)))
    # torchrun sets 1, sites often set the processors of the task: neither says what this user wants.
    defaults = {env.get("SLURM_CPUS_PER_TASK", "1"), str(max(1, all_processors // len(seats)))}
    return None if str(number) in defaults else number


def _read_number(env: Mapping[str, str]) -> int | None:
    text = env.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(text) if text.isdecimal() and int(text[:9]) > 0 else None
