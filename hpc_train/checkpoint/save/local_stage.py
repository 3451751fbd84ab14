"""Keep a copy of a shard file on a disk of the node (checkpoint.stage_dir), between memory and the shared directory.

A save then frees its memory long before it is committed. The file has no name: no restart can take it for a checkpoint,
and the kernel removes it with the process. Every block is hashed on the way in and on the way out.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_layout import ALIGNMENT
from hpc_train.checkpoint.save.file_writer import (
    DIRECT_IO_REFUSED,
    WriteStream,
    fill_open_file,
    write_file_part,
    write_stream,
)
from hpc_train.checkpoint.storage.file_system import (
    WritePolicy,
    detect_file_system,
)
from hpc_train.units import format_bytes

_log = logging.getLogger(__name__)


@dataclass
class LocalFile:
    """A copy of a shard's image on a disk of the node."""

    descriptor: int
    size: int
    digests: list[int]

    def copy_to(self, path: Path, policy: WritePolicy) -> list[int]:
        """Write a new file with the same bytes and synchronise it; returns the digests of its blocks.

        Raises OSError, and CheckpointError if the copy was damaged meanwhile.
        """
        return self._check(write_stream(path, WriteStream(self._make_reader(policy).read, self.size), policy))

    def copy_into(self, path: Path, at: int, policy: WritePolicy) -> list[int]:
        """Write the bytes as whole blocks of an existing file, from byte `at` on. Returns and raises as copy_to."""
        return self._check(write_file_part(path, at, WriteStream(self._make_reader(policy).read, self.size), policy))

    def _make_reader(self, policy: WritePolicy) -> _FileReader:
        return _FileReader(self.descriptor, self.size, policy.write_bytes)

    def _check(self, digests: list[int]) -> list[int]:
        if digests != self.digests:
            raise CheckpointError("the copy in checkpoint.stage_dir was damaged before it was committed")
        return digests

    def close(self) -> None:
        """Close the file, which frees its space."""
        os.close(self.descriptor)


@dataclass
class LocalStage:
    """checkpoint.stage_dir of this node. If it cannot be used, saves go straight from memory, after a warning."""

    directory: Path
    _warned: set[str] = field(default_factory=set)

    @classmethod
    def from_setting(cls, text: str | None) -> LocalStage | None:
        """Make it from the setting, with this process's environment variables expanded; None if it is not set."""
        return cls(Path(os.path.expandvars(text)).expanduser().absolute()) if text else None

    def copy_from(self, memory: memoryview, size: int) -> LocalFile | None:
        """Copy the first `size` bytes (whole pages) to the disk; None, after a warning, if that is not possible."""
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
class _FileReader:
    """Reads a file, each thread into a buffer of its own."""

    descriptor: int
    size: int
    buffer_bytes: int
    _of_thread: threading.local = field(default_factory=threading.local)

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end), undefined past the end of the file. Reads whole pages, as direct I/O needs."""
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
                at = max(at - count, at // ALIGNMENT * ALIGNMENT)  # go on at a page
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
    """Open a new file without a name.

    Without O_TMPFILE it has a name for a moment, while it is still empty.
    """
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        # These three errors mean that the file system or the kernel has no O_TMPFILE.
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    # Opened again, because mkstemp takes no flags such as O_DIRECT.
    descriptor, path = tempfile.mkstemp(prefix="hpc_train-stage-", dir=directory)
    try:
        return os.open(path, flags)
    finally:
        os.close(descriptor)
        Path(path).unlink()
