"""Digest the blocks of a shard file, and read and write the table of digests beside it.

Reads are verified block by block, so that a rank that needs a few rows reads little more, and damage can be located.
The sizes and the order of the table are specified in docs/checkpoint_format.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.compressed_chunks import MINIMUM_STORED_BYTES, PART_DTYPE, PartTable, check_parts

BLOCK_BYTES = 128 << 10
"""Bytes of a block. Smaller ones cost time; with larger ones a reader of a few rows reads more than it needs."""
BLOCK_DIGEST_ALGORITHM = "xxh3_64"
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"HPCTDIG2"
_SEAL = 16
"""Bytes of the seal (see shard_layout.seal_rows), which follows the header."""

BlockDigests = NDArray[np.uint64]


def digest_blocks(data: memoryview) -> list[int]:
    """Return the xxh3 of every block; the last may be short. xxhash releases the interpreter lock meanwhile."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES)]


def digest_scattered_blocks(memory: Iterable[Any]) -> list[int]:
    """Return the digests of the blocks of several buffers taken as one; a block may span buffers."""
    digests: list[int] = []
    state, missing = None, 0
    for data in memory:
        at, end = 0, len(data)
        # Complete the block that the buffers before have begun.
        if state is not None:
            at = min(missing, end)
            state.update(data if at == end else memoryview(data)[:at])
            missing -= at
            if missing:
                continue
            digests.append(state.intdigest())
            state = None
        # Whole blocks of this buffer are hashed in one call, the rest begins the next block.
        whole_blocks = (end - at) // BLOCK_BYTES * BLOCK_BYTES
        if whole_blocks:
            digests += digest_blocks(memoryview(data)[at : at + whole_blocks])
            at += whole_blocks
        if at < end:
            state, missing = xxhash.xxh3_64(memoryview(data)[at:]), BLOCK_BYTES - (end - at)
    return digests if state is None else [*digests, state.intdigest()]


def find_first_mismatch(actual: Sequence[int], expected: Sequence[int]) -> int | None:
    """Return the index of the first digest that differs; None if none does."""
    assert len(actual) == len(expected), (len(actual), len(expected))
    if actual == expected:
        return None
    return next(index for index, (one, other) in enumerate(zip(actual, expected, strict=True)) if one != other)


def count_blocks(size: int) -> int:
    """Return the number of blocks of a file of `size` bytes."""
    return -(-size // BLOCK_BYTES)


class DigestTable(NamedTuple):
    """The table of digests beside a shard file."""

    digests: BlockDigests
    parts: PartTable | None
    """Parts of the image, where the file is compressed."""
    seal: bytes
    """Seal of the file's contents (see shard_layout.seal_rows)."""


def encode_digest_table(size: int, digests: Sequence[int], seal: bytes, parts: PartTable | None = None) -> bytes:
    """Encode the table of digests of a file of `size` bytes."""
    more = b"" if parts is None else parts.tobytes()
    return _HEADER.pack(_MAGIC, size, BLOCK_BYTES) + seal + np.asarray(digests, dtype="<u8").tobytes() + more


def max_table_bytes(size: int, compressed: bool) -> int:
    """Return the maximum bytes of the table of a file of `size` bytes."""
    parts = PART_DTYPE.itemsize * (size // MINIMUM_STORED_BYTES + 1) if compressed else 0
    return _HEADER.size + _SEAL + 8 * count_blocks(size) + parts


def decode_digest_table(data: bytes, size: int, inflated: int | None) -> DigestTable:
    """Read a table. Raises CheckpointError if it is not the table of a file of `size` bytes.

    inflated: bytes of the file's image, if it is compressed.
    """
    begin = _HEADER.size + _SEAL
    end = begin + 8 * count_blocks(size)
    fits = len(data) == end if inflated is None else (len(data) - end) % PART_DTYPE.itemsize == 0
    if len(data) < end or not fits or data[: _HEADER.size] != _HEADER.pack(_MAGIC, size, BLOCK_BYTES):
        raise CheckpointError("it is not the table of digests of that file")
    digests = np.frombuffer(data[:end], dtype="<u8", offset=begin).astype(np.uint64)
    seal = data[_HEADER.size : begin]
    if inflated is None:
        return DigestTable(digests, None, seal)
    parts = np.frombuffer(data, dtype=PART_DTYPE, offset=end)
    check_parts(parts, size, inflated)
    return DigestTable(digests, parts, seal)


DIGESTS_SUFFIX = ".digests"
"""Suffix of the table of digests beside a shard file."""


def find_digest_table(path: Path) -> Path:
    """Return the path of the table of digests of a shard file."""
    return path.with_name(path.name + DIGESTS_SUFFIX)
