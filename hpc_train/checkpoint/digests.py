"""One digest a block of a shard file: what is read is verified, block by block, and damage has an address."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpc_train.checkpoint.chunks import LEAST_STORED, PART, Parts, check_parts
from hpc_train.checkpoint.errors import CheckpointError

BLOCK = 128 << 10
"""Bytes. Smaller ones cost time, larger ones make a reader of a few rows read more than it wants."""
ALGORITHM = "xxh3_64"
_HEADER = struct.Struct("<8sQQ")
_MAGIC, _OLDER_MAGIC = b"HPCTDIG2", b"HPCTDIG1"
_SEAL = 16
"""Bytes of the seal, which follows the header in format 5."""

Digests = NDArray[np.uint64]


def digest_blocks(data: memoryview) -> list[int]:
    """xxh3 of every block; the last may be short. Lets other threads run meanwhile."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(data[begin : begin + BLOCK]) for begin in range(0, len(data), BLOCK)]


def digest_scattered(memory: Iterable[Any]) -> list[int]:
    """The same of what lies in one buffer after the other."""
    found: list[int] = []
    state, missing = None, 0
    for data in memory:
        at, end = 0, len(data)
        if state is not None:
            at = min(missing, end)
            state.update(data if at == end else memoryview(data)[:at])
            missing -= at
            if missing:
                continue
            found.append(state.intdigest())
            state = None
        whole = (end - at) // BLOCK * BLOCK
        if whole:
            found += digest_blocks(memoryview(data)[at : at + whole])
            at += whole
        if at < end:
            state, missing = xxhash.xxh3_64(memoryview(data)[at:]), BLOCK - (end - at)
    return found if state is None else [*found, state.intdigest()]


def first_wrong(found: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first digest that is not as expected."""
    assert len(found) == len(expected), (len(found), len(expected))
    if found == expected:
        return None
    return next(index for index, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other)


def blocks(size: int) -> int:
    """How many a file of `size` bytes has."""
    return -(-size // BLOCK)


class Table(NamedTuple):
    """What lies beside a file."""

    digests: Digests
    parts: Parts | None
    """Of its image, where the file is compressed."""
    seal: bytes | None = None
    """Seal of the file's contents (see seal); None in tables of formats before 5."""


def to_bytes(size: int, digests: Sequence[int], seal: bytes, parts: Parts | None = None) -> bytes:
    """A table as it lies beside its file of `size` bytes."""
    more = b"" if parts is None else parts.tobytes()
    return _HEADER.pack(_MAGIC, size, BLOCK) + seal + np.asarray(digests, dtype="<u8").tobytes() + more


def table_bytes(size: int, compressed: bool = False) -> int:
    """Return the maximum bytes of the table of a file of `size` bytes."""
    parts = PART.itemsize * (size // LEAST_STORED + 1) if compressed else 0
    return _HEADER.size + _SEAL + 8 * blocks(size) + parts


def from_bytes(data: bytes, size: int, inflated: int | None = None) -> Table:
    """Read a table. Raises CheckpointError if it is not the table of a file of `size` bytes.

    inflated: bytes of the file's image, if it is compressed.
    """
    sealed, compressed = data[:8] == _MAGIC, inflated is not None
    begin = _HEADER.size + _SEAL * sealed
    end = begin + 8 * blocks(size)
    whole = (len(data) - end) % PART.itemsize == 0 if compressed else len(data) == end
    header = _HEADER.pack(_MAGIC if sealed else _OLDER_MAGIC, size, BLOCK)
    if len(data) < end or not whole or data[: _HEADER.size] != header:
        raise CheckpointError("it is not the table of digests of that file")
    digests = np.frombuffer(data[:end], dtype="<u8", offset=begin).astype(np.uint64)
    seal = data[_HEADER.size : begin] if sealed else None
    if inflated is None:
        return Table(digests, None, seal)
    parts = np.frombuffer(data, dtype=PART, offset=end)
    check_parts(parts, size, inflated)
    return Table(digests, parts, seal)
