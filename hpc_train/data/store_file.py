"""Open, map and publish stores of tokens and of images: HDF5 files with contiguous arrays.

A store gets its name only when it is complete, and never changes once it has it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np
import numpy.typing as npt
import xxhash

from hpc_train.errors import UserError
from hpc_train.terminal import one_line

T = TypeVar("T")
_DIGEST_BYTES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class StoreKind:
    """A kind of store: what its file says of itself, and what it is called."""

    format: str
    """Attribute `format` of the file."""
    name: str
    article: str
    version: int
    """Newest version of the format that is read."""
    use: str
    """Override that trains on such a store."""

    @property
    def a_store(self) -> str:
        return f"{self.article} {self.name}"


TOKEN_STORE = StoreKind("hpc_train.tokens", "token store", "a", 2, "data=text")
IMAGE_STORE = StoreKind("hpc_train.images", "image store", "an", 1, "data=images")
_KINDS = (TOKEN_STORE, IMAGE_STORE)


def is_store(path: Path, kind: StoreKind) -> bool:
    """Return whether a file says that it is a store of this kind."""
    if not path.is_file():  # HDF5 would wait for whoever writes to a pipe
        return False
    try:
        with h5py.File(path, "r", locking=False) as file:
            return bool(file.attrs.get("format") == kind.format)
    except Exception:
        return False


def check_new_store(out: str | Path, overwrite: bool, kind: StoreKind) -> Path:
    """Return where a new store is to be written. Raises UserError if the name is bad or taken.

    overwrite: replace a store of this kind, but nothing else, such as a source that was named first by mistake.
    """
    path = Path(out).expanduser()
    if not str(out) or not str(out).isprintable():
        raise UserError(f"{str(out)!r}: is no name for a store; give one such as text.h5")
    if not path.exists():
        return path
    if not overwrite:
        raise UserError(f"{path} exists: give another name, or --overwrite")
    if not is_store(path, kind):
        raise UserError(f"{path}: is not {kind.a_store}, so --overwrite does not replace it; give another name")
    return path


def make_cache(cache: str) -> None:
    """Make the folder of the stores that runs build from their sources. Raises UserError if it cannot be written."""
    folder = Path(cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(
            f"data.cache={cache}: {error.strerror}; set data.cache or HPC_TRAIN_CACHE to a folder that can be written, "
            "or data.path to a store"
        ) from error


def open_store(path: Path, kind: StoreKind, read: Callable[[h5py.File, Path], T]) -> T:
    """Open a store with `read`. Raises UserError if it is missing, damaged, of another kind or of a later format."""
    if not path.is_file():
        raise UserError(f"no {kind.name} at {path}: build one with `hpc-train data build {path} FOLDER`")
    try:
        # Lustre without -o flock refuses HDF5's own lock.
        with h5py.File(path, "r", locking=False) as file:
            _check_header(file, path, kind)
            return read(file, path)
    except UserError:
        raise
    except Exception as error:  # h5py raises nearly every kind on a damaged header
        # Only the operating system's errors have a number: what cannot be read need not be damaged.
        if isinstance(error, OSError) and error.errno:
            raise UserError(f"{path}: the {kind.name} cannot be read: {os.strerror(error.errno)}") from error
        raise UserError(f"{path} {_explain_unreadable(path, kind)} ({_first_line(error)})") from error


def _check_header(file: h5py.File, path: Path, kind: StoreKind) -> None:
    stored_format = file.attrs.get("format")
    if stored_format != kind.format:
        other = next(
            (
                f"{other_kind.a_store}: use {other_kind.use}"
                for other_kind in _KINDS
                if other_kind.format == stored_format
            ),
            f"no {kind.name}",
        )
        raise UserError(f"{path} is {other}; {kind.name}s are made with `hpc-train data build`")
    version = int(file.attrs["version"])
    if version > kind.version:
        raise UserError(
            f"{path} has format {version} of {kind.name}s, newer than {kind.version}, the last this hpc_train reads: "
            "update hpc_train or build the store again"
        )


def _explain_unreadable(path: Path, kind: StoreKind) -> str:
    try:
        hdf5 = h5py.is_hdf5(path)
    except OSError:
        hdf5 = False
    if hdf5:
        return f"is a damaged or truncated {kind.name}: build it again"
    return f"cannot be read as {kind.a_store}: make one with `hpc-train data build`"


def _first_line(error: Exception) -> str:
    return one_line((str(error).splitlines() or [type(error).__name__])[0].strip("'\""))


def map_dataset(dataset: h5py.Dataset, path: Path) -> npt.NDArray[Any]:
    """Map a contiguous dataset into memory, without HDF5 between it and its reader."""
    offset = dataset.id.get_offset()
    if dataset.chunks is not None or dataset.ndim != 1 or offset is None:
        raise UserError(f"{path}: data set {dataset.name} is not contiguous (repacked?): build the store again")
    if path.stat().st_size < offset + dataset.nbytes:
        raise UserError(f"{path} is cut short: {dataset.name} ends at byte {offset + dataset.nbytes:,}: build it again")
    # A plain array over the map: np.memmap's own slicing costs several times as much.
    return np.asarray(np.memmap(path, dataset.dtype, mode="r", offset=offset, shape=dataset.shape))


def compute_digest(arrays: Iterable[npt.NDArray[Any]]) -> str:
    """Return XXH3-128 of the bytes of some 1-D arrays, one after another, hexadecimal; reads all of them."""
    state = xxhash.xxh3_128()
    for values in arrays:
        content = values.view(np.uint8)
        for start in range(0, len(content), _DIGEST_BYTES_AT_ONCE):
            state.update(content[start : start + _DIGEST_BYTES_AT_ONCE].data)
    return state.hexdigest()
