"""The image of a shard file before it has data: h5py makes the structure once, and says where each tensor belongs.

So the bytes of the tensors never pass through HDF5's conversion or locks: they are copied to their places in memory,
and the whole image is streamed to the disk. Equal layouts make equal images.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import h5py
import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t

from hpc_train.api import Piece
from hpc_train.checkpoint.dtypes import dtype_name, hdf5_type
from hpc_train.checkpoint.errors import CheckpointError, one_line

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ALIGNMENT = 4096
"""Bytes; of every dataset that is at least so large. What direct I/O needs of memory, offsets and lengths."""
_META_BLOCK = 64 << 10
_RESERVED = re.compile(r"[%/@\x00-\x1f\x7f]|^\.$|^\.\.$")
"""What means something in an HDF5 path, to this module or to a terminal."""


@dataclass(frozen=True)
class Row:
    """One dataset: a rectangle of a logical tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole logical tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of its data."""
        return prod(self.local_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Image:
    """Where everything is in a shard file."""

    size: int
    """Bytes of the whole file."""
    places: tuple[int, ...]
    """Byte at which the data of each row begins; 0 for one without elements."""
    structure: tuple[tuple[int, bytes], ...]
    """(begin, bytes) of all that is no tensor's data."""


def row_of(piece: Piece) -> Row:
    """What a piece looks like in a file."""
    assert piece.local.dtype == piece.dtype, piece.name
    assert len(piece.offset) == piece.local.dim() == len(piece.shape), piece.name
    return Row(piece.name, tuple(piece.shape), piece.dtype, tuple(piece.offset), tuple(piece.local.shape))


def dataset_names(tensors: Iterable[str]) -> list[str]:
    """From the name of each row's tensor; a second rectangle of the same tensor gets `@1`, and so on.

    A reserved character becomes %XX.
    No offsets are in a name, so that the files of ranks that hold equally large shards have equal layouts.
    """
    names = list(tensors)
    return [dataset_name(name, number) for name, number in zip(names, occurrences(names), strict=True)]


def dataset_name(tensor: str, number: int) -> str:
    """Of its rectangle number `number` in the file, from 0."""
    safe = _RESERVED.sub(lambda m: "".join(f"%{ord(c):02X}" for c in m[0]), tensor) or "%"
    return f"{safe}@{number}" if number else safe


def occurrences(tensors: Iterable[str]) -> list[int]:
    """Of every name how often it was there before."""
    seen: dict[str, int] = {}
    found = []
    for name in tensors:
        found.append(seen.get(name, 0))
        seen[name] = found[-1] + 1
    return found


def make_image(rows: Sequence[Row]) -> Image:
    """Raises CheckpointError for a dtype that HDF5 does not have, OSError where there is no room for a small file."""
    with nameless(partial(_lay_out, rows)) as (places, content):
        data = sorted((place, place + row.bytes) for row, place in zip(rows, places, strict=True) if row.bytes)
        size = os.fstat(content.fileno()).st_size
        return Image(size, tuple(places), tuple(gaps(content, data, size)))


@contextmanager
def nameless(fill: Callable[[Path], T]) -> Iterator[tuple[T, BinaryIO]]:
    """What `fill` says of a small file that it fills by `open_hdf5`, and its content. Errors as make_image.

    It is in memory, as sparse as the model is large, and no directory has it: nothing is left of it, however the
    process ends.
    """
    descriptor = os.memfd_create("hpc_train-image")
    with os.fdopen(descriptor, "rb") as content:
        try:
            found = fill(Path(f"/proc/self/fd/{descriptor}"))
        except RuntimeError as error:  # what h5py makes of an error of the operating system while it closes a file
            os.ftruncate(descriptor, 1 << 50)  # the cause that it does not tell, where files may not be large
            raise CheckpointError(one_line(error)) from error
        yield found, content


def open_hdf5(path: Path, mode: str, threshold: int = ALIGNMENT, interval: int = ALIGNMENT) -> Any:
    """The file as all of ours are. Data of at least `threshold` bytes begins at a multiple of `interval`."""
    return h5py.File(
        path,
        mode,
        driver="stdio",  # the usual one refuses links, as all in /proc/self/fd are; the files are the same
        libver=("v110", "v110"),  # checksummed metadata, readable by HDF5 1.10 and later
        locking=False,
        alignment_threshold=threshold,
        alignment_interval=interval,
        meta_block_size=_META_BLOCK,
    )


def _lay_out(rows: Sequence[Row], path: Path) -> list[int]:
    named = zip(dataset_names(row.name for row in rows), rows, strict=True)
    with open_hdf5(path, "w") as file:
        writer = Writer(file)
        return [writer.create(name, row) for name, row in named]


class Writer:
    """Datasets of one open file; what they have in common is made once, as thousands of small ones take long."""

    def __init__(self, file: Any, late: bool = False) -> None:
        """late: their data gets its place not now but when something is written to it."""
        self._file = file.id
        self._creation, self._link = _creation_properties(late)
        self._text, self._integer = h5t.py_create(h5py.string_dtype(), logical=True), h5t.NATIVE_INT64
        self._dtypes: dict[torch.dtype, tuple[Any, Any]] = {}
        self._spaces: dict[tuple[int, ...], Any] = {}

    def create(self, name: str, row: Row) -> int:
        """Byte of the file at which its data begins; 0 for one that has no place, and for one without elements."""
        return self._create(name, row, self._creation).get_offset() or 0

    def create_chunked(self, name: str, row: Row, chunk: tuple[int, ...], level: int) -> Any:
        """One in chunks of that shape, shuffled and deflated, which are to be written as they are stored."""
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_chunk(chunk)
        creation.set_shuffle()
        creation.set_deflate(level)
        creation.set_fill_time(h5d.FILL_TIME_NEVER)
        creation.set_obj_track_times(False)
        return self._create(name, row, creation)

    def _create(self, name: str, row: Row, creation: Any) -> Any:
        kind, text = self._dtype(row.dtype)
        dataset = h5d.create(self._file, name.encode(), kind, self._space(row.local_shape), creation, self._link)
        h5a.create(dataset, b"torch_dtype", self._text, self._space(())).write(text)
        for attribute, values in ((b"global_shape", row.shape), (b"offset", row.offset)):
            numbers = np.asarray(values, dtype=np.int64)
            h5a.create(dataset, attribute, self._integer, self._space(numbers.shape)).write(numbers)
        return dataset

    def _dtype(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """(its HDF5 type, its name as HDF5 writes it)."""
        if dtype not in self._dtypes:
            self._dtypes[dtype] = hdf5_type(dtype), np.array(dtype_name(dtype), dtype=h5py.string_dtype())
        return self._dtypes[dtype]

    def _space(self, shape: tuple[int, ...]) -> Any:
        if shape not in self._spaces:
            self._spaces[shape] = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
        return self._spaces[shape]


def _creation_properties(late: bool) -> tuple[Any, Any]:
    """Of a dataset and of its link."""
    creation, link = h5p.create(h5p.DATASET_CREATE), h5p.create(h5p.LINK_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_LATE if late else h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # equal layouts make equal files
    link.set_char_encoding(h5t.CSET_UTF8)
    return creation, link


def gaps(file: BinaryIO, data: list[tuple[int, int]], size: int) -> list[tuple[int, bytes]]:
    """Everything between the tensors."""
    found, at = [], 0
    for begin, end in [*data, (size, size)]:
        assert begin >= at, "HDF5 gave two datasets the same bytes"
        if begin > at:
            file.seek(at)
            found.append((at, file.read(begin - at)))
        at = end
    return found
