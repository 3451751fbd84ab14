"""Collect facts about each process and its node, and share them through the job's store.

Also checks that MPI and Slurm count ranks as the launcher does: if they do not, no error occurs, but every rank may run
alone.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from hpc_train.errors import UserError
from hpc_train.interfaces import Task
from hpc_train.placement.communication_environment import find_harmful_variables
from hpc_train.placement.node.cpu_binding import RankSeat, parse_cpus
from hpc_train.runtime.mpi import load_mpi
from hpc_train.runtime.store.exchange import append_to, arrive_at_gate, count_arrived, gather_from, wait_for_gate
from hpc_train.units import format_ranges

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class ProcessInfo:
    """Facts about one process, its host and the devices next to it, in JSON's types."""

    process: int
    node: int
    local: int
    host: str
    address: str
    """IPv4 address of the host on the job's network."""
    port: int
    """A TCP port that was free there a moment ago, for libraries that open a store of their own on rank 0."""
    cpus: str
    """Processors that the launcher lets it use, as Linux writes a list."""
    gpu: str | None = None
    """PCI address of its GPU."""
    near: str = ""
    """Processors next to its GPU."""
    visible_gpus: int = 0
    """Number of GPUs that it sees."""
    gpu_links: dict[str, str] = field(default_factory=dict)
    """Two PCI addresses of GPUs, with a blank between -> kind of the link between them, of local rank 0."""
    clique: str | None = None
    """NVLink domain that spans nodes, of its GPU; of local rank 0."""
    slurm: dict[str, str] = field(default_factory=dict)
    """SLURMD_NODENAME, SLURM_TOPOLOGY_ADDR and SLURM_TOPOLOGY_ADDR_PATTERN, of local rank 0."""
    nics: list[str] = field(default_factory=list)
    """Devices fit for GPU traffic, of local rank 0."""
    dropped_nics: dict[str, str] = field(default_factory=dict)
    """Other devices that are up -> why they are not fit, of local rank 0."""
    nic_of: dict[str, str] = field(default_factory=dict)
    """PCI address of a GPU -> the device that serves it best, of local rank 0."""
    nic_variables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Device -> the variables that make UCX or libfabric use it and no other, of local rank 0."""
    harmful: dict[str, str] = field(default_factory=dict)
    """Inherited variables that do harm -> their values."""
    mpi: list[int] | None = None
    """[rank, size] as the MPI library says, where the run needs MPI."""

    @property
    def seat(self) -> RankSeat:
        """The processors that this process may use, and those near its GPU."""
        return RankSeat(parse_cpus(self.cpus), parse_cpus(self.near))


_SLURM = ("SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")


def collect_process_info(
    task: Task,
    env: Mapping[str, str],
    address: str,
    gpu: str | None,
    mpi: tuple[int, int] | None,
    visible_gpus: int,
) -> ProcessInfo:
    """Collect what this process knows of itself. gpu: PCI address of the GPU it would use in the launcher's order."""
    from hpc_train.runtime.binding import NodeSurvey, find_nearby_processors, survey_node

    first = task.local == 0
    # One rank a node looks at all of its devices: with eight ranks, eight would open every GPU.
    survey = survey_node() if first and gpu is not None else NodeSurvey()
    most_ranks = -(-task.processes // task.nodes)
    return ProcessInfo(
        process=task.process,
        node=task.node,
        local=task.local,
        host=task.host,
        address=address,
        port=_find_free_port(address),
        cpus=format_ranges(os.sched_getaffinity(0)),
        gpu=gpu,
        near=format_ranges(find_nearby_processors(gpu)) if gpu else "",
        visible_gpus=visible_gpus,
        gpu_links=survey.gpu_links,
        clique=survey.cliques.get(gpu) if gpu else None,
        slurm={name: env[name] for name in _SLURM if name in env} if first else {},
        nics=survey.nics,
        dropped_nics=survey.dropped,
        nic_of=survey.nic_of,
        nic_variables=survey.nic_variables,
        harmful={variable.name: variable.value for variable in find_harmful_variables(env, most_ranks)},
        mpi=list(mpi) if mpi else None,
    )


def _find_free_port(address: str) -> int:
    try:
        with socket.create_server((address, 0)) as probe:
            return int(probe.getsockname()[1])
    except OSError:
        return 0


_FACTS_GATE = "facts/published"
_MPI_GATE = "mpi/ready"
_MPI_POLL_SECONDS = 0.002


def publish_process_info(task: Task, local_info: ProcessInfo) -> None:
    """Publish this process's ProcessInfo under a key of its node, so that process 0 reads one key per node."""
    store = _require_store(task)
    # One key per node instead of one per process: process 0 of a
    # large job then makes hundreds of reads, not tens of thousands.
    append_to(store, _name_node_key(task.node), asdict(local_info))
    arrive_at_gate(store, _FACTS_GATE, task.processes)


def gather_process_info(task: Task, timeout: timedelta) -> list[ProcessInfo]:
    """Return the ProcessInfo of all processes, in the launcher's order; for process 0.

    Raises UserError if some do not come within `timeout`.
    """
    store = _require_store(task)
    if not wait_for_gate(store, _FACTS_GATE, timeout):
        raise UserError(
            f"{count_arrived(store, _FACTS_GATE)} of {task.processes} processes said where they are within "
            f"{timeout.total_seconds():.0f} s; did the others fail? see their logs"
        )
    # A launcher may number nodes with gaps: a key that nobody wrote would block until the store's timeout.
    keys = [key for key in map(_name_node_key, range(task.nodes)) if store.check([key])]
    infos = [ProcessInfo(**entry) for entries in gather_from(store, keys) for entry in entries]
    return sorted(infos, key=lambda info: info.process)


def gather_node_info(task: Task) -> list[ProcessInfo]:
    """Return the ProcessInfo of this node's processes, by local rank. Call it once all have published theirs."""
    (entries,) = gather_from(_require_store(task), [_name_node_key(task.node)])
    return sorted((ProcessInfo(**entry) for entry in entries), key=lambda info: info.local)


def _name_node_key(node: int) -> str:
    return f"facts/node/{node}"


def _require_store(task: Task) -> Store:
    assert task.store is not None, "processes find each other through the job's store"
    return task.store


def read_mpi_rank_and_size(task: Task, timeout: timedelta) -> tuple[int, int] | None:
    """Return (rank, size) as the MPI library counts them; None without mpi4py. A collective: it initialises MPI.

    Raises UserError if other processes do not come within `timeout`.
    """
    _wait_for_ranks_before_mpi(task, timeout)
    try:
        MPI = load_mpi()
    except ImportError:
        return None
    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def _wait_for_ranks_before_mpi(task: Task, timeout: timedelta) -> None:
    """Let process 0 be the last to initialise MPI, when no other process waits for an answer of the job's store.

    mpi4py holds the interpreter's lock until all processes have come, and the store is served by a thread of process 0:
    a process that still waited for its answer would never come.
    """
    if task.store is None or task.processes == 1 or "mpi4py.MPI" in sys.modules:
        return
    if task.process != 0:
        arrive_at_gate(task.store, _MPI_GATE, task.processes)
        return
    deadline = time.monotonic() + timeout.total_seconds()
    # Not wait_for_gate: its answer may be sent before that of the process that opened the gate.
    while (arrived := count_arrived(task.store, _MPI_GATE)) < task.processes - 1:
        if time.monotonic() > deadline:
            raise UserError(
                f"{arrived + 1} of {task.processes} processes came to initialise MPI within "
                f"{timeout.total_seconds():.0f} s; did the others fail? see their logs"
            )
        time.sleep(_MPI_POLL_SECONDS)


def find_missing_mpi(launcher: str, env: Mapping[str, str]) -> str | None:
    """Return one line if srun started this process without MPI. Call it before `read_mpi_rank_and_size`.

    Open MPI would end such a process when it initialises; other libraries count each process as 0 of 1.
    """
    if launcher != "slurm" or any(name.startswith(("PMIX_", "PMI_", "PMI2_", "PALS_")) for name in env):
        return None
    return "srun gave these processes no MPI; use srun --mpi=pmix"


def read_slurm_rank_and_size(env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return (rank, size) as this process's Slurm step counts them; None outside a step, or if they are no numbers."""
    texts = env.get("SLURM_PROCID", ""), env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", ""))
    if "SLURM_STEP_ID" not in env or not all(text.isdecimal() for text in texts):
        return None
    return int(texts[0]), int(texts[1])


def compare_with_mpi(task: Task, rank_and_size: tuple[int, int] | None) -> str | None:
    """Return one line if MPI counts this process differently than the launcher does."""
    if rank_and_size is None:
        return "mpi4py is not installed (pip install 'hpc_train[mpi]')"
    if rank_and_size == (task.process, task.processes):
        return None
    rank, size = rank_and_size
    return (
        f"MPI sees process {rank} of {size} where {task.launcher} started {task.process} of {task.processes}; "
        f"start the ranks with {'srun --mpi=pmix' if task.launcher == 'slurm' else 'mpirun, or srun --mpi=pmix'}"
    )


def compare_with_slurm(task: Task, env: Mapping[str, str]) -> str | None:
    """Return one line if this process's Slurm step counts ranks differently than its innermost launcher does.

    One task a node is right for torchrun; one torchrun or mpirun for each of many tasks is a mistake.
    """
    rank_and_size = read_slurm_rank_and_size(env)
    # Under srun itself the variables are those of the launcher; they cannot disagree.
    if rank_and_size is None or task.launcher == "slurm":
        return None
    size = rank_and_size[1]
    if size in (1, task.nodes, task.processes):
        return None
    return (
        f"the Slurm step has {size} tasks on {task.nodes} nodes where {task.launcher} counts {task.processes} "
        f"processes: start {task.launcher} once per node, or start the ranks by srun itself"
    )


def find_mpi_disagreement(infos: Sequence[ProcessInfo], launcher: str, setting: str) -> str | None:
    """Return one line on the first process that MPI counts differently; None if none. setting: what needs MPI."""
    size = len(infos)
    for info in infos:
        if info.mpi is not None and info.mpi != [info.process, size]:
            rank, mpi_size = info.mpi
            return (
                f"{setting}: MPI sees process {rank} of {mpi_size} where {launcher} started {info.process} of {size}; "
                "start the ranks with mpirun, or srun --mpi=pmix"
            )
    return None
