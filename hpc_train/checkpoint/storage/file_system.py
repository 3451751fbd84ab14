"""Find out what a directory is on and how to write there, and write files that are on the disk when a call returns.

The magic number and the mount tell the kind of file system; a small file tried out tells whether direct I/O and
fallocate work. Everything here is for any directory; what is special about Lustre is in lustre.py.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.units import format_bytes

CHECKSUM_ALGORITHM = "xxh3_128"
_BLOCK = 4 << 20
_AT_ONCE = 2


@contextmanager
def open_descriptor(path: Path, flags: int) -> Iterator[int]:
    """A file descriptor, closed at the end; a new file is readable by its owner's group as the umask says."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_at_offset(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data` at `offset`: one call of the system may write less than it is given. Raises OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        if written == 0:
            raise OSError(errno.EIO, "the file system takes no more bytes")
        data, offset = data[written:], offset + written


def write_durable_file(path: Path, data: bytes) -> None:
    """A new file with its content on the disk; the directory is not synchronised."""
    with open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
        write_at_offset(descriptor, memoryview(data), 0)
        os.fsync(descriptor)


def run_concurrently(calls: Sequence[Callable[[], object]]) -> None:
    """Make them side by side: what several of them ask to be on the disk, many file systems put there in one go.

    All have ended when this returns, or raises the error of the first that failed.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for made in [pool.submit(call) for call in calls]:
            made.result()


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk, where the file system can (some refuse with EINVAL)."""
    with open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def sync_tree(path: Path) -> None:
    """Fsync all files below a directory, and the directories themselves, from the bottom up."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            with open_descriptor(Path(folder) / name, os.O_RDONLY) as descriptor:
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


def checksum_file(path: Path) -> tuple[int, str]:
    """(bytes, `xxh3_128:<hex>`) of a whole file."""
    state, size = xxhash.xxh3_128(), 0
    block = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            state.update(memoryview(block)[:count])
            size += count
    return size, f"{CHECKSUM_ALGORITHM}:{state.hexdigest()}"


def checksum_bytes(*parts: bytes) -> str:
    """The same of bytes in memory."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return f"{CHECKSUM_ALGORITHM}:{state.hexdigest()}"


MOUNTINFO = Path("/proc/self/mountinfo")
LUSTRE_MAGIC = 0x0BD00BD0
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
"""From statfs(2), linux/magic.h and the headers of the file systems that are not in the kernel."""
_STATFS_BYTES = 256
"""More than struct statfs has on any machine."""
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo (proc_pid_mountinfo(5))."""

    point: Path
    type: str
    source: str
    options: tuple[str, ...]
    """Of the mount and of the file system."""


@dataclass(frozen=True)
class FileSystem:
    """What a directory is on, as it was when it was asked."""

    kind: str
    """lustre, gpfs, nfs, ext4, xfs, tmpfs, ...; as the mount calls it where the number is not known."""
    mount: Path
    source: str
    """Device or server; `<servers>:/<name>` on Lustre."""
    options: tuple[str, ...]
    free_bytes: int
    """For this user; a quota may leave less."""
    free_files: int | None
    """Inodes; None where the file system does not count them."""

    @property
    def flock(self) -> bool | None:
        """Whether flock(2) holds on all nodes; None where the mount does not say."""
        if self.kind != "lustre":
            return None
        return "flock" in self.options

    @property
    def shared_memory(self) -> bool:
        """Whether files are memory, and no disk is behind them."""
        return self.kind in ("tmpfs", "ramfs")


def read_magic_number(directory: Path) -> int:
    """f_type of statfs(2). Raises OSError."""
    statfs = ctypes.CDLL(None, use_errno=True).statfs
    found = (ctypes.c_ulong * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_ulong)))()
    if statfs(os.fsencode(directory), ctypes.byref(found)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return found[0] & 0xFFFFFFFF


def detect_file_system(
    directory: Path, mounts: Path = MOUNTINFO, magic: Callable[[Path], int] = read_magic_number
) -> FileSystem:
    """What an existing directory is on. Raises OSError.

    mounts: a table in the form of /proc/self/mountinfo. magic: what tells the number.
    """
    number = magic(directory)
    mount = find_mount(directory, mounts)
    space = os.statvfs(directory)
    return FileSystem(
        kind=_name_kind(number, mount.type),
        mount=mount.point,
        source=mount.source,
        options=mount.options,
        free_bytes=space.f_bavail * space.f_frsize,
        free_files=space.f_favail if space.f_files else None,
    )


def find_mount(directory: Path, mounts: Path = MOUNTINFO) -> Mount:
    """The mount that holds a directory: the longest mount point above it, of equal ones the last. Raises OSError."""
    where = directory.resolve()
    lines = mounts.read_text(errors="surrogateescape").splitlines()
    above = [mount for line in lines if (mount := _parse_mount(line)) and where.is_relative_to(mount.point)]
    longest = max((len(mount.point.parts) for mount in above), default=0)
    found = [mount for mount in above if len(mount.point.parts) == longest]
    return found[-1] if found else Mount(Path("/"), "unknown", "unknown", ())


def _parse_mount(line: str) -> Mount | None:
    """None for a line that is none."""
    fields, separator, rest = line.partition(" - ")
    first, last = fields.split(), rest.split()
    if not separator or len(first) < 6 or len(last) < 2:
        return None
    options = ",".join([first[5], *last[2:3]])
    return Mount(Path(_unescape(first[4])), last[0], _unescape(last[1]), tuple(dict.fromkeys(options.split(","))))


def _unescape(text: str) -> str:
    """Blanks, tabs, newlines and backslashes are written as octal numbers there."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _name_kind(number: int, mounted_as: str) -> str:
    known = _KINDS.get(number)
    if known is None:
        return mounted_as if mounted_as != "unknown" else f"unknown (0x{number:08X})"
    exact = {"ext4": ("ext2", "ext3"), "fuse": ("fuse.", "fuseblk")}.get(known, ())
    return mounted_as if mounted_as.startswith(exact) else known


