"""Store tensors in compressed chunks, shuffled and deflated as HDF5's filters do, and say which bytes lie where.

The manifest gives places in the uncompressed image of a file, so that files of equal layout share them; a table of
parts, beside the file with its digests, gives the place of each part of the image in the file. What a chunk or a row of
the table looks like is specified in docs/checkpoint_format.md and cannot change without a new version of the format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow
from hpc_train.checkpoint.format.integer_columns import LARGEST_INTEGER

CHUNK_BYTES = 256 << 10
"""Maximum bytes of a chunk. Larger ones compress no better, and a reader of a few rows would inflate more."""
MINIMUM_CHUNKED_BYTES = 4096
"""Minimum bytes of a tensor that is worth chunking."""
MINIMUM_STORED_BYTES = 8
"""Minimum bytes of a part in a file."""
PART_DTYPE = np.dtype([(name, "<i8") for name in ("begin", "size", "at", "stored", "whole", "item")])
"""A row maps `size` bytes from `begin` of the image to `stored` bytes from `at` of the file.

The stored bytes are a stream that inflates to `whole` bytes, of elements of `item` bytes; its first `size` bytes are
the part. If `whole` is 0 the bytes are stored as they are."""

PartTable = NDArray[Any]
"""[parts] of PART_DTYPE, in the order of the image."""


class DatasetChunk(NamedTuple):
    """A chunk of a dataset; contiguous in it."""

    at: tuple[int, ...]
    """Index of its first element."""
    begin: int
    """Byte of the dataset at which it begins."""
    size: int
    """Bytes; fewer than a whole chunk at the end of the dataset."""


def choose_chunk_shape(row: DatasetRow) -> tuple[int, ...] | None:
    """Choose the chunk shape of a dataset: as many rows as fit into CHUNK_BYTES, shared out evenly.

    None: the dataset is too small for chunks.
    """
    shape, item = row.local_shape, row.dtype.itemsize
    if row.bytes < MINIMUM_CHUNKED_BYTES or not shape:
        return None
    dim = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) * item <= CHUNK_BYTES)
    most = max(1, CHUNK_BYTES // (prod(shape[dim + 1 :]) * item))
    rows = -(-shape[dim] // -(-shape[dim] // most))  # as few chunks as `most` allows, of about equal size
    return (1,) * dim + (rows,) + shape[dim + 1 :]


def iterate_chunk_spans(shape: Sequence[int], item: int, chunk: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield (first byte, bytes) within the dataset for its chunks, in memory order; at most `most` chunks."""
    return ((piece.begin, piece.size) for piece in islice(_list_chunks(tuple(shape), item, chunk), most))


def iterate_chunks(row: DatasetRow, chunk: Sequence[int]) -> Iterator[DatasetChunk]:
    """Yield the chunks of a dataset in row-major order."""
    return _list_chunks(row.local_shape, row.dtype.itemsize, chunk)


def _list_chunks(shape: tuple[int, ...], item: int, chunk: Sequence[int]) -> Iterator[DatasetChunk]:
    # A chunk has one index in each dimension before `dim`, some rows of `dim`, and all of the dimensions after it, so
    # that chunks are contiguous in memory.
    dim = next((d for d, rows in enumerate(chunk) if rows > 1), len(shape) - 1)
    inner, begin = prod(shape[dim + 1 :]) * item, 0
    for outer in product(*(range(size) for size in shape[:dim])):
        for start in range(0, shape[dim], chunk[dim]):
            size = min(chunk[dim], shape[dim] - start) * inner
            yield DatasetChunk((*outer, start, *(0,) * (len(shape) - dim - 1)), begin, size)
            begin += size


def check_parts(parts: PartTable, size: int, inflated: int) -> None:
    """Raise CheckpointError unless a file of `size` bytes with an image of `inflated` bytes can have these parts.

    Parts must lie in the order of the image, share no bytes of the image or of the file, and inflate to a bounded size.
    """
    if any(
        len(parts) and not 0 <= parts[name].min() <= parts[name].max() <= LARGEST_INTEGER
        for name in PART_DTYPE.names or ()
    ):
        raise CheckpointError("a part of a compressed file has a number that is negative or too large")
    ends, stored_ends = parts["begin"] + parts["size"], parts["at"] + parts["stored"]
    coded, order = parts["whole"] > 0, np.argsort(parts["at"], kind="stable")
    wrong = (parts["size"] == 0) | (ends > inflated) | (stored_ends > size)
    wrong |= ~coded & (parts["stored"] != parts["size"])
    wrong |= coded & ((parts["whole"] > CHUNK_BYTES) | (parts["size"] > parts["whole"]))
    wrong |= coded & ((parts["item"] == 0) | (parts["whole"] % np.maximum(parts["item"], 1) != 0))
    wrong[1:] |= ends[:-1] > parts["begin"][1:]
    wrong[1:] |= stored_ends[order][:-1] > parts["at"][order][1:]
    if wrong.any():
        raise CheckpointError("a part of a compressed file does not lie where there is room for it")


