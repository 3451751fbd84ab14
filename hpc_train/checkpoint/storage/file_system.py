"""Detect the file system of a directory and how best to write there; write and synchronise files.

The magic number and the mount tell the kind of file system; writing a small file shows whether direct I/O and fallocate
work. What is special about Lustre is in lustre.py.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.cluster.filesystems import MOUNT_TABLE, Mount, find_mount
from hpc_train.regular_files import sync_directory, sync_file
from hpc_train.units import format_bytes

CHECKSUM_ALGORITHM = "xxh3_128"
_MAX_THREADS = 2
"""Calls that run_concurrently makes at a time."""
PAGE_BYTES = 4096
"""Bytes to which direct I/O aligns memory, offsets and lengths."""


def allocate_pages(size: int) -> mmap.mmap:
    """Allocate whole pages for direct I/O, huge ones if the kernel has them. Raises OSError if memory is short."""
    memory = mmap.mmap(-1, max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


@contextmanager
def open_descriptor(path: Path, flags: int) -> Iterator[int]:
    """Open a file descriptor, and close it at the end. A new file gets the permissions that the umask leaves."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at_offset(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, in several system calls if need be. Raises OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        if written == 0:
            raise OSError(errno.EIO, "the file system takes no more bytes")
        data, offset = data[written:], offset + written


def write_durable_file(path: Path, data: bytes) -> None:
    """Write and synchronise a new file; the directory is not synchronised."""
    with open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write_at_offset(descriptor, memoryview(data), 0)
        os.fsync(descriptor)


def run_concurrently(calls: Sequence[Callable[[], object]]) -> None:
    """Run calls in threads: many file systems commit fsyncs that come together in one go.

    All calls have ended when this returns or raises the first error.
    """
    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def sync_tree(path: Path) -> None:
    """Synchronise all files below a directory, and the directories, bottom up."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(Path(folder) / name)
        sync_directory(Path(folder))


def make_directory(path: Path) -> None:
    """Make a private directory with its missing parents, and synchronise their entries. Raises OSError."""
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


def checksum_bytes(*parts: bytes) -> str:
    """Return the checksum, `xxh3_128:<hex>`, of bytes in memory."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return f"{CHECKSUM_ALGORITHM}:{state.hexdigest()}"


LUSTRE_MAGIC = 0x0BD00BD0
"""LL_SUPER_MAGIC of lustre_user.h, which statfs(2) gives as f_type."""
_KINDS = {
    LUSTRE_MAGIC: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0xAAD7AAEA: "panfs",
    0x00C36400: "ceph",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x65735546: "fuse",
    0x01021997: "9p",
}
"""Magic numbers from statfs(2), linux/magic.h and the headers of file systems outside the kernel."""
_STATFS_BYTES = 256
"""More than struct statfs has on any machine."""


@dataclass(frozen=True)
class FileSystem:
    """The file system of a directory, with its free space at the time of the call."""

    kind: str
    """lustre, gpfs, nfs, ext4, xfs, tmpfs, ...; the type of the mount if the magic number is unknown."""
    mount: Path
    source: str
    """Device or server; `<servers>:/<name>` on Lustre."""
    options: tuple[str, ...]
    free_bytes: int
    """Free bytes for this user; a quota may leave less."""
    free_files: int | None
    """Free inodes; None if the file system does not count them."""

    @property
    def flock(self) -> bool | None:
        """Whether flock(2) works across nodes; None if the mount does not tell."""
        if self.kind != "lustre":
            return None
        return "flock" in self.options

    @property
    def shared_memory(self) -> bool:
        """Whether files are in memory, without a disk."""
        return self.kind in ("tmpfs", "ramfs")


def read_magic_number(directory: Path) -> int:
    """Return f_type of statfs(2). Raises OSError."""
    statfs = ctypes.CDLL(None, use_errno=True).statfs
    # f_type is the first field of struct statfs, whose other fields differ between machines.
    buffer = (ctypes.c_ulong * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_ulong)))()
    if statfs(os.fsencode(directory), ctypes.byref(buffer)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return buffer[0] & 0xFFFFFFFF


def detect_file_system(
    directory: Path, mounts: Path = MOUNT_TABLE, magic: Callable[[Path], int] = read_magic_number
) -> FileSystem:
    """Detect the file system of an existing directory. Raises OSError.

    mounts: a table in the form of /proc/self/mountinfo. magic: returns the magic number of a directory.
    """
    number = magic(directory)
    mount = find_mount(directory, mounts) or Mount(Path("/"), "unknown", "unknown", ())
    space = os.statvfs(directory)
    return FileSystem(
        kind=_name_kind(number, mount.type),
        mount=mount.point,
        source=mount.source,
        options=mount.options,
        free_bytes=space.f_bavail * space.f_frsize,
        free_files=space.f_favail if space.f_files else None,
    )


def _name_kind(number: int, mounted_as: str) -> str:
    kind = _KINDS.get(number)
    if kind is None:
        return mounted_as if mounted_as != "unknown" else f"unknown (0x{number:08X})"
    exact = {"ext4": ("ext2", "ext3"), "fuse": ("fuse.", "fuseblk")}.get(kind, ())
    return mounted_as if mounted_as.startswith(exact) else kind


WRITE_BYTES = 16 << 20
"""Bytes of one write; a multiple of 1 MiB, and so of BLOCK_BYTES, as every write size here."""
_MAX_WRITE_BYTES = 64 << 20
"""Maximum bytes of one write; each rank has two in flight."""
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True)
class WritePolicy:
    """How files are written in one directory; rank 0 chooses it for all ranks."""

    kind: str = "unknown"
    """Kind of file system."""
    direct: bool = True
    """Write past the page cache (O_DIRECT), unless a file refuses it."""
    write_bytes: int = WRITE_BYTES
    """Bytes of one write."""
    reserve: bool = True
    """Call posix_fallocate(3) before the first write. Not if the file system lacks fallocate: the C library would then
    write to every block instead."""


