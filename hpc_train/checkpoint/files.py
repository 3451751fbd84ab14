"""Files that are on the disk when a call returns, and their checksums."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import xxhash

CHECKSUM = "xxh3_128"
_BLOCK = 4 << 20
_AT_ONCE = 2


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor, closed at the end; a new file is readable by its owner's group as the umask says."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset`: one call of the system may write less than it is given. Raises OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        if written == 0:
            raise OSError(errno.EIO, "the file system takes no more bytes")
        data, offset = data[written:], offset + written


def write_file(path: Path, data: bytes) -> None:
    """A new file with its content on the disk; the directory is not synchronised."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write_at(descriptor, memoryview(data), 0)
        os.fsync(descriptor)


def at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Make them side by side: what several of them ask to be on the disk, many file systems put there in one go.

    All have ended when this returns, or raises the error of the first that failed.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for made in [pool.submit(call) for call in calls]:
            made.result()


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, where the file system can (some refuse with EINVAL)."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def sync_tree(path: Path) -> None:
    """Fsync all files below a directory, and the directories themselves, from the bottom up."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            with opened(Path(folder) / name, os.O_RDONLY) as descriptor:
                os.fsync(descriptor)
        sync_directory(Path(folder))


def make_directory(path: Path) -> None:
    """A directory and those above it that are missing, private, with their names on the disk. Raises OSError."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    except FileNotFoundError:
        make_directory(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    sync_directory(path.parent)


def checksum(path: Path) -> tuple[int, str]:
    """(bytes, `xxh3_128:<hex>`) of a whole file."""
    state, size = xxhash.xxh3_128(), 0
    block = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            state.update(memoryview(block)[:count])
            size += count
    return size, f"{CHECKSUM}:{state.hexdigest()}"


def checksum_of(*parts: bytes) -> str:
    """The same of bytes in memory."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return f"{CHECKSUM}:{state.hexdigest()}"
