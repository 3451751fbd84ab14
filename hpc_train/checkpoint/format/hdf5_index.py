"""index.h5: a list of a step's tensors and files, for people and their HDF5 tools.

It contains no tensors, and no views of them. HDF5 has no checksum for the data of our shard files (contiguous, so that
they are written at the speed of the disk), and a virtual dataset shows zeros where a file is missing: a tool would take
damage for numbers. So read values with `load` or `export`, which verify every byte. The list itself has HDF5's
checksums, and the manifest has one of the whole file.
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
from hpc_train.checkpoint.storage.file_system import checksum_bytes, sync_directory, write_durable_file
from hpc_train.regular_files import read_regular

INDEX_FILE = "index.h5"
MAX_INDEX_BYTES = 1 << 30
"""Maximum bytes of an index, as of a manifest: it lists the same tensors."""
ReportProgress = Callable[[int], object]
_TENSORS, _FILES, _ABOUT = "tensors", "files", "about"
_TEXT = (
    "A list of the tensors of this checkpoint step, without their values. Verify the step with `hpc-train checkpoint "
    "verify`; read it with hpc_train.checkpoint.load_step, or write it in "
    "another format with `hpc-train checkpoint export`."
)


def count_mappings(manifest: Manifest) -> int:
    """Return the number of parts of all tensors in all files."""
    return sum(len(layout.files) * len(layout.tensors) for layout in manifest.holdings.layouts)


def build_index(manifest: Manifest, tell: ReportProgress = lambda done: None) -> bytes:
    """The content of index.h5. Raises CheckpointError, or OSError, where there is no room for a small file.

    tell: is called with the tensors that are done.
    """

    def fill(path: Path) -> None:
        with open_hdf5(path, "w", interval=1) as file:
            file.attrs[_ABOUT] = _TEXT
            for name, table in _tables(manifest).items():
                chunks = (min(len(table), 4096),) if len(table) else None
                kept = {"chunks": chunks, "fletcher32": True, "compression": 1} if chunks else {}
                file.create_dataset(name, data=table, track_times=False, **kept)
        tell(len(manifest.holdings.tensors))

    with make_anonymous_file(fill) as (_, content):
        return content.read()


def write_index(path: Path, manifest: Manifest, tell: ReportProgress = lambda done: None) -> Path:
    """Make the index of the step in `path`, or make it again; returns its file. Raises as index_image does."""
    target = path / INDEX_FILE
    beside = path / f".{INDEX_FILE}.{os.getpid()}"
    beside.unlink(missing_ok=True)
    try:
        write_durable_file(beside, build_index(manifest, tell))
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path)
    return target


def find_index_problem(path: Path, manifest: Manifest) -> Problem | None:
    """Return what is wrong with the index of a step, if anything; a step without an index is sound.

    libhdf5 never opens the file: on changed bytes its C code can loop for ever. The bytes are compared instead: with
    the checksum in the manifest, or with a new index where somebody wrote it again later.
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


def _tables(manifest: Manifest) -> dict[str, NDArray[Any]]:
    """Return the datasets of the index: tensors, and files."""
    tensors = manifest.holdings.tensors
    dimensions = max([1, *(len(it.shape) for it in tensors)])
    rows = [
        (it.name.encode(), it.dtype.encode(), len(it.shape), (*it.shape, *(0,) * (dimensions - len(it.shape))))
        for it in tensors
    ]
    of_tensor = [("name", _text(row[0] for row in rows)), ("dtype", _text(row[1] for row in rows))]
    kind = np.dtype([*of_tensor, ("dimensions", "<i4"), ("shape", "<i8", (dimensions,))])
    files = [it.name.encode() for it in manifest.files]
    return {
        _TENSORS: np.array(rows, dtype=kind),
        _FILES: np.array(files, dtype=_text(files)),
    }


def _text(values: Any) -> str:
    """Return the numpy type of a column of text."""
    return f"S{max([1, *map(len, values)])}"