DEFAULT_POLICY = WritePolicy()
"""Policy for a directory that was not probed."""


def choose_write_policy(
    system: FileSystem, directory: Path, io: str = "auto", round_bytes: int | None = None
) -> WritePolicy:
    """Choose how to write on a file system, after probing `directory` with a small temporary file. Raises OSError.

    io: `direct`, `buffered`, or `auto`: direct wherever a direct write works, except on file systems in memory.
    round_bytes: bytes of one round over all stripes of a file, a multiple of 1 MiB; a write covers whole rounds, to use
    all servers at once. None: the file is not striped.
    """
    direct, reserve = probe_directory(directory)
    # In memory there is nothing to bypass, and a copy is all that a write is.
    wanted = io == "direct" if io != "auto" else direct and not system.shared_memory
    return WritePolicy(system.kind, wanted, _round_up_to_stripes(round_bytes) if round_bytes else WRITE_BYTES, reserve)


def probe_directory(directory: Path) -> tuple[bool, bool]:
    """Return (whether a direct write works, whether fallocate(2) works) in an existing directory.

    Raises OSError for errors that do not mean that the file system lacks it, such as a full disk.
    """
    path = directory / ".probe"
    try:
        return _can_write_directly(path), _can_reserve(path)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()


def _can_write_directly(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _raise_unless_unsupported(error)
    try:
        with mmap.mmap(-1, PAGE_BYTES) as memory, memoryview(memory) as page:
            return os.pwrite(descriptor, page, 0) == PAGE_BYTES
    except OSError as error:
        return _raise_unless_unsupported(error)
    finally:
        os.close(descriptor)


def _raise_unless_unsupported(error: OSError) -> bool:
    """Return False if the error means that the file system lacks the operation; raise any other error."""
    if error.errno not in _UNSUPPORTED:
        raise error
    return False


def _can_reserve(path: Path) -> bool:
    """Return whether fallocate(2) works. Not posix_fallocate(3), which would write to every block instead."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # Python only offers posix_fallocate, whose emulation succeeds on every file system.
        if fallocate(descriptor, 0, 0, PAGE_BYTES) == 0:
            return True
        number = ctypes.get_errno()
        return _raise_unless_unsupported(OSError(number, os.strerror(number), str(path)))
    finally:
        os.close(descriptor)


def _round_up_to_stripes(round_bytes: int) -> int:
    """Return the bytes of a write that covers whole rounds of stripes; WRITE_BYTES if that is too much memory."""
    rounded = -(-WRITE_BYTES // round_bytes) * round_bytes
    return rounded if rounded <= _MAX_WRITE_BYTES else WRITE_BYTES


_FILES_PER_WRITER = 2
"""Files of a writer: its shard file and the table of digests."""
_OVERHEAD_BYTES = 64 << 10
"""Bytes of a writer beyond its shard: its share of the manifest and directories, and rounding up to blocks."""


def check_free_space(system: FileSystem, directory: Path, needs: Sequence[int]) -> None:
    """Raise CheckpointError if the files of all ranks do not fit.

    needs: bytes of each rank's file, 0 if it has none. A quota is not seen until a write exceeds it.
    """
    # Checked before the first byte, because a save that fills the disk also stops everybody else.
    need = sum(needs) + _OVERHEAD_BYTES * len(needs)
    if need > system.free_bytes:
        raise CheckpointError(
            f"it needs {format_bytes(need)}, {directory} has {format_bytes(system.free_bytes)} "
            f"free: remove old checkpoints"
            " (hpc-train checkpoint prune), keep fewer (checkpoint.keep), or set checkpoint.dir to a larger file system"
        )
    files = _FILES_PER_WRITER * len(needs) + 1
    if system.free_files is not None and files > system.free_files:
        raise CheckpointError(
            f"it needs {files} files, {directory} may have {system.free_files} more: remove old checkpoints or other"
            " files, or set checkpoint.dir to another file system"
        )
