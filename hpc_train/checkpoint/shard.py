"""One HDF5 shard file: what one rank writes, and reading a rectangle of it.

h5py makes the structure (contiguous datasets, space allocated early and never filled, 4 KiB alignment) and closes the
file; the bytes of the tensors are then written at the datasets' own offsets. So no data passes through HDF5's
conversion or locks, a full disk is an ordinary OSError, and a later writer can stream the same bytes in another way.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import torch
from h5py import h5d, h5p, h5s, h5t
from torch import Tensor

from hpc_train.api import Piece
from hpc_train.checkpoint.dtypes import dtype_name, hdf5_type
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.files import checksum, opened, write_at
from hpc_train.checkpoint.manifest import Entry, ShardFile
from hpc_train.checkpoint.rectangle import Rectangle

_ALIGNMENT = 4096
_RESERVED = re.compile(r"[%/@\x00-\x1f\x7f]|^\.$|^\.\.$")
"""What means something in an HDF5 path, to this module or to a terminal."""


def dataset_name(name: str, rectangle: Rectangle, shape: tuple[int, ...]) -> str:
    """The tensor's name, with `@<offset>` unless the dataset holds all of it. A reserved character becomes %XX."""
    safe = _RESERVED.sub(lambda m: "".join(f"%{ord(c):02X}" for c in m[0]), name) or "%"
    return safe if rectangle.shape == shape else f"{safe}@{','.join(map(str, rectangle.offset))}"


def write_shard(path: Path, pieces: Sequence[Piece]) -> tuple[ShardFile, tuple[Entry, ...]]:
    """Write `pieces` to a new file and put it on the disk; the directory's entry is not synchronised.

    Raises OSError (disk full, ...) or CheckpointError (a dtype that HDF5 does not have, a piece given twice).
    """
    entries = tuple(_entry(piece, path.name) for piece in pieces)
    offsets = _lay_out(path, pieces, entries)
    with opened(path, os.O_WRONLY) as file:
        for piece, offset in zip(pieces, offsets, strict=True):
            write_at(file, _bytes(_on_cpu(piece.local)).numpy().data, offset)
        os.fsync(file)
    size, digest = checksum(path)
    return ShardFile(path.name, size, digest), entries


@contextmanager
def reading(path: Path) -> Iterator[Any]:
    """An open shard file. Raises CheckpointError where HDF5 cannot open it."""
    try:
        file = h5py.File(path, "r", locking=False)  # flock fails on Lustre mounted without it, and nobody writes here
    except OSError as error:
        raise CheckpointError(f"{path.name}: HDF5 cannot open it") from error
    with file:
        yield file


def read_into(file: Any, entry: Entry, piece: Piece, part: Rectangle) -> None:
    """Copy `part` (in coordinates of the logical tensor) of a saved rectangle into `piece.local`, and nothing else.

    Raises CheckpointError if the dataset is missing or is not what the manifest says.
    """
    dataset = _dataset(file, entry, piece.dtype)
    wanted = Rectangle(piece.offset, tuple(piece.local.shape))
    target = _on_cpu(piece.local)
    dataset.read(
        _selection(wanted, part),
        _selection(entry.rectangle, part),
        _bytes(target).numpy(),
        mtype=dataset.get_type(),  # the type in the file: bytes are moved, never converted
    )
    if target.data_ptr() != piece.local.data_ptr():
        with torch.no_grad():
            piece.local.copy_(target)


def _entry(piece: Piece, file: str) -> Entry:
    rectangle = Rectangle(piece.offset, tuple(piece.local.shape))
    shape = tuple(piece.shape)
    assert piece.local.dtype == piece.dtype, piece.name
    assert len(rectangle.offset) == len(rectangle.shape) == len(shape), piece.name
    dataset = dataset_name(piece.name, rectangle, shape)
    return Entry(piece.name, shape, dtype_name(piece.dtype), rectangle.offset, rectangle.shape, file, dataset)


def _lay_out(path: Path, pieces: Sequence[Piece], entries: Sequence[Entry]) -> list[int]:
    """Make the file without data; returns where in it each dataset begins."""
    with h5py.File(
        path,
        "x",
        libver=("v110", "v110"),  # checksummed metadata, readable by HDF5 1.10 and later
        locking=False,
        alignment_threshold=_ALIGNMENT,
        alignment_interval=_ALIGNMENT,
    ) as file:
        properties = _creation_properties()
        return [
            _create(file, entry, hdf5_type(piece.dtype), properties).get_offset() or 0  # None: no elements, no place
            for piece, entry in zip(pieces, entries, strict=True)
        ]


def _creation_properties() -> tuple[Any, Any]:
    """Of a dataset and of its link."""
    creation, link = h5p.create(h5p.DATASET_CREATE), h5p.create(h5p.LINK_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # equal layouts make equal files
    link.set_char_encoding(h5t.CSET_UTF8)
    return creation, link


def _create(file: Any, entry: Entry, kind: Any, properties: tuple[Any, Any]) -> Any:
    name = entry.dataset.encode()
    if name in file.id:
        raise CheckpointError(f"tensor {entry.name!r}: two pieces at {entry.offset} are saved by one rank")
    dataset = h5d.create(file.id, name, kind, _space(entry.local_shape), *properties)
    attributes = h5py.AttributeManager(h5py.Dataset(dataset))
    attributes["torch_dtype"] = entry.dtype
    attributes["global_shape"] = entry.shape
    attributes["offset"] = entry.offset
    return dataset


def _dataset(file: Any, entry: Entry, dtype: torch.dtype) -> Any:
    where = f"{entry.file}: tensor {entry.name!r}"
    try:
        dataset = h5d.open(file.id, entry.dataset.encode())
    except KeyError as error:
        raise CheckpointError(f"{where}: there is no dataset {entry.dataset!r}") from error
    if dataset.shape != entry.local_shape or dataset.get_type().get_size() != dtype.itemsize:
        raise CheckpointError(f"{where}: the dataset has another shape or type than the manifest says")
    return dataset


def _space(shape: tuple[int, ...]) -> Any:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def _selection(outer: Rectangle, part: Rectangle) -> Any:
    space = _space(outer.shape)
    if outer.shape:  # a scalar has only itself to select
        space.select_hyperslab(part.start_in(outer), part.shape)
    return space


def _on_cpu(local: Tensor) -> Tensor:
    """Itself where that is contiguous memory of the host, else a copy."""
    return local.detach().cpu().contiguous()


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as one row of bytes."""
    return tensor.reshape(-1).view(torch.uint8)
