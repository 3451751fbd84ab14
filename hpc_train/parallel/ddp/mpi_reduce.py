"""parallel.reduce_with=mpi: gradients added up by the MPI library that started the ranks.

Open MPI moves the data of ranks on one host through shared memory, gloo through sockets.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpc_train.api import World
from hpc_train.errors import UserError
from hpc_train.parallel.ddp.bucket import Bucket
from hpc_train.runtime.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_PAUSE = 1e-4
"""Seconds between two looks at whether the other ranks have come."""
_START = "start the ranks with mpirun, or srun --mpi=pmix"


class MpiReduce:
    """All-reduce in place, in the memory of the bucket.

    MPI libraries wait by spinning, which takes the core away from backward where a rank has but one. So a rank sleeps
    until all have their gradients, and only then calls a reduction, which then waits for nobody.
    """

    def __init__(self, ranks: MPI.Intracomm) -> None:
        self._ranks = ranks

    def reduce(self, bucket: Bucket) -> None:
        """See bucket.Method."""
        from mpi4py import MPI

        bucket.buffer.div_(self._ranks.size)
        arrival = self._ranks.Ibarrier()
        while not arrival.Test():
            time.sleep(_PAUSE)
        self._ranks.Allreduce(MPI.IN_PLACE, bucket.buffer.numpy())


def make_mpi(world: World) -> MpiReduce:
    """The reduction over all ranks, on a communicator of its own. A collective: every rank calls it.

    Raises UserError if mpi4py is not installed, the ranks were not started by MPI, the library does not let a thread
    beside the main one call it, or the gradients are on a GPU.
    """
    if world.device.type != "cpu":
        raise UserError(f"parallel.reduce_with=mpi: gradients are on {world.device}; use parallel.reduce_with=torch")
    try:
        MPI = load_mpi()
    except ImportError:
        raise UserError("parallel.reduce_with=mpi: install mpi4py (pip install 'hpc_train[mpi]')") from None
    if MPI.COMM_WORLD.size != world.size:
        raise UserError(
            f"parallel.reduce_with=mpi: MPI knows of {MPI.COMM_WORLD.size} processes, the job has {world.size} ranks; "
            f"{_START}"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UserError("parallel.reduce_with=mpi: this MPI library is built without threads; use reduce_with=torch")
    # In the order of our ranks, which the launcher of the MPI processes need not have.
    return MpiReduce(MPI.Intracomm(MPI.COMM_WORLD.Split(0, world.rank)))