PAGE_BYTES = 4096
WRITE_BYTES = 16 << 20
"""Bytes of one write; like every write here a multiple of 1 MiB, and so of a block of digests."""
_MOST = 64 << 20
"""Two of these are in flight for each rank."""
_NOT_HERE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True)
class WritePolicy:
    """How files are written in one directory: rank 0 finds out, all ranks do the same."""

    kind: str = "unknown"
    """Of the file system."""
    direct: bool = True
    """Past the page cache (O_DIRECT), where a file does not refuse it after all."""
    write_bytes: int = WRITE_BYTES
    """Of one write."""
    reserve: bool = True
    """posix_fallocate(3) before the first write. Not where the file system cannot: the C library would then write to
    every block instead."""


DEFAULT_POLICY = WritePolicy()
"""Where nothing is known."""


def choose_write_policy(
    system: FileSystem, directory: Path, io: str = "auto", round_bytes: int | None = None
) -> WritePolicy:
    """What suits a file system, tried out in `directory` by one small file that does not stay. Raises OSError.

    io: `direct` or `buffered` overrule what is found; `auto` is direct wherever a direct write works, but for file
    systems in memory, which have no disk to go to directly.
    round_bytes: of one round over all stripes of a file, a multiple of 1 MiB; a write covers it, so that all servers
    are driven at once. None: the file has no stripes.
    """
    direct, reserve = probe_directory(directory)
    wanted = io == "direct" if io != "auto" else direct and not system.shared_memory
    return WritePolicy(system.kind, wanted, _whole_rounds(round_bytes) if round_bytes else WRITE_BYTES, reserve)


def probe_directory(directory: Path) -> tuple[bool, bool]:
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
        with mmap.mmap(-1, PAGE_BYTES) as memory, memoryview(memory) as page:
            return os.pwrite(descriptor, page, 0) == PAGE_BYTES
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
        if fallocate(descriptor, 0, 0, PAGE_BYTES) == 0:
            return True
        number = ctypes.get_errno()
        return _cannot(OSError(number, os.strerror(number), str(path)))
    finally:
        os.close(descriptor)


def _whole_rounds(round_bytes: int) -> int:
    """The write that covers whole rounds of stripes, at least WRITE; WRITE where that would be too much memory."""
    rounded = -(-WRITE_BYTES // round_bytes) * round_bytes
    return rounded if rounded <= _MOST else WRITE_BYTES


_FILES_EACH = 2
"""A writer's: its shard, and the digests of it."""
_SMALL = 64 << 10
"""Bytes a writer's share of the manifest, of directories and of rounding up to blocks may take."""


def check_free_space(system: FileSystem, directory: Path, needs: Sequence[int]) -> None:
    """Raise CheckpointError, in one line, if what all ranks are about to write does not fit.

    needs: bytes of the file of every rank, 0 where it has none. A quota shows only when it is met.
    """
    need = sum(needs) + _SMALL * len(needs)
    if need > system.free_bytes:
        raise CheckpointError(
            f"it needs {format_bytes(need)}, {directory} has {format_bytes(system.free_bytes)} "
            f"free: remove old checkpoints"
            " (hpc-train checkpoint prune), keep fewer (checkpoint.keep), or set checkpoint.dir to a larger file system"
        )
    files = _FILES_EACH * len(needs) + 1
    if system.free_files is not None and files > system.free_files:
        raise CheckpointError(
            f"it needs {files} files, {directory} may have {system.free_files} more: remove old checkpoints or other"
            " files, or set checkpoint.dir to another file system"
        )
