"""The data of a shared file by way of HDF5's parallel driver (MPI-IO): all ranks open one file and write their own.

It imports neither torch nor anything of ours, so that any Python whose h5py has MPI can run it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from h5py import h5d, h5s


class Data(NamedTuple):
    """What belongs into a dataset."""

    name: str
    bytes: memoryview
    """As they lie in memory: nothing is converted."""


def write_datasets(path: Path, ranks: Any, mine: Iterable[Data]) -> None:
    """Write whole datasets of a file that has them all, with a place for each. Every rank of the communicator calls it.

    They are on the disk when this returns; so is nothing else that is new, as nothing else is written. Raises OSError.
    """
    with h5py.File(path, "r+", driver="mpio", comm=ranks, libver=("v110", "v110")) as file:
        for name, data in mine:
            dataset = h5d.open(file.id, name.encode())
            kind = dataset.get_type()
            values = np.frombuffer(data, dtype=f"V{kind.get_size()}").reshape(dataset.shape)
            dataset.write(h5s.ALL, h5s.ALL, values, kind)
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
