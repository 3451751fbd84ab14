"""Write an image in memory to a file that is on the disk, hashed on the way, at the disk's own speed.

A `WriteStream` gives the bytes in chunks: from memory, gathered from tensors that lie here and there
(`GatherSource`), or from a disk of the node. `LocalStage` puts such a disk (checkpoint.stage_dir) between memory and
the shared directory, so that a save is done with memory long before it is committed. The file there has no name: no
restart can take it for a checkpoint, and the kernel removes it with the process. Every block is hashed on the way in
and on the way out.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, digest_blocks
from hpc_train.checkpoint.format.hdf5_layout import ALIGNMENT, ShardImage
from hpc_train.checkpoint.storage.file_system import (
    DEFAULT_POLICY,
    WritePolicy,
    detect_file_system,
    open_descriptor,
    write_at_offset,
)
from hpc_train.units import format_bytes


@dataclass(frozen=True)
class MemoryExtent:
    """Bytes of a file, and where they come from."""

    begin: int
    data: memoryview
    aligned: bool = False
    """The memory begins at a page where the file does, and so direct I/O takes it."""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class GatherBuffers:
    """Pages for the threads of one packing after the other: new ones cost several times what is done with them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._in_use: dict[int, mmap.mmap] = {}

    def free(self) -> None:
        """The threads that had them have ended."""
        self._free += self._in_use.values()
        self._in_use = {}

    def for_this_thread(self, size: int) -> memoryview:
        """At least so many bytes, of this thread until `free`."""
        with self._lock:
            thread = threading.get_ident()
            if thread not in self._in_use or len(self._in_use[thread]) < size:
                self._in_use[thread] = self._take(size)
            return memoryview(self._in_use[thread])

    def _take(self, size: int) -> mmap.mmap:
        self._free = [it for it in self._free if len(it) >= size]
        return self._free.pop() if self._free else mmap.mmap(-1, -(-size // ALIGNMENT) * ALIGNMENT)


class GatherSource:
    """A source for `stream.write_stream`."""

    def __init__(self, rows: Sequence[MemoryExtent], image: ShardImage, buffers: GatherBuffers) -> None:
        """rows: the data of the image. buffers: no other packing's now."""
        structure = [MemoryExtent(begin, memoryview(content)) for begin, content in image.structure]
        self._extents = sorted([*rows, *structure], key=lambda it: it.begin)
        self._begins = [it.begin for it in self._extents]
        self._buffers = buffers
        buffers.free()

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the file, valid until this thread asks again; what is past its end is undefined."""
        first = max(0, bisect_right(self._begins, begin) - 1)
        extent = self._extents[first]
        if extent.aligned and extent.end >= end:
            return extent.data[begin - extent.begin : end - extent.begin]
        buffer = self._buffers.for_this_thread(end - begin)[: end - begin]
        for extent in self._extents[first : bisect_left(self._begins, end)]:
            low, high = max(begin, extent.begin), min(end, extent.end)
            buffer[low - begin : high - begin] = extent.data[low - extent.begin : high - extent.begin]
        return buffer


def list_extents(memory: memoryview, image: ShardImage, spans: Sequence[tuple[int, int]]) -> list[MemoryExtent]:
    """The data of an image. spans: (begin, size) in `memory`, which begins at a page, of each of its rows."""
    return [
        MemoryExtent(place, memory[begin : begin + size], (begin - place) % ALIGNMENT == 0)
        for place, (begin, size) in zip(image.places, spans, strict=True)
        if size
    ]


_THREADS = 2
_AHEAD = 4
"""Pieces that wait for the disk, or are being written, at most."""
_PARTS = 16
DIRECT_IO_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors that mean that a file system cannot."""
ReadImage = Callable[[int, int], memoryview]
"""The bytes [begin, end) of what is to be written; valid until the same thread asks again. The last end may be that of
a page: what it gives beyond the size is not kept."""
DigestPart = Callable[[int, memoryview], list[int]]
"""Of the blocks of what came from a byte on."""
OnDigests = Callable[[list[int]], object]
"""Takes the digests of all blocks when they are known, while the last of them are still being written."""
_ChunkSpan = tuple[int, int]
"""Its first byte, and the one behind its last."""


def compute_digests(begin: int, data: memoryview) -> list[int]:
    """Of what nobody has looked at."""
    return digest_blocks(data)


@dataclass(frozen=True)
class WriteStream:
    """What is to be written, in chunks."""

    source: ReadImage
    size: int
    memory_stays: bool = False
    """What the source gives stays valid until all is written; then one thread asks for it, in order. Else it is asked
    from several threads and in any order."""
    digests: DigestPart = compute_digests
    """Tells those of what came, if the source knows them."""
    on_digests: OnDigests = lambda digests: None
    """Called again, with the same, where a file refuses direct I/O after all."""


def write_image(path: Path, memory: memoryview, size: int, policy: WritePolicy = DEFAULT_POLICY) -> list[int]:
    """Write the first `size` bytes of `memory` (whole pages) to a new file; returns the digests of its blocks.

    The file is on the disk when this returns; the directory's entry is not synchronised. how: with direct, past the
    page cache where the file system can. Raises OSError, after which the file is whatever it is.
    """
    end = -(-size // ALIGNMENT) * ALIGNMENT
    memory[size:end] = bytes(end - size)
    return write_stream(path, WriteStream(lambda begin, end: memory[begin:end], size, memory_stays=True), policy)


def write_stream(path: Path, stream: WriteStream, policy: WritePolicy) -> list[int]:
    """The same of bytes that come in chunks of how.write_bytes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    if policy.direct:
        try:
            return _write_new_file(path, flags | os.O_DIRECT, stream, policy)
        except OSError as error:
            if error.errno not in DIRECT_IO_REFUSED:
                raise
            with suppress(FileNotFoundError):
                path.unlink()
    return _write_new_file(path, flags, stream, replace(policy, direct=False))


def _write_new_file(path: Path, flags: int, stream: WriteStream, policy: WritePolicy) -> list[int]:
    with open_descriptor(path, flags) as file:
        return fill_open_file(file, stream, policy)


def fill_open_file(file: int, stream: WriteStream, policy: WritePolicy) -> list[int]:
    """The same into an empty file that is open: for direct I/O if how.direct."""
    end = -(-stream.size // ALIGNMENT) * ALIGNMENT if policy.direct else stream.size
    begin = partial(reserve_space, file, end) if policy.reserve else lambda: None
    found = _write_chunks(file, stream, end, policy.write_bytes, begin=begin)
    os.ftruncate(file, stream.size)
    os.fsync(file)
    return found


def write_file_part(path: Path, at: int, stream: WriteStream, policy: WritePolicy) -> list[int]:
    """Write whole blocks, from byte `at` on, into a file that is there and that others write to as well.

    They are on the disk when this returns; returns their digests. Raises OSError.
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
    """Hash and write every chunk, some at a time, to its place after byte `at`; the digests in order.

    begin: before the first write, beside the first hashes.
    """
    assert chunk % BLOCK_BYTES == 0, chunk

    def get(span: _ChunkSpan) -> tuple[memoryview, list[int]]:
        data = stream.source(*span)
        return data, stream.digests(span[0], data[: stream.size - span[0]])

    begun: Future[None] | None = None

    def put(span: _ChunkSpan, data: memoryview) -> None:
        if begun is not None:
            begun.result()
        write_at_offset(file, data, at + span[0])

    def both(span: _ChunkSpan) -> list[int]:
        data, found = get(span)
        put(span, data)
        return found

    chunks = list(_split_chunks(end, chunk))
    if len(chunks) == 1:
        begin()
        found = both(chunks[0])
    else:
        with ThreadPoolExecutor(_THREADS) as pool:
            begun = pool.submit(begin)
            if stream.memory_stays:
                return _write_ahead(pool, chunks, get, put, stream.on_digests)
            found = [it for of_chunk in pool.map(both, chunks) for it in of_chunk]
    stream.on_digests(found)
    return found


def _split_chunks(end: int, chunk: int) -> Iterator[_ChunkSpan]:
    """The first chunk in parts that grow, so that the disk soon has something to do."""
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
    """Get every span in this thread while those before it are written, so that the disk always has one to take.

    Threads that did both would fall into step, as the disk serves their writes alike: it would wait while all of them
    get their next.
    """
    writing: deque[Future[None]] = deque()
    found: list[int] = []
    try:
        for span in chunks:
            data, digests = get(span)
            found += digests
            writing.append(pool.submit(put, span, data))
            while writing and (writing[0].done() or len(writing) > _AHEAD):
                writing.popleft().result()
        on_digests(found)
        for it in writing:
            it.result()
        return found
    finally:
        for it in writing:
            it.cancel()


def reserve_space(file: int, size: int) -> None:
    """So that a full disk shows before anything is written."""
    try:
        os.posix_fallocate(file, 0, max(size, 1))
    except OSError as error:
        if error.errno not in DIRECT_IO_REFUSED:
            raise


_log = logging.getLogger(__name__)


@dataclass
class LocalFile:
    """A shard's image on a disk of the node."""

    descriptor: int
    size: int
    digests: list[int]

    def copy_to(self, path: Path, policy: WritePolicy) -> list[int]:
        """Write a new file with the same bytes, on the disk when this returns; returns the digests of its blocks.

        Raises OSError, and CheckpointError if the bytes are no longer those that were put here.
        """
        return self._checked(write_stream(path, WriteStream(self._reads(policy).read, self.size), policy))

    def copy_into(self, path: Path, at: int, policy: WritePolicy) -> list[int]:
        """The same as whole blocks of a file that is there, from byte `at` on."""
        return self._checked(write_file_part(path, at, WriteStream(self._reads(policy).read, self.size), policy))

    def _reads(self, policy: WritePolicy) -> _Reads:
        return _Reads(self.descriptor, self.size, policy.write_bytes)

    def _checked(self, found: list[int]) -> list[int]:
        if found != self.digests:
            raise CheckpointError("the copy in checkpoint.stage_dir was damaged before it was committed")
        return found

    def close(self) -> None:
        """Give the disk back."""
        os.close(self.descriptor)


@dataclass
class LocalStage:
    """checkpoint.stage_dir of this node. Where it cannot be used, saves go straight from memory, and that is told."""

    directory: Path
    _warned: set[str] = field(default_factory=set)

    @classmethod
    def from_setting(cls, text: str | None) -> LocalStage | None:
        """From the setting; None where there is none. Environment variables are those of this process."""
        return cls(Path(os.path.expandvars(text)).expanduser().absolute()) if text else None

    def copy_from(self, memory: memoryview, size: int) -> LocalFile | None:
        """A copy of the first `size` bytes (whole pages); None, after a warning, if it cannot be had."""
        try:
            reason = self._find_obstacle(size)
            if reason is None:
                return _write_local_file(self.directory, memory, size)
        except OSError as error:
            reason = f"{error.strerror}; the save goes straight from memory"
        self._warn_once(reason)
        return None

    def _find_obstacle(self, size: int) -> str | None:
        system = detect_file_system(self.directory)
        if system.shared_memory:
            return "it is in memory, where a copy gains nothing; give a directory on a disk of the node"
        if size + ALIGNMENT > system.free_bytes:
            has, needs = format_bytes(system.free_bytes), format_bytes(size)
            return f"it has {has} free, this rank needs {needs}; the save goes straight from memory"
        return None

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            _log.warning("checkpoint.stage_dir=%s is not used: %s", self.directory, reason)
        self._warned.add(reason)


@dataclass
class _Reads:
    """Reads of a file, each thread into a buffer of its own."""

    descriptor: int
    size: int
    buffer_bytes: int
    _of_thread: threading.local = field(default_factory=threading.local)

    def read(self, begin: int, end: int) -> memoryview:
        """What is past the end of the file is undefined. Direct I/O wants whole pages, also of what is not wanted."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = mmap.mmap(-1, self.buffer_bytes)
        data = memoryview(self._of_thread.buffer)[: -(-(end - begin) // ALIGNMENT) * ALIGNMENT]
        at = 0
        while begin + at < min(end, self.size):
            count = os.preadv(self.descriptor, [data[at:]], begin + at)
            if count == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            at += count
            if begin + at < self.size:
                at = max(at - count, at // ALIGNMENT * ALIGNMENT)  # and goes on at a whole one
        return data[: end - begin]


def _write_local_file(directory: Path, memory: memoryview, size: int) -> LocalFile:
    try:
        return _write_with_policy(directory, memory, size, WritePolicy(direct=True))
    except OSError as error:
        if error.errno not in DIRECT_IO_REFUSED:
            raise
        return _write_with_policy(directory, memory, size, WritePolicy(direct=False))


def _write_with_policy(directory: Path, memory: memoryview, size: int, policy: WritePolicy) -> LocalFile:
    descriptor = _open_unnamed(directory, os.O_DIRECT if policy.direct else 0)
    try:
        image = WriteStream(lambda begin, end: memory[begin:end], size, memory_stays=True)
        return LocalFile(descriptor, size, fill_open_file(descriptor, image, policy))
    except BaseException:
        os.close(descriptor)
        raise


def _open_unnamed(directory: Path, flags: int) -> int:
    """An open file that no directory has. The second way has a name for a moment, but nothing in it."""
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    descriptor, path = tempfile.mkstemp(prefix="hpc_train-stage-", dir=directory)
    try:
        return os.open(path, flags)
    finally:
        os.close(descriptor)
        Path(path).unlink()
