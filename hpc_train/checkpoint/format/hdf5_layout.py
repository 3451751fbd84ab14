"""Lay out a shard file: HDF5 types of torch dtypes, and the HDF5 structure with a place for every tensor.

h5py makes the structure once, for a file without data (`make_image`), and gives the offset of each dataset. So the
bytes of tensors never pass through HDF5's conversion or locks: they are copied to their offsets in memory, and the
whole image is streamed to the disk. Equal rows give equal images. Elements are stored with the bits they have in
memory. torch is not imported at the top, because `checkpoint ls` imports this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import h5py
import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t

from hpc_train.checkpoint.errors import CheckpointError, format_error
from hpc_train.interfaces import TensorShard

if TYPE_CHECKING:
    import torch  # not at run time: listing checkpoints must not need torch

_NUMPY = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "?",
    "complex64": "<c8",
    "complex128": "<c16",
    # HDF5 would read the largest values of these as infinities, so they are plain bytes; torch_dtype names them
    "float8_e4m3fn": "u1",
    "float8_e4m3fnuz": "u1",
    "float8_e5m2fnuz": "u1",
}
"""Types of NumPy that have the bits of torch's dtypes."""
_OTHER_SIZES = {"bfloat16": 2, "float8_e5m2": 1}
"""Bytes per element of dtypes that NumPy lacks and HDF5 can describe (see make_hdf5_type)."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the manifest: `float32`, `bfloat16`, ..."""
    return str(dtype).removeprefix("torch.")


@cache
def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises ValueError if there is none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype


@cache
def dtype_itemsize(name: str) -> int:
    """Return bytes per element of the dtype of that name. Raises ValueError if there is none."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name]).itemsize
    return _OTHER_SIZES.get(name) or parse_dtype(name).itemsize


def make_hdf5_type(dtype: torch.dtype) -> Any:
    """Make an HDF5 type of the same size and bits, which any HDF5 reader understands.

    Raises CheckpointError for a dtype without such a type (quantised and sub-byte ones).
    """
    name = dtype_name(dtype)
    if name == "bfloat16":
        return _make_float_type(h5t.IEEE_F32LE, sign=15, exponent=(7, 8), mantissa=(0, 7), size=2, bias=127)
    if name == "float8_e5m2":
        return _make_float_type(h5t.IEEE_F16LE, sign=7, exponent=(2, 5), mantissa=(0, 2), size=1, bias=15)
    if name not in _NUMPY:
        raise CheckpointError(f"tensors of {dtype} cannot be stored in HDF5")
    return h5t.py_create(np.dtype(_NUMPY[name]), logical=True)


def _make_float_type(
    base: Any, *, sign: int, exponent: tuple[int, int], mantissa: tuple[int, int], size: int, bias: int
) -> Any:
    """Make a floating-point type from its bit fields (first bit, number of bits).

    HDF5 checks the type after each call, so their order matters.
    """
    made = base.copy()
    made.set_fields(sign, *exponent, *mantissa)
    made.set_precision(8 * size)
    made.set_size(size)
    made.set_ebias(bias)
    return made


T = TypeVar("T")
ALIGNMENT = 4096
"""Bytes to which datasets of at least that size are aligned: direct I/O needs it of memory, offsets and lengths."""
_META_BLOCK = 64 << 10
"""Bytes that HDF5 takes at a time for its structure: it then lies in few places, not between all tensors."""
_RESERVED = re.compile(r"[%/@\x00-\x1f\x7f]|^\.$|^\.\.$")
"""Characters with a meaning in an HDF5 path, in our dataset names or on a terminal."""


@dataclass(frozen=True)
class DatasetRow:
    """One dataset: a rectangle of a logical tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the logical tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of its data."""
        return prod(self.local_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ShardImage:
    """Places of the tensors in a shard file, and the bytes between them."""

    size: int
    """Bytes of the file."""
    places: tuple[int, ...]
    """Byte at which the data of each row begins; 0 for one without elements."""
    structure: tuple[tuple[int, bytes], ...]
    """(begin, bytes) of everything that is not a tensor's data."""


def make_row(shard: TensorShard) -> DatasetRow:
    """Make the dataset row of a tensor shard."""
    assert shard.local.dtype == shard.dtype, shard.name
    assert len(shard.offset) == shard.local.dim() == len(shard.shape), shard.name
    return DatasetRow(shard.name, tuple(shard.shape), shard.dtype, tuple(shard.offset), tuple(shard.local.shape))


def name_datasets(tensors: Iterable[str]) -> list[str]:
    """Name the dataset of each row after its tensor; the second rectangle of a tensor gets `@1`, and so on.

    A reserved character becomes %XX. Names contain no offsets, so that ranks with shards of equal size have files of
    equal layout.
    """
    names = list(tensors)
    return [dataset_name(name, number) for name, number in zip(names, count_earlier_occurrences(names), strict=True)]


def dataset_name(tensor: str, number: int) -> str:
    """Return the name of a dataset: rectangle number `number`, from 0, of its tensor in the file."""
    safe = _RESERVED.sub(lambda m: "".join(f"%{ord(c):02X}" for c in m[0]), tensor) or "%"
    return f"{safe}@{number}" if number else safe


def count_earlier_occurrences(tensors: Iterable[str]) -> list[int]:
    """Return, for each name, how many times it has occurred earlier in the sequence."""
    occurrences: dict[str, int] = {}
    counts = []
    for name in tensors:
        counts.append(occurrences.get(name, 0))
        occurrences[name] = counts[-1] + 1
    return counts


