"""How to write to a file system: past the page cache or through it, in pieces of which size, reserving or not."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_train.checkpoint.storage.kind import FileSystem

PAGE = 4096
WRITE = 16 << 20
"""Bytes of one write; like every write here a multiple of 1 MiB, and so of a block of digests."""
_MOST = 64 << 20
"""Two of these are in flight for each rank."""
_NOT_HERE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True)
class Behaviour:
    """How files are written in one directory: rank 0 finds out, all ranks do the same."""

    kind: str = "unknown"
    """Of the file system."""
    direct: bool = True
    """Past the page cache (O_DIRECT), where a file does not refuse it after all."""
    write_bytes: int = WRITE
    """Of one write."""
    reserve: bool = True
    """posix_fallocate(3) before the first write. Not where the file system cannot: the C library would then write to
    every block instead."""


USUAL = Behaviour()
"""Where nothing is known."""


def behaviour(system: FileSystem, directory: Path, io: str = "auto", round_bytes: int | None = None) -> Behaviour:
    """What suits a file system, tried out in `directory` by one small file that does not stay. Raises OSError.

    io: `direct` or `buffered` overrule what is found; `auto` is direct wherever a direct write works, but for file
    systems in memory, which have no disk to go to directly.
    round_bytes: of one round over all stripes of a file, a multiple of 1 MiB; a write covers it, so that all servers
    are driven at once. None: the file has no stripes.
    """
    direct, reserve = probe(directory)
    wanted = io == "direct" if io != "auto" else direct and not system.shared_memory
    return Behaviour(system.kind, wanted, _whole_rounds(round_bytes) if round_bytes else WRITE, reserve)


def probe(directory: Path) -> tuple[bool, bool]:
    """(whether a direct write works, whether fallocate(2) does) in an existing directory. Raises OSError.

    An error that says that the file system cannot is an answer; any other one (a full disk) is an error.
    """
    path = directory / ".probe"
    try:
        return _writes_directly(path), _reserves(path)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def _writes_directly(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _cannot(error)
    try:
        with mmap.mmap(-1, PAGE) as memory, memoryview(memory) as page:
            return os.pwrite(descriptor, page, 0) == PAGE
    except OSError as error:
        return _cannot(error)
    finally:
        os.close(descriptor)


def _cannot(error: OSError) -> bool:
    """False: it was refused as such. Raises any other error."""
    if error.errno not in _NOT_HERE:
        raise error
    return False


def _reserves(path: Path) -> bool:
    """Asks the system and not the C library, which would fill in for it."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if fallocate(descriptor, 0, 0, PAGE) == 0:
            return True
        number = ctypes.get_errno()
        return _cannot(OSError(number, os.strerror(number), str(path)))
    finally:
        os.close(descriptor)


def _whole_rounds(round_bytes: int) -> int:
    """The write that covers whole rounds of stripes, at least WRITE; WRITE where that would be too much memory."""
    rounded = -(-WRITE // round_bytes) * round_bytes
    return rounded if rounded <= _MOST else WRITE
