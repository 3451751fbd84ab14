"""Write shard files and synchronise them, with a digest of every block, at the speed of the disk.

A `WriteStream` gives the bytes in chunks: from memory, gathered from scattered tensors (`GatherSource`), or from a disk
of the node (local_stage.py).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, digest_blocks
from hpc_train.checkpoint.format.hdf5_layout import ALIGNMENT, ShardImage
from hpc_train.checkpoint.storage.file_system import (
    WritePolicy,
    open_descriptor,
    write_at_offset,
)


@dataclass(frozen=True)
class MemoryExtent:
    """Bytes of a file, and the memory that they come from."""

    begin: int
    data: memoryview
    aligned: bool = False
    """Page borders of the memory are those of the file, so direct I/O can read from it."""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class GatherBuffers:
    """Buffers for the threads that gather, reused from file to file: faulting in new pages takes longer than a copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._in_use: dict[int, mmap.mmap] = {}

    def free(self) -> None:
        """Take back all buffers; the threads that had them have ended."""
        self._free += self._in_use.values()
        self._in_use = {}

    def for_this_thread(self, size: int) -> memoryview:
        """Return a buffer of at least `size` bytes that is this thread's until `free`."""
        with self._lock:
            thread = threading.get_ident()
            if thread not in self._in_use or len(self._in_use[thread]) < size:
                self._in_use[thread] = self._take(size)
            return memoryview(self._in_use[thread])

    def _take(self, size: int) -> mmap.mmap:
        self._free = [buffer for buffer in self._free if len(buffer) >= size]
        return self._free.pop() if self._free else mmap.mmap(-1, -(-size // ALIGNMENT) * ALIGNMENT)


class GatherSource:
    """Gathers the bytes of a file from scattered memory; its `read` is a ReadImage."""

    def __init__(self, rows: Sequence[MemoryExtent], image: ShardImage, buffers: GatherBuffers) -> None:
        """rows: the data of the image. buffers: not in use by another source."""
        structure = [MemoryExtent(begin, memoryview(content)) for begin, content in image.structure]
        self._extents = sorted([*rows, *structure], key=lambda extent: extent.begin)
        self._begins = [extent.begin for extent in self._extents]
        self._buffers = buffers
        buffers.free()

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of the file, valid until this thread calls again; undefined past its end."""
        first = max(0, bisect_right(self._begins, begin) - 1)
        extent = self._extents[first]
        # Nothing to gather: direct I/O can read from the tensor's own memory.
        if extent.aligned and extent.end >= end:
            return extent.data[begin - extent.begin : end - extent.begin]
        buffer = self._buffers.for_this_thread(end - begin)[: end - begin]
        for extent in self._extents[first : bisect_left(self._begins, end)]:
            low, high = max(begin, extent.begin), min(end, extent.end)
            buffer[low - begin : high - begin] = extent.data[low - extent.begin : high - extent.begin]
        return buffer


def list_extents(memory: memoryview, image: ShardImage, spans: Sequence[tuple[int, int]]) -> list[MemoryExtent]:
    """Return an extent for each row with data. spans: (begin, size) of each row in `memory`, which begins at a page."""
    return [
        MemoryExtent(place, memory[begin : begin + size], (begin - place) % ALIGNMENT == 0)
        for place, (begin, size) in zip(image.places, spans, strict=True)
        if size
    ]


_THREADS = 2
"""Threads that write: while one waits for the disk, the other has its next chunk ready."""
_AHEAD = 4
"""Maximum chunks that are being written or wait for it."""
_PARTS = 16
"""The first write is this part of a chunk, so that the disk starts early."""
DIRECT_IO_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors by which file systems refuse direct I/O or fallocate."""
ReadImage = Callable[[int, int], memoryview]
"""Returns bytes [begin, end) of the file, valid until the same thread calls again.

The last end may be rounded up to a page; bytes beyond the size are cut off."""
DigestPart = Callable[[int, memoryview], list[int]]
"""Returns the digests of the blocks of data that begins at a byte of the file."""
OnDigests = Callable[[list[int]], object]
"""Called with the digests of all blocks, while the last blocks are still being written."""
_ChunkSpan = tuple[int, int]
"""(first byte, one past the last)"""


def compute_digests(begin: int, data: memoryview) -> list[int]:
    """Compute the digests of the blocks of `data`; `begin` is not needed (a DigestPart)."""
    return digest_blocks(data)


@dataclass(frozen=True)
class WriteStream:
    """The bytes of a file to write."""

    source: ReadImage
    size: int
    memory_stays: bool = False
    """Whether what the source returns stays valid until the end of the write.

    If so one thread calls the source, in order; else several threads call it, in any order."""
    digests: DigestPart = compute_digests
    """Returns the digests of what the source returned."""
    on_digests: OnDigests = lambda digests: None
    """Called a second time, with the same digests, if the file system refuses direct I/O late."""


def write_image(path: Path, memory: memoryview, size: int, policy: WritePolicy) -> list[int]:
    """Write the first `size` bytes of `memory` (whole pages) to a new file; returns the digests of its blocks.

    The content is synchronised, the directory entry is not. Raises OSError; the file may then be incomplete.
    """
    end = -(-size // ALIGNMENT) * ALIGNMENT
    memory[size:end] = bytes(end - size)
    return write_stream(path, WriteStream(lambda begin, end: memory[begin:end], size, memory_stays=True), policy)


def write_stream(path: Path, stream: WriteStream, policy: WritePolicy) -> list[int]:
    """Write a stream to a new file, as write_image does; returns the digests of its blocks."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if policy.direct:
        try:
            return _write_new_file(path, flags | os.O_DIRECT, stream, policy)
        except OSError as error:
            if error.errno not in DIRECT_IO_REFUSED:
                raise
            # Some file systems refuse only at the first write: begin again with a new file, through the page cache.
            with suppress(FileNotFoundError):
                path.unlink()
    return _write_new_file(path, flags, stream, replace(policy, direct=False))


def _write_new_file(path: Path, flags: int, stream: WriteStream, policy: WritePolicy) -> list[int]:
    with open_descriptor(path, flags) as file:
        return fill_open_file(file, stream, policy)


def fill_open_file(file: int, stream: WriteStream, policy: WritePolicy) -> list[int]:
    """Write a stream to an open, empty file and synchronise it; returns the digests.

    The file must be open for direct I/O if policy.direct.
    """
    end = -(-stream.size // ALIGNMENT) * ALIGNMENT if policy.direct else stream.size
    # Reserving first also keeps the file in few extents. It can take long, so the first chunks are hashed meanwhile.
    begin = partial(reserve_space, file, end) if policy.reserve else lambda: None
    digests = _write_chunks(file, stream, end, policy.write_bytes, begin=begin)
    os.ftruncate(file, stream.size)  # direct I/O has written whole pages
    os.fsync(file)
    return digests


def write_file_part(path: Path, at: int, stream: WriteStream, policy: WritePolicy) -> list[int]:
    """Write whole blocks into an existing file, from byte `at` on, and synchronise it; returns their digests.

    Other ranks may write to other parts of the file meanwhile. Raises OSError.
    """
    assert at % BLOCK_BYTES == stream.size % BLOCK_BYTES == 0, (at, stream.size)
    try:
        with open_descriptor(path, os.O_WRONLY | (os.O_DIRECT if policy.direct else 0)) as file:
            digests = _write_chunks(file, stream, stream.size, policy.write_bytes, at)
            os.fsync(file)
            return digests
    except OSError as error:
        if not policy.direct or error.errno not in DIRECT_IO_REFUSED:
            raise
    return write_file_part(path, at, stream, replace(policy, direct=False))


def _write_chunks(
    file: int,
    stream: WriteStream,
    end: int,
    chunk: int,
    at: int = 0,
    begin: Callable[[], None] = lambda: None,
) -> list[int]:
    """Hash and write all chunks, a few at a time, from byte `at` of the file on; returns the digests in order.

    begin: called before the first write, while the first chunks are hashed.
    """
    assert chunk % BLOCK_BYTES == 0, chunk

    def get(span: _ChunkSpan) -> tuple[memoryview, list[int]]:
        data = stream.source(*span)
        return data, stream.digests(span[0], data[: stream.size - span[0]])

    begun: Future[None] | None = None

    def put(span: _ChunkSpan, data: memoryview) -> None:
        # `begin` reserves the space of the file: no write may come before it, and its error must stop all writes.
        if begun is not None:
            begun.result()
        write_at_offset(file, data, at + span[0])

    def get_and_put(span: _ChunkSpan) -> list[int]:
        data, digests = get(span)
        put(span, data)
        return digests

    chunks = list(_split_chunks(end, chunk))
    if len(chunks) == 1:
        begin()  # nothing is hashed while the only chunk is written, so no thread would help
        digests = get_and_put(chunks[0])
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            begun = pool.submit(begin)
            if stream.memory_stays:
                return _write_ahead(pool, chunks, get, put, stream.on_digests)
            digests = [digest for of_chunk in pool.map(get_and_put, chunks) for digest in of_chunk]
    stream.on_digests(digests)
    return digests


def _split_chunks(end: int, chunk: int) -> Iterator[_ChunkSpan]:
    """Yield the chunks; the first one in growing parts, so that the disk has work early."""
    begin, part = 0, max(chunk // _PARTS // BLOCK_BYTES, 1) * BLOCK_BYTES
    while begin < end:
        yield begin, min(begin + part, end)
        begin += part
        part = chunk if begin >= chunk else min(begin, chunk - begin)


def _write_ahead(
    pool: ThreadPoolExecutor,
    chunks: Sequence[_ChunkSpan],
    get: Callable[[_ChunkSpan], tuple[memoryview, list[int]]],
    put: Callable[[_ChunkSpan, memoryview], None],
    on_digests: OnDigests,
) -> list[int]:
    """Get every chunk in this thread while the chunks before it are written by others; returns the digests.

    Threads that did both would fall into step, because the disk serves their writes equally: it would idle while all of
    them get their next chunk.
    """
    writing: deque[Future[None]] = deque()
    written_digests: list[int] = []
    try:
        for span in chunks:
            data, digests = get(span)
            written_digests += digests
            writing.append(pool.submit(put, span, data))
            # Also collect writes that are already done, so that an error shows at once.
            while writing and (writing[0].done() or len(writing) > _AHEAD):
                writing.popleft().result()
        on_digests(written_digests)
        for write in writing:
            write.result()
        return written_digests
    finally:
        for write in writing:
            write.cancel()


def reserve_space(file: int, size: int) -> None:
    """Reserve the space of a file, so that a full disk shows before anything is written. Raises OSError."""
    try:
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        if error.errno not in DIRECT_IO_REFUSED:
            raise
