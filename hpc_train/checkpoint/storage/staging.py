"""A disk of the node between memory and the shared directory: a save is done with memory long before it is committed.

The image of a shard is written to a file without a name on the disk of the node, and from there to the shared
directory, where it is committed as ever. A file without a name is nobody's but this process's: no restart can take it
for a checkpoint, and the kernel removes it with the process, however that ends. Every block is hashed on the way in and
on the way out, so what the disk of the node did to it shows before the commit.

In memory (tmpfs) this gains nothing: what is staged is in memory as it is.
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
from hpc_train.checkpoint.image import ALIGNMENT
from hpc_train.checkpoint.storage.kind import file_system
from hpc_train.checkpoint.storage.policy import Behaviour
from hpc_train.checkpoint.storage.space import human
from hpc_train.checkpoint.stream import NO_DIRECT, Stream, fill_file, write_part, write_stream

_log = logging.getLogger(__name__)


@dataclass
class LocalFile:
    """A shard's image on a disk of the node."""

    descriptor: int
    size: int
    digests: list[int]

    def copy_to(self, path: Path, how: Behaviour) -> list[int]:
        """Write a new file with the same bytes, on the disk when this returns; returns the digests of its blocks.

        Raises OSError, and CheckpointError if the bytes are no longer those that were put here.
        """
        return self._checked(write_stream(path, Stream(self._reads(how).read, self.size), how))

    def copy_into(self, path: Path, at: int, how: Behaviour) -> list[int]:
        """The same as whole blocks of a file that is there, from byte `at` on."""
        return self._checked(write_part(path, at, Stream(self._reads(how).read, self.size), how))

    def _reads(self, how: Behaviour) -> _Reads:
        return _Reads(self.descriptor, self.size, how.write_bytes)

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
    _told: set[str] = field(default_factory=set)

    @classmethod
    def named(cls, text: str | None) -> LocalStage | None:
        """From the setting; None where there is none. Environment variables are those of this process."""
        return cls(Path(os.path.expandvars(text)).expanduser().absolute()) if text else None

    def put(self, memory: memoryview, size: int) -> LocalFile | None:
        """A copy of the first `size` bytes (whole pages); None, after a warning, if it cannot be had."""
        try:
            why = self._unfit(size)
            if why is None:
                return _written(self.directory, memory, size)
        except OSError as error:
            why = f"{error.strerror}; the save goes straight from memory"
        self._tell(why)
        return None

    def _unfit(self, size: int) -> str | None:
        system = file_system(self.directory)
        if system.shared_memory:
            return "it is in memory, where a copy gains nothing; give a directory on a disk of the node"
        if size + ALIGNMENT > system.free_bytes:
            has, needs = human(system.free_bytes), human(size)
            return f"it has {has} free, this rank needs {needs}; the save goes straight from memory"
        return None

    def _tell(self, why: str) -> None:
        if why not in self._told:
            _log.warning("checkpoint.stage_dir=%s is not used: %s", self.directory, why)
        self._told.add(why)


@dataclass
class _Reads:
    """Reads of a file, each thread into a buffer of its own."""

    descriptor: int
    size: int
    most: int
    _of_thread: threading.local = field(default_factory=threading.local)

    def read(self, begin: int, end: int) -> memoryview:
        """What is past the end of the file is undefined. Direct I/O wants whole pages, also of what is not wanted."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = mmap.mmap(-1, self.most)
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


def _written(directory: Path, memory: memoryview, size: int) -> LocalFile:
    try:
        return _written_so(directory, memory, size, Behaviour(direct=True))
    except OSError as error:
        if error.errno not in NO_DIRECT:
            raise
        return _written_so(directory, memory, size, Behaviour(direct=False))


def _written_so(directory: Path, memory: memoryview, size: int, how: Behaviour) -> LocalFile:
    descriptor = _without_name(directory, os.O_DIRECT if how.direct else 0)
    try:
        image = Stream(lambda begin, end: memory[begin:end], size, stays=True)
        return LocalFile(descriptor, size, fill_file(descriptor, image, how))
    except BaseException:
        os.close(descriptor)
        raise


def _without_name(directory: Path, flags: int) -> int:
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
