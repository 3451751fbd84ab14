"""Load the MPI library with the threading level that all of hpc_train needs, and check that it started the job."""

from __future__ import annotations

from types import ModuleType

from hpc_train.errors import UserError


def load_mpi() -> ModuleType:
    """Return the module mpi4py.MPI. The first call initialises MPI. Raises ImportError without mpi4py.

    Threads may call MPI one at a time (MPI_THREAD_SERIALIZED): with MPI_THREAD_MULTIPLE, Open MPI 4 has no one-sided
    communication between nodes (MPI_ERR_WIN from every window).
    """
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    return MPI


def require_mpi(setting: str, ranks: int, otherwise: str = "") -> ModuleType:
    """Return the module mpi4py.MPI for a setting that needs it.

    otherwise: ends the message with another way out. Raises UserError if mpi4py is not installed, or if MPI did not
    start the `ranks` of this job.
    """
    try:
        library = load_mpi()
    except ImportError:
        raise UserError(f"{setting}: install mpi4py (pip install 'hpc_train[mpi]'){otherwise}") from None
    if library.COMM_WORLD.size != ranks:
        raise UserError(
            f"{setting}: MPI knows of {library.COMM_WORLD.size} processes, the job has {ranks} ranks; start the ranks "
            f"with mpirun, or srun --mpi=pmix{otherwise}"
        )
    return library
