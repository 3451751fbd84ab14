"""An image in memory to a file that is on the disk, hashed on the way, at the disk's own speed."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpc_train.checkpoint.digests import BLOCK, digest_blocks
from hpc_train.checkpoint.files import opened, write_at
from hpc_train.checkpoint.image import ALIGNMENT
from hpc_train.checkpoint.storage.policy import USUAL, Behaviour

_THREADS = 2
_AHEAD = 4
"""Pieces that wait for the disk, or are being written, at most."""
_PARTS = 16
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors that mean that a file system cannot."""
Source = Callable[[int, int], memoryview]
"""The bytes [begin, end) of what is to be written; valid until the same thread asks again. The last end may be that of
a page: what it gives beyond the size is not kept."""
Digests = Callable[[int, memoryview], list[int]]
"""Of the blocks of what came from a byte on."""
Known = Callable[[list[int]], object]
"""Takes the digests of all blocks when they are known, while the last of them are still being written."""
_Piece = tuple[int, int]
"""Its first byte, and the one behind its last."""


def digests_at(begin: int, data: memoryview) -> list[int]:
    """Of what nobody has looked at."""
    return digest_blocks(data)


@dataclass(frozen=True)
class Stream:
    """What is to be written, in pieces."""

    source: Source
    size: int
    stays: bool = False
    """What the source gives stays valid until all is written; then one thread asks for it, in order. Else it is asked
    from several threads and in any order."""
    digests: Digests = digests_at
    """Tells those of what came, if the source knows them."""
    known: Known = lambda digests: None
    """Called again, with the same, where a file refuses direct I/O after all."""


def write_image(path: Path, memory: memoryview, size: int, how: Behaviour = USUAL) -> list[int]:
    """Write the first `size` bytes of `memory` (whole pages) to a new file; returns the digests of its blocks.

    The file is on the disk when this returns; the directory's entry is not synchronised. how: with direct, past the
    page cache where the file system can. Raises OSError, after which the file is whatever it is.
    """
    end = -(-size // ALIGNMENT) * ALIGNMENT
    memory[size:end] = bytes(end - size)
    return write_stream(path, Stream(lambda begin, end: memory[begin:end], size, stays=True), how)


def write_stream(path: Path, stream: Stream, how: Behaviour) -> list[int]:
    """The same of bytes that come in pieces of how.write_bytes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if how.direct:
        try:
            return _write(path, flags | os.O_DIRECT, stream, how)
        except OSError as error:
            if error.errno not in NO_DIRECT:
                raise
            with suppress(FileNotFoundError):
                path.unlink()
    return _write(path, flags, stream, replace(how, direct=False))


def _write(path: Path, flags: int, stream: Stream, how: Behaviour) -> list[int]:
    with opened(path, flags) as file:
        return fill_file(file, stream, how)


def fill_file(file: int, stream: Stream, how: Behaviour) -> list[int]:
    """The same into an empty file that is open: for direct I/O if how.direct."""
    end = -(-stream.size // ALIGNMENT) * ALIGNMENT if how.direct else stream.size
    begin = partial(reserve, file, end) if how.reserve else lambda: None
    found = _chunks(file, stream, end, how.write_bytes, begin=begin)
    os.ftruncate(file, stream.size)
    os.fsync(file)
    return found


def write_part(path: Path, at: int, stream: Stream, how: Behaviour) -> list[int]:
    """Write whole blocks, from byte `at` on, into a file that is there and that others write to as well.

    They are on the disk when this returns; returns their digests. Raises OSError.
    """
    assert at % BLOCK == stream.size % BLOCK == 0, (at, stream.size)
    try:
        with opened(path, os.O_WRONLY | (os.O_DIRECT if how.direct else 0)) as file:
            digests = _chunks(file, stream, stream.size, how.write_bytes, at)
            os.fsync(file)
            return digests
    except OSError as error:
        if not how.direct or error.errno not in NO_DIRECT:
            raise
    return write_part(path, at, stream, replace(how, direct=False))


def _chunks(
    file: int,
    stream: Stream,
    end: int,
    chunk: int,
    at: int = 0,
    begin: Callable[[], None] = lambda: None,
) -> list[int]:
    """Hash and write every chunk, some at a time, to its place after byte `at`; the digests in order.

    begin: before the first write, beside the first hashes.
    """
    assert chunk % BLOCK == 0, chunk

    def get(piece: _Piece) -> tuple[memoryview, list[int]]:
        data = stream.source(*piece)
        return data, stream.digests(piece[0], data[: stream.size - piece[0]])

    begun: Future[None] | None = None

    def put(piece: _Piece, data: memoryview) -> None:
        if begun is not None:
            begun.result()
        write_at(file, data, at + piece[0])

    def both(piece: _Piece) -> list[int]:
        data, found = get(piece)
        put(piece, data)
        return found

    pieces = list(_pieces(end, chunk))
    if len(pieces) == 1:
        begin()
        found = both(pieces[0])
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            begun = pool.submit(begin)
            if stream.stays:
                return _ahead(pool, pieces, get, put, stream.known)
            found = [it for of_piece in pool.map(both, pieces) for it in of_piece]
    stream.known(found)
    return found


def _pieces(end: int, chunk: int) -> Iterator[_Piece]:
    """The first chunk in parts that grow, so that the disk soon has something to do."""
    begin, part = 0, max(chunk // _PARTS // BLOCK, 1) * BLOCK
    while begin < end:
        yield begin, min(begin + part, end)
        begin += part
        part = chunk if begin >= chunk else min(begin, chunk - begin)


def _ahead(
    pool: ThreadPoolExecutor,
    pieces: Sequence[_Piece],
    get: Callable[[_Piece], tuple[memoryview, list[int]]],
    put: Callable[[_Piece, memoryview], None],
    known: Known,
) -> list[int]:
    """Get every piece in this thread while those before it are written, so that the disk always has one to take.

    Threads that did both would fall into step, as the disk serves their writes alike: it would wait while all of them
    get their next.
    """
    writing: deque[Future[None]] = deque()
    found: list[int] = []
    try:
        for piece in pieces:
            data, digests = get(piece)
            found += digests
            writing.append(pool.submit(put, piece, data))
            while writing and (writing[0].done() or len(writing) > _AHEAD):
                writing.popleft().result()
        known(found)
        for it in writing:
            it.result()
        return found
    finally:
        for it in writing:
            it.cancel()


def reserve(file: int, size: int) -> None:
    """So that a full disk shows before anything is written."""
    try:
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
