"""index.h5 lists a step's tensors and files, for people and their HDF5 tools.

It contains no tensors and no views of them. HDF5 has no checksum for the data of our shard files (contiguous, so that
they are written at the speed of the disk), and a virtual dataset shows zeros where a file is missing: a tool would take
damage for numbers. So read values with load_step or `checkpoint export`, which verify every byte. The list has HDF5's
own checksums, and the manifest has a checksum of the whole file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError, Problem, format_error
from hpc_train.checkpoint.format.hdf5_layout import make_anonymous_file, open_hdf5
from hpc_train.checkpoint.format.manifest import Manifest
from hpc_train.checkpoint.storage.file_system import checksum_bytes, write_durable_file
from hpc_train.regular_files import read_regular, sync_directory

INDEX_FILE = "index.h5"
MAX_INDEX_BYTES = 1 << 30
"""Maximum bytes of an index; a manifest, which lists the same tensors, has the same limit."""
OnTensors = Callable[[int], object]
"""Takes the number of tensors done, to show progress."""
_TENSORS, _FILES, _ABOUT = "tensors", "files", "about"
_TEXT = (
    "A list of the tensors of this checkpoint step, without their values. Verify the step with `hpc-train checkpoint "
    "verify`; read it with hpc_train.checkpoint.load_step, or write it in "
    "another format with `hpc-train checkpoint export`."
)


def count_mappings(manifest: Manifest) -> int:
    """Return the number of parts of all tensors in all files."""
    return sum(len(layout.files) * len(layout.tensors) for layout in manifest.step_layout.layouts)


def build_index(manifest: Manifest, on_tensors: OnTensors = lambda done: None) -> bytes:
    """Build the content of index.h5. Raises CheckpointError or OSError if there is no room for a small file."""

    def fill(path: Path) -> None:
        with open_hdf5(path, "w", interval=1) as file:
            file.attrs[_ABOUT] = _TEXT
            for name, table in _read_tables(manifest).items():
                chunks = (min(len(table), 4096),) if len(table) else None
                storage = {"chunks": chunks, "fletcher32": True, "compression": 1} if chunks else {}
                file.create_dataset(name, data=table, track_times=False, **storage)
        on_tensors(len(manifest.step_layout.tensors))

    with make_anonymous_file(fill) as (_, content):
        return content.read()


def write_index(path: Path, manifest: Manifest, on_tensors: OnTensors = lambda done: None) -> Path:
    """Write, or replace, the index of the step in directory `path`; returns its file. Raises as build_index."""
    target = path / INDEX_FILE
    beside = path / f".{INDEX_FILE}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    try:
        write_durable_file(beside, build_index(manifest, on_tensors))
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path)
    return target


def find_index_problem(path: Path, manifest: Manifest) -> Problem | None:
    """Return what is wrong with the index of a step, if anything; a step without an index is sound.

    libhdf5 never opens the file: on changed bytes its C code can loop for ever. Instead the bytes are compared with the
    checksum in the manifest or, if the index was rewritten later, with a newly built index.
    """
    try:
        content = read_regular(path / INDEX_FILE, MAX_INDEX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Problem(INDEX_FILE, f"it cannot be read: {error.strerror}")
    if manifest.index == checksum_bytes(content):
        return None
    try:
        if content == build_index(manifest):
            return None
    except (OSError, CheckpointError) as error:
        return Problem(INDEX_FILE, f"it cannot be compared: {format_error(error)}")
    return Problem(
        INDEX_FILE, "its content is not what was committed; `hpc-train checkpoint inspect --index` writes it again"
    )


def _read_tables(manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Return the datasets of the index: tensors, and files."""
    tensors = manifest.step_layout.tensors
    dimensions = max([1, *(len(tensor.shape) for tensor in tensors)])
    rows = [
        (
            tensor.name.encode(),
            tensor.dtype.encode(),
            len(tensor.shape),
            (*tensor.shape, *(0,) * (dimensions - len(tensor.shape))),
        )
        for tensor in tensors
    ]
    of_tensor = [("name", _read_text(row[0] for row in rows)), ("dtype", _read_text(row[1] for row in rows))]
    kind = np.dtype([*of_tensor, ("dimensions", "<i4"), ("shape", "<i8", (dimensions,))])
    files = [file.name.encode() for file in manifest.files]
    return {
        _TENSORS: np.array(rows, dtype=kind),
        _FILES: np.array(files, dtype=_read_text(files)),
    }


def _read_text(values: Any) -> str:
    """Return the numpy type of a column of texts."""
    return f"S{max([1, *map(len, values)])}"