def make_image(rows: Sequence[DatasetRow]) -> ShardImage:
    """Make the image of a shard file with these rows.

    Raises CheckpointError for a dtype that HDF5 does not have, OSError if memory for a small file cannot be had.
    """
    with make_anonymous_file(partial(_lay_out, rows)) as (places, content):
        data = sorted((place, place + row.bytes) for row, place in zip(rows, places, strict=True) if row.bytes)
        size = os.fstat(content.fileno()).st_size
        return ShardImage(size, tuple(places), tuple(find_gaps(content, data, size)))


@contextmanager
def make_anonymous_file(fill: Callable[[Path], T]) -> Iterator[tuple[T, BinaryIO]]:
    """Let `fill` write a file through `open_hdf5`; yields what `fill` returns, and the open file. Raises as make_image.

    The file is in memory: sparse, since data is never written, and in no directory, so that nothing is left of it
    however the process ends.
    """
    descriptor = os.memfd_create("hpc_train-image")
    with os.fdopen(descriptor, "rb") as content:
        try:
            result = fill(Path(f"/proc/self/fd/{descriptor}"))
        except RuntimeError as error:  # h5py raises it for an error of the operating system while it closes a file
            # h5py's error hides the cause. If that was a limit on file sizes, this raises the OSError that says so.
            os.ftruncate(descriptor, 1 << 50)
            raise CheckpointError(format_error(error)) from error
        yield result, content


def open_hdf5(path: Path, mode: str, threshold: int = ALIGNMENT, interval: int = ALIGNMENT) -> Any:
    """Open an HDF5 file with the settings of all our files.

    Data of at least `threshold` bytes begins at a multiple of `interval`.
    """
    return h5py.File(
        path,
        mode,
        driver="stdio",  # the default driver refuses links, such as those in /proc/self/fd; the bytes are the same
        libver=("v110", "v110"),  # checksummed metadata, readable by HDF5 1.10 and later
        locking=False,
        alignment_threshold=threshold,
        alignment_interval=interval,
        meta_block_size=_META_BLOCK,
    )


def _lay_out(rows: Sequence[DatasetRow], path: Path) -> list[int]:
    """Create a dataset for each row; returns the bytes at which their data begins."""
    named = zip(name_datasets(row.name for row in rows), rows, strict=True)
    with open_hdf5(path, "w") as file:
        writer = DatasetWriter(file)
        return [writer.create(name, row) for name, row in named]


class DatasetWriter:
    """Creates datasets in one open file; shares HDF5 types and dataspaces, as thousands of datasets take long."""

    def __init__(self, file: Any, late: bool = False) -> None:
        """late: allocate the data of a dataset when it is first written, not when it is created."""
        self._file = file.id
        self._creation, self._link = _make_creation_properties(late)
        self._text, self._integer = h5t.py_create(h5py.string_dtype(), logical=True), h5t.NATIVE_INT64
        self._dtypes: dict[torch.dtype, tuple[Any, Any]] = {}
        self._spaces: dict[tuple[int, ...], Any] = {}

    def create(self, name: str, row: DatasetRow) -> int:
        """Create a contiguous dataset; returns the byte at which its data begins, 0 if it is empty or late."""
        return self._create(name, row, self._creation).get_offset() or 0

    def create_chunked(self, name: str, row: DatasetRow, chunk: tuple[int, ...], level: int) -> Any:
        """Create a dataset of shuffled and deflated chunks; the caller writes the chunks already compressed."""
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_chunk(chunk)
        creation.set_shuffle()
        creation.set_deflate(level)
        creation.set_fill_time(h5d.FILL_TIME_NEVER)
        creation.set_obj_track_times(False)
        return self._create(name, row, creation)

    def _create(self, name: str, row: DatasetRow, creation: Any) -> Any:
        kind, text = self._make_dtype(row.dtype)
        dataset = h5d.create(self._file, name.encode(), kind, self._make_space(row.local_shape), creation, self._link)
        h5a.create(dataset, b"torch_dtype", self._text, self._make_space(())).write(text)
        for attribute, values in ((b"global_shape", row.shape), (b"offset", row.offset)):
            numbers = np.asarray(values, dtype=np.int64)
            h5a.create(dataset, attribute, self._integer, self._make_space(numbers.shape)).write(numbers)
        return dataset

    def _make_dtype(self, dtype: torch.dtype) -> tuple[Any, Any]:
        """Return (HDF5 type, name as an HDF5 string) of a dtype."""
        if dtype not in self._dtypes:
            self._dtypes[dtype] = make_hdf5_type(dtype), np.array(dtype_name(dtype), dtype=h5py.string_dtype())
        return self._dtypes[dtype]

    def _make_space(self, shape: tuple[int, ...]) -> Any:
        if shape not in self._spaces:
            self._spaces[shape] = h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)
        return self._spaces[shape]


def _make_creation_properties(late: bool) -> tuple[Any, Any]:
    """Return the creation properties of a dataset and of its link."""
    creation, link = h5p.create(h5p.DATASET_CREATE), h5p.create(h5p.LINK_CREATE)
    creation.set_layout(h5d.CONTIGUOUS)
    creation.set_alloc_time(h5d.ALLOC_TIME_LATE if late else h5d.ALLOC_TIME_EARLY)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    creation.set_obj_track_times(False)  # so that equal rows make equal files
    link.set_char_encoding(h5t.CSET_UTF8)
    return creation, link


def find_gaps(file: BinaryIO, data: list[tuple[int, int]], size: int) -> list[tuple[int, bytes]]:
    """Return (begin, bytes) of everything between the data of tensors.

    data: (begin, end) of each tensor, sorted. size: bytes of the file.
    """
    gaps, previous_end = [], 0
    for begin, end in [*data, (size, size)]:
        assert begin >= previous_end, "HDF5 gave two datasets the same bytes"
        if begin > previous_end:
            file.seek(previous_end)
            gaps.append((previous_end, file.read(begin - previous_end)))
        previous_end = end
    return gaps
