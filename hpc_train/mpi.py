"""Load the MPI library with the threading level that all of hpc_train needs."""

from __future__ import annotations

from types import ModuleType


def load_mpi() -> ModuleType:
    """Return the module mpi4py.MPI. The first call initialises MPI. Raises ImportError without mpi4py.

    Threads may call MPI one at a time (MPI_THREAD_SERIALIZED): with MPI_THREAD_MULTIPLE, Open MPI 4 has no one-sided
    communication between nodes (MPI_ERR_WIN from every window).
    """
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    return MPI
