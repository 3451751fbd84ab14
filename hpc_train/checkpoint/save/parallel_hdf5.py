"""Write the datasets of a shared file through HDF5's parallel driver (MPI-IO): each rank writes its own.

This module imports neither torch nor other modules of ours, so that any Python whose h5py has MPI can run it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5s


class DatasetBytes(NamedTuple):
    """The content of a dataset."""

    name: str
    bytes: memoryview
    """The elements as they are in memory; HDF5 converts nothing."""


def write_datasets(path: Path, ranks: Any, datasets: Iterable[DatasetBytes]) -> None:
    """Write whole datasets of a file in which all datasets exist, and synchronise it. A collective of `ranks`.

    Only the data changes, not the HDF5 structure. Raises OSError.
    """
    with h5py.File(path, "r+", driver="mpio", comm=ranks, libver=("v110", "v110")) as file:
        for name, data in datasets:
            dataset = h5d.open(file.id, name.encode())
            kind = dataset.get_type()
            values = np.frombuffer(data, dtype=f"V{kind.get_size()}").reshape(dataset.shape)
            dataset.write(h5s.ALL, h5s.ALL, values, kind)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
