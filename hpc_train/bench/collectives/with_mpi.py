"""MPI by mpi4py, on buffers of the host, for ranks that an MPI launcher started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpc_train.api import World
from hpc_train.bench.collectives.backends import Call
from hpc_train.bench.collectives.definitions import Operation
from hpc_train.bench.collectives.groups import Group
from hpc_train.bench.collectives.own import Wire
from hpc_train.errors import UserError
from hpc_train.runtime.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_STARTED_BY = ("OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "PMIX_RANK")
"""Set by Open MPI's and MPICH's mpirun, and by srun --mpi=pmix. Under --mpi=none and pmi2 some libraries abort."""


def started_by_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether an MPI library can be initialised here without harm, as far as the environment tells."""
    env = os.environ if env is None else env
    return any(name in env for name in _STARTED_BY)


class MpiBackend:
    """See backends.Backend."""

    name = "mpi"
    device = torch.device("cpu")
    in_place = frozenset({"broadcast"})

    def __init__(self, world: World) -> None:
        """Raises UserError, one line, if MPI does not know the ranks of this job."""
        try:
            library = load_mpi()
        except ImportError:
            raise UserError("--backend mpi: install mpi4py (pip install 'hpc_train[mpi]')") from None
        if library.COMM_WORLD.size != world.size:
            raise UserError(
                f"--backend mpi: MPI knows of {library.COMM_WORLD.size} processes, the job has {world.size} ranks; "
                "start the ranks with mpirun, or srun --mpi=pmix"
            )
        self._everyone: MPI.Intracomm = library.COMM_WORLD

    def connect(self, group: Group) -> MpiConnection:
        """See backends.Backend."""
        return MpiConnection(self._everyone.Split(color=group.ranks[0], key=group.index))

    def finish(self) -> None:
        """Nothing is queued."""


class MpiConnection:
    """See backends.Connection."""

    def __init__(self, ranks: MPI.Comm) -> None:
        self._ranks = ranks

    def wire(self) -> Wire:
        """See backends.Connection."""
        return _MpiWire(self._ranks)

    def call(self, operation: Operation, sent: Tensor, received: Tensor) -> Call:
        """See backends.Connection."""
        ranks, give, take = self._ranks, sent.numpy(), received.numpy()
        to, source = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size
        calls = {
            "all_reduce": lambda: ranks.Allreduce(give, take),
            "all_gather": lambda: ranks.Allgather(give, take),
            "reduce_scatter": lambda: ranks.Reduce_scatter_block(give, take),
            "broadcast": lambda: ranks.Bcast(take, root=0),
            "reduce": lambda: ranks.Reduce(give, take, root=0),
            "all_to_all": lambda: ranks.Alltoall(give, take),
            "send_recv": lambda: ranks.Sendrecv(give, to, recvbuf=take, source=source),
        }
        call: Call = calls[operation.name]
        return call


class _MpiWire:
    def __init__(self, ranks: MPI.Comm) -> None:
        self.size, self.index, self._ranks = ranks.size, ranks.rank, ranks

    def exchange(self, sent: Tensor | None, to: int, received: Tensor | None, source: int) -> None:
        requests = []
        if received is not None:
            requests.append(self._ranks.Irecv(received.numpy(), source))
        if sent is not None:
            requests.append(self._ranks.Isend(sent.numpy(), to))
        for request in requests:
            request.Wait()
