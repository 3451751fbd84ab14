"""One digest a block of a shard file: what is read is verified, block by block, and damage has an address."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError

BLOCK = 128 << 10
"""Bytes. Smaller ones cost time, larger ones make a reader of a few rows read more than it wants."""
ALGORITHM = "xxh3_64"
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"HPCTDIG1"

Digests = NDArray[np.uint64]


def digest_blocks(data: memoryview) -> list[int]:
    """xxh3 of every block; the last may be short. Lets other threads run meanwhile."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK)]


def first_wrong(data: memoryview, expected: Sequence[int] | Digests) -> int | None:
    """Index of the first block of `data`, which begins at a block, that is not as expected."""
    found = digest_blocks(data)
    assert len(found) == len(expected), (len(found), len(expected))
    wrong = np.flatnonzero(np.asarray(found, dtype=np.uint64) != np.asarray(expected, dtype=np.uint64))
    return int(wrong[0]) if len(wrong) else None


def blocks(size: int) -> int:
    """How many a file of `size` bytes has."""
    return -(-size // BLOCK)


def to_bytes(size: int, digests: Sequence[int]) -> bytes:
    """A table of digests as it lies beside its file of `size` bytes."""
    return _HEADER.pack(_MAGIC, size, BLOCK) + np.asarray(digests, dtype="<u8").tobytes()


def from_bytes(data: bytes, size: int) -> Digests:
    """Raises CheckpointError if it is not the table of a file of `size` bytes."""
    if len(data) != _HEADER.size + 8 * blocks(size) or data[: _HEADER.size] != _HEADER.pack(_MAGIC, size, BLOCK):
        raise CheckpointError("it is not the table of digests of that file")
    return np.frombuffer(data, dtype="<u8", offset=_HEADER.size).astype(np.uint64)
