"""The MPI library, initialised as everything here needs it."""

from __future__ import annotations

from types import ModuleType


def load_mpi() -> ModuleType:
    """mpi4py.MPI. The first call initialises MPI. Raises ImportError where mpi4py is not installed.

    One thread at a time, because Open MPI 4 has no one-sided communication between nodes for any number of them
    (MPI_ERR_WIN from every window).
    """
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    return MPI
