"""An image in memory to a file that is on the disk, hashed on the way, at the disk's own speed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from hpc_train.checkpoint.digests import digest_blocks
from hpc_train.checkpoint.files import opened, write_at
from hpc_train.checkpoint.image import ALIGNMENT

CHUNK = 16 << 20
"""Bytes of one write: at least a stripe of a Lustre file, and a multiple of a block of digests."""
THREADS = 2
_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def write_image(path: Path, memory: memoryview, size: int, direct: bool = True) -> list[int]:
    """Write the first `size` bytes of `memory` (whole pages) to a new file; returns the digests of its blocks.

    The file is on the disk when this returns; the directory's entry is not synchronised. direct: past the page cache,
    where the file system can. Raises OSError, after which the file is whatever it is.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if direct:
        try:
            return _write(path, flags | os.O_DIRECT, memory, size, ALIGNMENT)
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            with suppress(FileNotFoundError):
                path.unlink()
    return _write(path, flags, memory, size, 1)


def _write(path: Path, flags: int, memory: memoryview, size: int, grain: int) -> list[int]:
    end = -(-size // grain) * grain
    memory[size:end] = bytes(end - size)
    with opened(path, flags) as file:
        _reserve(file, end)
        digests = list(_chunks(file, memory, size, end))
        os.ftruncate(file, size)
        os.fsync(file)
    return digests


def _chunks(file: int, memory: memoryview, size: int, end: int) -> Iterator[int]:
    """Hash and write every chunk, two at a time; the digests in order."""

    def put(begin: int) -> list[int]:
        found = digest_blocks(memory[begin : min(begin + CHUNK, size)])
        write_at(file, memory[begin : min(begin + CHUNK, end)], begin)
        return found

    if end <= CHUNK:
        yield from put(0)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(put, range(0, end, CHUNK)):
            yield from found


def _reserve(file: int, size: int) -> None:
    """So that a full disk shows before anything is written."""
    try:
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
