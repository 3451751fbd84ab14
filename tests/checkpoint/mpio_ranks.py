"""One rank of mpirun for test_parallel_hdf5.py, in a Python that has an h5py with MPI and need not have torch.

It writes the datasets of its pickle with the module whose path it is given.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from pathlib import Path

os.environ["H5PY_ALWAYS_USE_MPI"] = "1"  # Debian has both kinds


def main(module: str, file: str, pickles: str) -> None:
    """Write the datasets; exits with a code of its own where HDF5 fails."""
    from mpi4py import MPI

    spec = importlib.util.spec_from_file_location("mpio", module)
    assert spec is not None
    assert spec.loader is not None
    mpio = importlib.util.module_from_spec(spec)
    sys.modules["mpio"] = mpio
    spec.loader.exec_module(mpio)
    ranks = MPI.COMM_WORLD
    assert mpio.h5py.get_config().mpi, f"{mpio.h5py.__file__} has no MPI"
    mine = pickle.loads(Path(pickles, str(ranks.rank)).read_bytes())
    mpio.write_datasets(Path(file), ranks, [mpio.DatasetBytes(name, memoryview(data)) for name, data in mine])
    print(f"rank {ranks.rank} of {ranks.size}")


if __name__ == "__main__":
    main(*sys.argv[1:])
