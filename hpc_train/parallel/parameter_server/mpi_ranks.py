"""MPI communicators of the ranks, and of groups of ranks that act as one worker."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.runtime.mpi import require_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


_ANSWER_SECONDS = 0.0005
"""Pause between two calls of the thread that answers other nodes: they wait up to so long, and the lock stays free."""


@dataclass(frozen=True)
class MpiRanks:
    """Communicators of a job, in the order of its ranks."""

    lock: threading.Lock
    """Lock around every MPI call: only one thread may be inside the library."""
    comm: MPI.Intracomm
    group: MPI.Intracomm
    """Ranks that average their gradients; then the group's rank 0 pushes for all."""
    group_index: int
    groups: int
    nodes: tuple[int, ...]
    """The node of every rank, counted from 0."""

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self.lock:
            self.comm.Barrier()

    @property
    def leads(self) -> bool:
        """Whether this rank reads and writes for its group."""
        return self.group.rank == 0


def connect_ranks(world: World, hybrid: bool) -> MpiRanks:
    """Make the communicators. A collective. hybrid: a group is a node; else a single rank.

    Raises UserError if mpi4py is not installed, MPI did not start the ranks, or the model is on a GPU.
    """
    if world.device.type != "cpu":
        raise UserError(f"parallel.server: parameters are on {world.device}; MPI windows are in CPU memory")
    MPI = require_mpi("parallel.server", world.size)
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UserError("parallel.server: this MPI library is built without threads (MPI_THREAD_SERIALIZED)")
    comm = MPI.Intracomm(MPI.COMM_WORLD.Split(0, world.rank))
    local_ranks = np.empty(world.size, dtype=np.int64)
    # Allgather of arrays: mpi4py's allgather of objects would unpickle what other ranks send.
    comm.Allgather(np.array([world.local_rank], dtype=np.int64), local_ranks)
    nodes = _number_nodes(local_ranks.tolist())
    lock = threading.Lock()
    color = nodes[world.rank] if hybrid else world.rank
    group = MPI.Intracomm(comm.Split(color, world.rank))
    if nodes[-1] > 0:
        _check_windows(comm, MPI)
        threading.Thread(target=_answer_one_sided, args=(comm.Dup(), lock), name="mpi", daemon=True).start()
    return MpiRanks(lock, comm, group, color, max(nodes) + 1 if hybrid else world.size, nodes)


def _check_windows(ranks: MPI.Comm, library: ModuleType) -> None:
    try:
        library.Win.Allocate(8, 1, comm=ranks).Free()
    except library.Exception as error:
        raise UserError(
            f"parallel.server: this MPI library has no one-sided communication between nodes ({error}); with Open MPI "
            "set OMPI_MCA_osc=ucx or OMPI_MCA_osc=pt2pt, in a job by launch.setup"
        ) from None


def _answer_one_sided(ranks: MPI.Comm, lock: threading.Lock) -> None:
    """Call MPI periodically, so that it serves other nodes' reads and writes while this rank computes or waits.

    Between nodes one-sided communication may need its target to call MPI; within a node it is shared memory.
    """
    while True:
        with lock:
            ranks.Iprobe()
        time.sleep(_ANSWER_SECONDS)


def _number_nodes(local_ranks: list[int]) -> tuple[int, ...]:
    """Return the node of each rank; a new node begins at each local rank 0."""
    nodes, node = [], -1
    for local in local_ranks:
        node += local == 0
        nodes.append(node)
    return tuple(nodes)


def spread_evenly(index: int, count: int, ranks: int) -> int:
    """Return the rank of item `index` of `count` items that are spread evenly over the ranks."""
    return index * ranks // count
