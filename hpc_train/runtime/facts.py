"""Facts: what every process knows of itself and of its node before the process group exists."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hpc_train.api import Task
from hpc_train.errors import UserError
from hpc_train.placement.binding import Seat, format_cpus, parse_cpus
from hpc_train.placement.environment import inherited

if TYPE_CHECKING:
    from torch.distributed import Store


@dataclass(frozen=True)
class Facts:
    """One process, in JSON's types."""

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
    harmful: dict[str, str] = field(default_factory=dict)
    """Inherited variables that do harm -> their values."""
    mpi: list[int] | None = None
    """[rank, size] as the MPI library says, where the run needs MPI."""

    @property
    def seat(self) -> Seat:
        return Seat(parse_cpus(self.cpus), parse_cpus(self.near))


_SLURM = ("SLURMD_NODENAME", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")


def own_facts(
    task: Task, env: Mapping[str, str], address: str, gpu: str | None = None, mpi: tuple[int, int] | None = None
) -> Facts:
    """This process's facts. gpu: PCI address of the GPU it will use."""
    from hpc_train.runtime.devices import Survey, near_gpu, survey

    first = task.local == 0
    here = survey() if first and gpu is not None else Survey()
    several = task.processes > task.nodes
    return Facts(
        process=task.process,
        node=task.node,
        local=task.local,
        host=task.host,
        address=address,
        port=_free_port(address),
        cpus=format_cpus(os.sched_getaffinity(0)),
        gpu=gpu,
        near=format_cpus(near_gpu(gpu)) if gpu else "",
        clique=here.cliques.get(gpu) if gpu else None,
        slurm={name: env[name] for name in _SLURM if name in env} if first else {},
        nics=here.nics,
        dropped_nics=here.dropped,
        nic_of=here.nic_of,
        harmful={it.name: it.value for it in inherited(env, 2 if several else 1)},
        mpi=list(mpi) if mpi else None,
    )


def _free_port(address: str) -> int:
    try:
        with socket.create_server((address, 0)) as probe:
            return int(probe.getsockname()[1])
    except OSError:
        return 0


def tell(task: Task, mine: Facts) -> None:
    """Put this process's facts into the store: one key a node, so that process 0 reads nodes, not processes."""
    store: Any = _store(task)  # torch declares `append` for none of its stores, and has it for all but files
    store.append(_key(task.node), json.dumps(asdict(mine)) + "\n")
    if store.add("facts/told", 1) == task.processes:
        store.set("facts/all", "")


def hear_all(task: Task, timeout: timedelta) -> list[Facts]:
    """Everybody's facts, in launcher order; for process 0. Raises UserError if some do not come within `timeout`."""
    import torch.distributed as dist

    store = _store(task)
    try:
        store.wait(["facts/all"], timeout)
    except dist.DistStoreError:
        came = store.add("facts/told", 0)
        raise UserError(
            f"{came} of {task.processes} processes said where they are within {timeout.total_seconds():.0f} s; "
            "did the others fail? see their logs"
        ) from None
    told = [node for node in range(task.nodes) if store.check([_key(node)])]
    return sorted((fact for text in store.multi_get([_key(node) for node in told]) for fact in _read(text)), key=_order)


def hear_node(task: Task) -> list[Facts]:
    """The facts of this node's processes, by local rank; only once all have told theirs."""
    return sorted(_read(_store(task).get(_key(task.node))), key=lambda fact: fact.local)


def _order(fact: Facts) -> int:
    return fact.process


def _read(text: bytes) -> Sequence[Facts]:
    found: list[dict[str, Any]] = [json.loads(line) for line in text.decode().splitlines()]
    return [Facts(**entry) for entry in found]


def _key(node: int) -> str:
    return f"facts/node/{node}"


def _store(task: Task) -> Store:
    assert task.store is not None, "facts are exchanged through the job's store"
    return task.store
