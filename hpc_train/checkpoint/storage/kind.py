"""Which file system a directory is on: its magic number (statfs(2)), its mount, and what is free."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
LUSTRE = 0x0BD00BD0
_KINDS = {
    LUSTRE: "lustre",
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


def magic_number(directory: Path) -> int:
    """f_type of statfs(2). Raises OSError."""
    statfs = ctypes.CDLL(None, use_errno=True).statfs
    found = (ctypes.c_ulong * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_ulong)))()
    if statfs(os.fsencode(directory), ctypes.byref(found)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return found[0] & 0xFFFFFFFF


def file_system(directory: Path, mounts: Path = MOUNTS, magic: Callable[[Path], int] = magic_number) -> FileSystem:
    """What an existing directory is on. Raises OSError.

    mounts: a table in the form of /proc/self/mountinfo. magic: what tells the number.
    """
    number = magic(directory)
    mount = mount_of(directory, mounts)
    space = os.statvfs(directory)
    return FileSystem(
        kind=_kind(number, mount.type),
        mount=mount.point,
        source=mount.source,
        options=mount.options,
        free_bytes=space.f_bavail * space.f_frsize,
        free_files=space.f_favail if space.f_files else None,
    )


def mount_of(directory: Path, mounts: Path = MOUNTS) -> Mount:
    """The mount that holds a directory: the longest mount point above it, of equal ones the last. Raises OSError."""
    where = directory.resolve()
    lines = mounts.read_text(errors="surrogateescape").splitlines()
    above = [mount for line in lines if (mount := _mount(line)) and where.is_relative_to(mount.point)]
    longest = max((len(mount.point.parts) for mount in above), default=0)
    found = [mount for mount in above if len(mount.point.parts) == longest]
    return found[-1] if found else Mount(Path("/"), "unknown", "unknown", ())


def _mount(line: str) -> Mount | None:
    """None for a line that is none."""
    fields, separator, rest = line.partition(" - ")
    first, last = fields.split(), rest.split()
    if not separator or len(first) < 6 or len(last) < 2:
        return None
    options = ",".join([first[5], *last[2:3]])
    return Mount(Path(_plain(first[4])), last[0], _plain(last[1]), tuple(dict.fromkeys(options.split(","))))


def _plain(text: str) -> str:
    """Blanks, tabs, newlines and backslashes are written as octal numbers there."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)


def _kind(number: int, mounted_as: str) -> str:
    known = _KINDS.get(number)
    if known is None:
        return mounted_as if mounted_as != "unknown" else f"unknown (0x{number:08X})"
    exact = {"ext4": ("ext2", "ext3"), "fuse": ("fuse.", "fuseblk")}.get(known, ())
    return mounted_as if mounted_as.startswith(exact) else known
