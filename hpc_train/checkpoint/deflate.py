"""One chunk as HDF5's shuffle and deflate filters store it, and back; zlib lets other threads run meanwhile.

Shuffled, the bytes of equal significance of all elements lie together, each such plane after the other. Of trained
numbers about one plane has less in it than it takes, that of the exponents. So at level 1 each plane is coded by
itself, by Huffman codes alone or runs too, and one that would not get smaller goes into the stream as it is, which
costs nothing, and nothing to read. Deflate allows both within a stream (RFC 1951, 3.2.4), so every reader knows it.
Higher levels are zlib's own, over all planes at once.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError

_BEGIN, _END = b"\x78\x01", b"\x03\x00"
"""zlib's header (RFC 1950), and an empty last block."""
_STORED = (1 << 16) - 1
"""Bytes of a block that is not coded, at most."""
_SAMPLE = 4096
_WORTH, _RUNS = 7.6, 1.0
"""Bits a byte; below that a plane is coded, and runs of equal bytes are looked for."""
_Bytes = NDArray[np.uint8]


def deflate(data: memoryview, item: int, whole: int, level: int) -> bytes | None:
    """The stream of a chunk of `whole` bytes, zeros after the data; None if it would be no smaller than the data.

    item: bytes of an element. level: 1 to 9. A chunk that is not full always has a stream.
    """
    elements = np.frombuffer(data, np.uint8).reshape(-1, item)
    planes = np.zeros((item, whole // item), np.uint8) if len(data) < whole else np.empty(elements.T.shape, np.uint8)
    np.copyto(planes[:, : len(elements)], elements.T)
    stream = zlib.compress(planes.data, level) if level > 1 else _by_planes(planes, len(elements))
    return stream if len(stream) < len(data) or len(data) < whole else None


def inflate(stream: memoryview, item: int, whole: int) -> _Bytes:
    """The bytes of a chunk. Raises CheckpointError for what is no stream of so many."""
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(stream, whole + 1)  # a few bytes can inflate to a thousand times as many
    except zlib.error as error:
        raise CheckpointError(f"it cannot be inflated ({error})") from error
    if len(data) <= whole and not inflating.eof:
        raise CheckpointError("it cannot be inflated (it does not end where it should)")
    if len(data) != whole:
        raise CheckpointError(f"it has {len(data)} bytes inflated, and should have {whole}")
    elements = np.empty((whole // item, item), np.uint8)
    for at, plane in enumerate(np.frombuffer(data, np.uint8).reshape(item, -1)):
        elements[:, at] = plane  # several times as fast as the whole at once
    return elements.reshape(-1)


def _by_planes(planes: _Bytes, count: int) -> bytes:
    """count: elements of each plane that are data; what follows are zeros."""
    parts, checksum = [_BEGIN], 1
    for plane in planes:
        bits = _entropy(plane[:count])
        parts.append(_coded(plane[:count], bits) if bits < _WORTH else _stored(plane[:count].data))
        if count < len(plane):
            parts.append(_coded(plane[count:], 0.0))
        checksum = zlib.adler32(plane.data, checksum)
    return b"".join([*parts, _END, checksum.to_bytes(4, "big")])


def _entropy(plane: _Bytes) -> float:
    """Bits a byte, from a sample (Shannon 1948)."""
    sample = plane[:: max(1, len(plane) // _SAMPLE)]
    share = np.bincount(sample, minlength=256) / len(sample)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def _coded(plane: _Bytes, bits: float) -> bytes:
    """Whole blocks, which end with a byte. bits: of a byte; where they are few there are runs."""
    how = zlib.Z_RLE if bits < _RUNS else zlib.Z_HUFFMAN_ONLY
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, how)
    return coder.compress(plane.data) + coder.flush(zlib.Z_SYNC_FLUSH)


def _stored(plane: memoryview) -> bytes:
    parts: list[bytes | memoryview] = []
    for at in range(0, len(plane), _STORED):
        part = plane[at : at + _STORED]
        parts += [b"\0", len(part).to_bytes(2, "little"), (_STORED - len(part)).to_bytes(2, "little"), part]
    return b"".join(parts)
