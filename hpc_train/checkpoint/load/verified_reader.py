"""Read the shard files of a step and verify every block.

A file is read past the page cache (O_DIRECT) unless most of it is cached already. A compressed file is read as its
uncompressed image: blocks are verified as they are stored, then inflated.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import (
    BLOCK_BYTES,
    DigestTable,
    decode_digest_table,
    digest_blocks,
    digest_scattered_blocks,
    find_digest_table,
    find_first_mismatch,
    max_table_bytes,
)
from hpc_train.checkpoint.format.compressed_chunks import (
    PartTable,
    do_parts_cover,
    inflate_chunk,
    list_parts_within,
    list_stored_parts_within,
)
from hpc_train.checkpoint.format.hdf5_layout import ALIGNMENT
from hpc_train.checkpoint.format.manifest import Manifest, ShardFile
from hpc_train.checkpoint.format.shard_consistency import check_shard_file
from hpc_train.checkpoint.load.read_schedule import Strips, strip_ends
from hpc_train.checkpoint.storage.file_system import allocate_pages, checksum_bytes
from hpc_train.regular_files import is_plain_directory, open_regular, read_regular

CACHE_BYTES = 1 << 20
"""Bytes that are verified while they are still in the processor's cache."""
_MAX_THREADS = 4
"""Maximum threads of one process; more gain nothing."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
OnVerified = Callable[[int, int], object]
"""Called with bytes (begin, end) of the image when they are verified."""


class DamagedBlockError(CheckpointError):
    """A block differs from what was committed."""

    def __init__(self, name: str, at: int, tensor: str | None = None, lost: Sequence[tuple[int, int]] = ()) -> None:
        """at: byte of the file. lost: spans [begin, end) of the image that it damages, if the file is compressed."""
        where = f": tensor {tensor!r}" if tensor else ""
        super().__init__(f"{name}{where}: its content is not what was committed (block at byte {at})")
        self.name, self.at, self.lost = name, at, lost or [(at, at + BLOCK_BYTES)]


class ShardReader:
    """Reads verified bytes of one step's shard files. Any number of threads may read."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        files = manifest.files
        self._directory, self._files, self._manifest = directory, files, manifest
        self.sizes = [file.image for file in files]
        """Bytes of the image of every file."""
        self._open: dict[int, _OpenShard] = {}
        self._lock, self._local = threading.Lock(), threading.local()
        self.threads = max(1, min(len(os.sched_getaffinity(0)), _MAX_THREADS))
        """Number of threads that may use a processor at once."""
        self.threads_beside_io = max(1, self.threads // 2)
        """Number of threads that may use a processor while others wait for the disk: the kernel needs some too."""
        self._thread_slots = threading.Semaphore(self.threads)
        self._slots_beside_io = threading.Semaphore(self.threads_beside_io)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *error: object) -> None:
        for shard in self._open.values():
            os.close(shard.descriptor)

    def read(
        self, file: int, begin: int, size: int, memory: memoryview, then: OnVerified = lambda first, last: None
    ) -> None:
        """Read `size` bytes of the image from `begin` on into `memory`, and verify them.

        The bytes must be whole blocks, or end with the file. If the file is_direct, memory must begin at a page and
        have room for whole pages. Bytes between the tensors of a compressed file are undefined.
        then: called for each verified part, mostly while it is in the processor's cache.
        Raises DamagedBlockError, CheckpointError for a file that is not as it was committed, and OSError.
        """
        shard = self._open_file(file)
        if shard.parts is None:
            self._read(shard, begin, size, memory, then)
        else:
            self._inflate(shard, begin, memory[:size])
            then(begin, begin + size)

    def _inflate(self, shard: _OpenShard, begin: int, memory: memoryview) -> None:
        assert shard.parts is not None
        for part in _split_parts(list_parts_within(shard.parts, begin, begin + len(memory))) if memory else []:
            low = int(part["at"].min()) // BLOCK_BYTES * BLOCK_BYTES
            high = min(-(-int((part["at"] + part["stored"]).max()) // BLOCK_BYTES) * BLOCK_BYTES, shard.size)
            # Digests are of stored bytes, so whole blocks are read and verified before anything is decompressed.
            data = self._reserve_pages("stored", high - low)
            try:
                self._read(shard, low, high - low, data, lambda first, last: None)
            except DamagedBlockError as damage:
                hit = list_stored_parts_within(part, damage.at, damage.at + BLOCK_BYTES)
                lost = list(zip(hit["begin"].tolist(), (hit["begin"] + hit["size"]).tolist(), strict=True))
                raise DamagedBlockError(damage.name, damage.at, lost=lost) from None
            with self._thread_slots:
                for row in part.tolist():
                    _copy_part(shard, _Part(*row), data, low, memory, begin)

    def _read(self, shard: _OpenShard, begin: int, size: int, memory: memoryview, then: OnVerified) -> None:
        """Read and verify bytes as they are stored."""
        if shard.direct and self._read_directly(shard, begin, size, memory):
            # The disk's part is done, without a slot: only hashing is
            # bounded, so that many threads may wait for the disk.
            with self._slots_beside_io:
                self._verify_parts(shard, begin, memory[:size], then)
            return
        with self._thread_slots:
            for offset in range(0, size, CACHE_BYTES):
                part = memory[offset : min(offset + CACHE_BYTES, size)]
                # A part is hashed right after it was read, while it is in the processor's cache.
                _read_pages(shard, begin + offset, part, len(part))
                self._verify_parts(shard, begin + offset, part, then)

    def _read_directly(self, shard: _OpenShard, begin: int, size: int, memory: memoryview) -> bool:
        """Read past the page cache; returns False, and uses the cache from now on, if the file system refuses."""
        try:
            _read_pages(shard, begin, memory[: -(-size // ALIGNMENT) * ALIGNMENT], size)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            # Clear the flag of the open descriptor, which all threads share: their next reads use the page cache, too.
            shard.direct = False
            fcntl.fcntl(shard.descriptor, fcntl.F_SETFL, fcntl.fcntl(shard.descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
            return False
        return True

    def fetch(self, file: int, begin: int, size: int, memory: memoryview) -> None:
        """Read bytes of a file that is_direct without verifying them; another thread then calls `verify`."""
        shard = self._open_file(file)
        if not self._read_directly(shard, begin, size, memory):
            _read_pages(shard, begin, memory[:size], size)

    def verify(self, file: int, begin: int, memory: memoryview, then: OnVerified) -> None:
        """Verify fetched bytes, whole blocks from byte `begin` on. Raises, and calls `then`, as `read` does."""
        self._verify_parts(self._open_file(file), begin, memory, then)

    def _verify_parts(self, shard: _OpenShard, begin: int, memory: memoryview, then: OnVerified) -> None:
        for offset in range(0, len(memory), CACHE_BYTES):
            part = memory[offset : offset + CACHE_BYTES]
            _compare_digests(shard, begin + offset, digest_blocks(part))
            then(begin + offset, begin + offset + len(part))

    def scatter(self, file: int, begin: int, memory: Sequence[Any]) -> None:
        """Fill several buffers from a file that is_cached, and verify them. Raises as `read` does."""
        shard = self._open_file(file)
        _fill_buffers(shard, begin, memory)
        _compare_digests(shard, begin, digest_scattered_blocks(memory))

    def is_direct(self, file: int) -> bool:
        """Return whether the file is uncompressed and read past the page cache, so that memory must be whole pages."""
        return self._open_file(file).direct and self._open_file(file).parts is None

    def is_cached(self, file: int) -> bool:
        """Return whether the file is uncompressed and read through the page cache, so that small reads are cheap."""
        return not self._open_file(file).direct and self._open_file(file).parts is None

    def check(self, strips: Strips) -> None:
        """Raise CheckpointError unless the files have every byte that the strips need."""
        begin, end = strips["begin"], strip_ends(strips)
        sizes = np.array(self.sizes, dtype=np.int64)[strips["file"]]
        if ((begin < 0) | (end < begin) | (end > sizes)).any():
            raise CheckpointError("the tensors need bytes past the end of a file")
        compressed = [index for index, file in enumerate(self._files) if file.inflated is not None]
        for file in np.intersect1d(strips["file"], compressed).tolist():
            parts = self._open_file(file).parts
            of_file = strips["file"] == file
            if parts is None or not do_parts_cover(parts, begin[of_file], end[of_file]).all():
                raise CheckpointError(f"{self._files[file].name}: its table of parts does not cover a whole tensor")

    def check_sizes(self) -> None:
        """Raise CheckpointError unless every file has the size that was committed; OSError if a size cannot be read."""
        for file in self._files:
            size = (self._directory / file.name).lstat().st_size
            if size != file.bytes:
                raise CheckpointError(f"{file.name}: it has {size} bytes, {file.bytes} were committed")

    def check_all(self) -> None:
        """Raise CheckpointError unless every file exists and agrees with the manifest about its content."""
        for index, file in enumerate(self._files):
            shard = _OpenShard(self._directory, file)
            try:
                self._check_file(index, shard)
            finally:
                os.close(shard.descriptor)

    def scratch(self, size: int) -> memoryview:
        """Return whole pages of scratch memory for this thread; the next call reuses them."""
        return self._reserve_pages("scratch", size)

    def _reserve_pages(self, name: str, size: int) -> memoryview:
        pages: mmap.mmap | None = getattr(self._local, name, None)
        if pages is None or len(pages) < size:
            pages = allocate_pages(size)
            setattr(self._local, name, pages)
        return memoryview(pages)

    def _open_file(self, file: int) -> _OpenShard:
        with self._lock:
            if file not in self._open:
                shard = self._open[file] = _OpenShard(self._directory, self._files[file])
                self._check_file(file, shard)
            return self._open[file]

    def _check_file(self, file: int, shard: _OpenShard) -> None:
        """Raise CheckpointError unless the file agrees with the manifest about its content."""

        def read(begin: int, end: int) -> bytes:
            memory = memoryview(allocate_pages(end - begin))
            self._read(shard, begin, end - begin, memory, lambda first, last: None)
            return bytes(memory[: end - begin])

        try:
            check_shard_file(self._manifest.step_layout, file, self._files[file], shard.table, read, False)
        except DamagedBlockError:
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{shard.name}: {error}") from error


class _OpenShard:
    """One open shard file with its digests."""

    def __init__(self, directory: Path, file: ShardFile) -> None:
        self.name, self.size = file.name, file.bytes
        check_folders(directory, file.name)
        self.table = read_digest_table(directory, file)
        self.parts = self.table.parts
        self.digests: list[int] = self.table.digests.tolist()
        try:
            self.descriptor, self.direct = _open_for_reading(directory / file.name)
        except OSError as error:
            raise CheckpointError(f"{file.name}: it cannot be read: {error.strerror}") from error
        size = os.fstat(self.descriptor).st_size
        if size != file.bytes:
            os.close(self.descriptor)
            raise CheckpointError(f"{file.name}: it has {size} bytes, {file.bytes} were committed")


def _compare_digests(shard: _OpenShard, begin: int, digests: list[int]) -> None:
    """Raise DamagedBlockError at the first wrong digest. digests: of the blocks from byte `begin` on."""
    first = begin // BLOCK_BYTES
    wrong = find_first_mismatch(digests, shard.digests[first : first + len(digests)])
    if wrong is not None:
        raise DamagedBlockError(shard.name, (first + wrong) * BLOCK_BYTES)


class _Part(NamedTuple):
    """A row of PART_DTYPE."""

    begin: int
    size: int
    at: int
    stored: int
    whole: int
    item: int


def _split_parts(parts: PartTable) -> list[PartTable]:
    """Split parts into groups that are adjacent in the file."""
    if not len(parts):
        return []
    ordered = parts[np.argsort(parts["at"])]
    # Parts may share a block, and one group is one read: a group ends where a whole block lies between two parts.
    ends = np.maximum.accumulate(ordered["at"] + ordered["stored"])
    has_gap = ordered["at"][1:] // BLOCK_BYTES - -(-ends[:-1] // BLOCK_BYTES) > 0
    return np.split(ordered, np.flatnonzero(has_gap) + 1)


def _copy_part(shard: _OpenShard, part: _Part, data: memoryview, low: int, memory: memoryview, begin: int) -> None:
    """Copy one part into `memory`, the image from byte `begin` on. data: stored bytes of the file from `low` on."""
    stored = data[part.at - low : part.at - low + part.stored]
    first, last = max(part.begin, begin), min(part.begin + part.size, begin + len(memory))
    # Stored as it is: any bytes of it can be copied. A compressed one has to be inflated as a whole.
    if not part.whole:
        memory[first - begin : last - begin] = stored[first - part.begin : last - part.begin]
        return
    try:
        inflated = inflate_chunk(stored, part.item, part.whole)
    except CheckpointError as error:
        raise CheckpointError(f"{shard.name}: the chunk at byte {part.at}: {error}") from error
    memory[first - begin : last - begin] = inflated[first - part.begin : last - part.begin].data


def read_digest_table(directory: Path, file: ShardFile) -> DigestTable:
    """Read the table of digests of a shard file. Raises CheckpointError if it is not the committed one."""
    name, most = find_digest_table(Path(file.name)).as_posix(), max_table_bytes(file.bytes, file.inflated is not None)
    try:
        data = read_regular(find_digest_table(directory / file.name), most)
    except OSError as error:
        raise CheckpointError(f"{name}: it cannot be read: {error.strerror}") from error
    if checksum_bytes(data) != file.digests:
        raise CheckpointError(f"{name}: its content is not what was committed (checksum)")
    try:
        return decode_digest_table(data, file.bytes, file.inflated)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error


def check_folders(directory: Path, name: str) -> None:
    """Raise CheckpointError if a folder between a step and its file is a link, which could point anywhere."""
    folder = directory
    for part in ("", *name.split("/")[:-1]):
        folder = folder / part
        try:
            if not is_plain_directory(folder):
                raise CheckpointError(f"{name}: it lies behind {folder.name}, which is not a directory")
        except OSError as error:
            raise CheckpointError(f"{name}: it cannot be read: {error.strerror}") from error


def _read_pages(shard: _OpenShard, begin: int, memory: memoryview, size: int) -> None:
    """Read at least `size` bytes; direct I/O needs room for whole pages even at the end of a file."""
    at = 0
    while at < size:
        count = os.preadv(shard.descriptor, [memory[at:]], begin + at)
        if count == 0:
            raise CheckpointError(f"{shard.name}: it ends at byte {begin + at}, before what was committed")
        # Direct I/O can only go on at a page: drop the bytes of a partly read one and read it again.
        if shard.direct and at + count < size:
            count -= count % ALIGNMENT
            if count == 0:  # less than a page, as at the end of a file that was cut off meanwhile
                raise CheckpointError(f"{shard.name}: a part of what was committed cannot be read at byte {begin + at}")
        at += count


def _fill_buffers(shard: _OpenShard, begin: int, memory: Sequence[Any]) -> None:
    """Fill all buffers, one after the other."""
    rest, at = deque(memory), begin
    while rest:
        count = os.preadv(shard.descriptor, rest, at)
        if count == 0:
            raise CheckpointError(f"{shard.name}: it ends at byte {at}, before what was committed")
        at += count
        while rest and count >= len(rest[0]):
            count -= len(rest.popleft())
        if count:
            rest[0] = memoryview(rest[0])[count:]


def _open_for_reading(path: Path) -> tuple[int, bool]:
    """Open a file past the page cache, unless most of it is cached; returns (descriptor, whether past the cache)."""
    # The page cache is faster than the disk if the file is in it. If not, direct I/O saves a copy of everything, and
    # does not push other files out of the cache.
    plain = open_regular(path)
    if _is_cached(plain):
        return plain, False
    try:
        direct = open_regular(path, flags=os.O_DIRECT)
    except OSError as error:
        if error.errno not in _REFUSED:
            os.close(plain)
            raise
        return plain, False
    os.close(plain)
    return direct, True


def _is_cached(descriptor: int) -> bool:
    """Return whether most of some sampled pages are in the page cache (preadv2(2), RWF_NOWAIT)."""
    size = os.fstat(descriptor).st_size
    page = bytearray(1)
    # RWF_NOWAIT fails with EAGAIN instead of reading from the disk.
    samples = [size * k // 8 for k in range(8)]
    return sum(_is_page_cached(descriptor, page, at) for at in samples) > len(samples) // 2


def _is_page_cached(descriptor: int, page: bytearray, at: int) -> bool:
    try:
        return os.preadv(descriptor, [page], at, os.RWF_NOWAIT) == 1
    except OSError:
        return False