def do_parts_cover(parts: PartTable, begin: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each pair whether the parts cover all bytes [begin, end) of the image."""
    if not len(parts):
        return np.zeros(len(begin), dtype=np.bool_)
    stops = parts["begin"] + parts["size"]
    # Parts without gaps between them form a run; bytes are covered if they lie within one run.
    gaps = np.flatnonzero(parts["begin"][1:] != stops[:-1]) + 1
    first, last = parts["begin"][np.concatenate([[0], gaps])], stops[np.concatenate([gaps - 1, [len(parts) - 1]])]
    run = np.searchsorted(first, begin, "right") - 1
    covered: NDArray[np.bool_] = (run >= 0) & (end <= last[np.maximum(run, 0)])
    return covered


def list_parts_within(parts: PartTable, begin: int, end: int) -> PartTable:
    """Return the parts that have bytes [begin, end) of the image."""
    first = np.searchsorted(parts["begin"] + parts["size"], begin, "right")
    within: PartTable = parts[first : np.searchsorted(parts["begin"], end, "left")]
    return within


def list_stored_parts_within(parts: PartTable, begin: int, end: int) -> PartTable:
    """Return the parts that have bytes [begin, end) of the file."""
    within: PartTable = parts[(parts["at"] < end) & (parts["at"] + parts["stored"] > begin)]
    return within


_BEGIN, _END = b"\x78\x01", b"\x03\x00"
"""zlib's header (RFC 1950), and an empty last block (RFC 1951), which ends the stream."""
_STORED = (1 << 16) - 1
"""Maximum bytes of a stored (uncompressed) block of deflate."""
_SAMPLE = 4096
_WORTH, _RUNS = 7.6, 1.0
"""Entropies in bits per byte: below the first a plane is compressed, below the second with run lengths too."""
_Bytes = NDArray[np.uint8]


def deflate_chunk(data: memoryview, item: int, chunk_bytes: int, level: int) -> bytes | None:
    """Compress a chunk, padded with zeros to `chunk_bytes`; None if it would get no smaller.

    item: bytes of an element. level: 1 to 9. A chunk that must be padded is compressed in any case.
    """
    elements = np.frombuffer(data, np.uint8).reshape(-1, item)
    # HDF5's shuffle filter: all first bytes of the elements, then all second bytes, and so on, as one plane each.
    planes = (
        np.zeros((item, chunk_bytes // item), np.uint8)
        if len(data) < chunk_bytes
        else np.empty(elements.T.shape, np.uint8)
    )
    np.copyto(planes[:, : len(elements)], elements.T)
    stream = zlib.compress(planes.data, level) if level > 1 else _deflate_by_planes(planes, len(elements))
    return stream if len(stream) < len(data) or len(data) < chunk_bytes else None


def inflate_chunk(stream: memoryview, item: int, chunk_bytes: int) -> _Bytes:
    """Inflate a chunk to `chunk_bytes` bytes. Raises CheckpointError if the stream is damaged or of another length."""
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(stream, chunk_bytes + 1)  # a few bytes can inflate to a thousand times as many
    except zlib.error as error:
        raise CheckpointError(f"it cannot be inflated ({error})") from error
    if len(data) <= chunk_bytes and not inflating.eof:
        raise CheckpointError("it cannot be inflated (it does not end where it should)")
    if len(data) != chunk_bytes:
        raise CheckpointError(f"it has {len(data)} bytes inflated, and should have {chunk_bytes}")
    elements = np.empty((chunk_bytes // item, item), np.uint8)
    for index, plane in enumerate(np.frombuffer(data, np.uint8).reshape(item, -1)):
        elements[:, index] = plane  # several times as fast as one transposed copy
    return elements.reshape(-1)


def _deflate_by_planes(planes: _Bytes, count: int) -> bytes:
    """Deflate byte planes, each as its entropy suggests: most planes of floats are noise and not worth compressing.

    count: elements of each plane that are data; the rest are zeros.
    """
    parts, checksum = [_BEGIN], 1
    for plane in planes:
        bits = _estimate_entropy(plane[:count])
        parts.append(_compress_plane(plane[:count], bits) if bits < _WORTH else _store_plane(plane[:count].data))
        if count < len(plane):
            parts.append(_compress_plane(plane[count:], 0.0))
        checksum = zlib.adler32(plane.data, checksum)
    return b"".join([*parts, _END, checksum.to_bytes(4, "big")])


def _estimate_entropy(plane: _Bytes) -> float:
    """Estimate the entropy in bits per byte from a sample (Shannon 1948)."""
    sample = plane[:: max(1, len(plane) // _SAMPLE)]
    share = np.bincount(sample, minlength=256) / len(sample)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def _compress_plane(plane: _Bytes, bits: float) -> bytes:
    """Compress a plane into whole deflate blocks that end at a byte boundary. bits: entropy per byte."""
    # Searching for repeated strings finds nothing in numbers and takes most of
    # deflate's time, so only codes for frequent bytes are used, and run lengths if
    # there are long runs. Z_SYNC_FLUSH ends at a byte, so planes can be joined.
    how = zlib.Z_RLE if bits < _RUNS else zlib.Z_HUFFMAN_ONLY
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, how)
    return coder.compress(plane.data) + coder.flush(zlib.Z_SYNC_FLUSH)


def _store_plane(plane: memoryview) -> bytes:
    parts: list[bytes | memoryview] = []
    for start in range(0, len(plane), _STORED):
        part = plane[start : start + _STORED]
        parts += [b"\0", len(part).to_bytes(2, "little"), (_STORED - len(part)).to_bytes(2, "little"), part]
    return b"".join(parts)
