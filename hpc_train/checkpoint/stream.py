"""An image in memory to a file that is on the disk, hashed on the way, at the disk's own speed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hpc_train.checkpoint.digests import BLOCK, digest_blocks
from hpc_train.checkpoint.files import opened, write_at
from hpc_train.checkpoint.image import ALIGNMENT
from hpc_train.checkpoint.storage.policy import USUAL, Behaviour

THREADS = 2
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors that mean that a file system cannot."""
Source = Callable[[int, int], memoryview]
"""The bytes [begin, end) of what is to be written; valid until the same thread asks again. The last end may be that of
a page: what it gives beyond the size is not kept."""
Digests = Callable[[int, memoryview], list[int]]
"""Of the blocks of what came from a byte on."""


def digests_at(begin: int, data: memoryview) -> list[int]:
    """Of what nobody has looked at."""
    return digest_blocks(data)


def write_image(path: Path, memory: memoryview, size: int, how: Behaviour = USUAL) -> list[int]:
    """Write the first `size` bytes of `memory` (whole pages) to a new file; returns the digests of its blocks.

    The file is on the disk when this returns; the directory's entry is not synchronised. how: with direct, past the
    page cache where the file system can. Raises OSError, after which the file is whatever it is.
    """
    end = -(-size // ALIGNMENT) * ALIGNMENT
    memory[size:end] = bytes(end - size)
    return write_stream(path, lambda begin, end: memory[begin:end], size, how)


def write_stream(
    path: Path, source: Source, size: int, how: Behaviour, threads: int = THREADS, digests: Digests = digests_at
) -> list[int]:
    """The same of bytes that come in pieces of how.write_bytes, from several threads and in any order.

    digests: tells those of what came, if the source knows them.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if how.direct:
        try:
            return _write(path, flags | os.O_DIRECT, source, size, how, threads, digests)
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise
            with suppress(FileNotFoundError):
                path.unlink()
    return _write(path, flags, source, size, replace(how, direct=False), threads, digests)


def _write(
    path: Path, flags: int, source: Source, size: int, how: Behaviour, threads: int, digests: Digests
) -> list[int]:
    with opened(path, flags) as file:
        return fill_file(file, source, size, how, threads, digests)


def fill_file(
    file: int, source: Source, size: int, how: Behaviour, threads: int = THREADS, digests: Digests = digests_at
) -> list[int]:
    """The same into an empty file that is open: for direct I/O if how.direct."""
    end = -(-size // ALIGNMENT) * ALIGNMENT if how.direct else size
    if how.reserve:
        reserve(file, end)
    found = list(_chunks(file, source, size, end, how.write_bytes, threads, digests=digests))
    os.ftruncate(file, size)
    os.fsync(file)
    return found


def write_part(path: Path, at: int, source: Source, size: int, how: Behaviour) -> list[int]:
    """Write whole blocks, from byte `at` on, into a file that is there and that others write to as well.

    They are on the disk when this returns; returns their digests. Raises OSError.
    """
    assert at % BLOCK == size % BLOCK == 0, (at, size)
    try:
        with opened(path, os.O_WRONLY | (os.O_DIRECT if how.direct else 0)) as file:
            digests = list(_chunks(file, source, size, size, how.write_bytes, THREADS, at))
            os.fsync(file)
            return digests
    except OSError as error:
        if not how.direct or error.errno not in NO_DIRECT:
            raise
    return write_part(path, at, source, size, replace(how, direct=False))


def _chunks(
    file: int,
    source: Source,
    size: int,
    end: int,
    chunk: int,
    threads: int,
    at: int = 0,
    digests: Digests = digests_at,
) -> Iterator[int]:
    """Hash and write every chunk, some at a time, to its place after byte `at`; the digests in order."""
    assert chunk % BLOCK == 0, chunk

    def put(begin: int) -> list[int]:
        data = source(begin, min(begin + chunk, end))
        found = digests(begin, data[: size - begin])
        write_at(file, data, at + begin)
        return found

    if end <= chunk:
        yield from put(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        for found in pool.map(put, range(0, end, chunk)):
            yield from found


def reserve(file: int, size: int) -> None:
    """So that a full disk shows before anything is written."""
    try:
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
