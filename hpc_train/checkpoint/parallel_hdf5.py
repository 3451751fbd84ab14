"""checkpoint.parallel_hdf5: the ranks as MPI knows them, where h5py and the launcher both have MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING

import h5py

from hpc_train.api import World
from hpc_train.errors import UserError
from hpc_train.runtime.mpi import load_mpi

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_ASKED = "checkpoint.parallel_hdf5=true"
_WITHOUT = "or set checkpoint.ranks_per_file=0, which shares files without MPI"


def mpi_ranks(world: World) -> Intracomm:
    """A communicator of the saves' own, in the order of our ranks. A collective: every rank calls it.

    Raises UserError where h5py is built without MPI, mpi4py is not installed, or MPI did not start the ranks.
    """
    if not h5py.get_config().mpi:
        raise UserError(
            f"{_ASKED}: this h5py is built without MPI; build it over a parallel HDF5 (pip install cython pkgconfig && "
            "CC=mpicc HDF5_MPI=ON pip install --no-binary=h5py --no-build-isolation --force-reinstall --no-deps h5py), "
            f"{_WITHOUT}"
        )
    try:
        library = load_mpi()
    except ImportError:
        raise UserError(f"{_ASKED}: install mpi4py (pip install 'hpc_train[mpi]'), {_WITHOUT}") from None
    if library.COMM_WORLD.size != world.size:
        raise UserError(
            f"{_ASKED}: MPI knows of {library.COMM_WORLD.size} processes, the job has {world.size} ranks; start the "
            f"ranks with mpirun, or srun --mpi=pmix, {_WITHOUT}"
        )
    if library.Query_thread() < library.THREAD_SERIALIZED:
        raise UserError(f"{_ASKED}: this MPI library is built without threads, and saves are one; {_WITHOUT[3:]}")
    # In the order of our ranks, which the launcher of the MPI processes need not have.
    ranks: Intracomm = library.Intracomm(library.COMM_WORLD.Split(0, world.rank))
    return ranks
