"""Find which file system a path is on, from the mount table.

The path need not exist yet, and no system call is made on it. How a checkpoint is written is decided by statfs(2) and
more, in checkpoint/storage/file_system.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")
_SAME_KINDS = {
    "nfs4": "nfs",
    "fhgfs": "beegfs",
    "fuse.beegfs": "beegfs",
    "fuse.glusterfs": "glusterfs",
    "fuse.ceph": "ceph",
}
"""Names of versions and drivers of one file system, and its name."""
_SHARED_KINDS = frozenset(
    {"lustre", "gpfs", "nfs", "beegfs", "ceph", "glusterfs", "wekafs", "panfs", "pvfs2", "orangefs", "cifs", "smb3"}
    | {"afs", "dvs", "ocfs2", "gfs2", "fuse.dfuse", "fuse.juicefs", "vast"}
)
"""File systems that other hosts can see."""


@dataclass(frozen=True)
class Mount:
    """A line of the mount table (proc_pid_mountinfo(5))."""

    point: Path
    type: str
    """Type as the kernel calls it, such as nfs4."""
    source: str
    """A device, or the server and its directory; `<servers>:/<name>` on Lustre."""
    options: tuple[str, ...]
    """Options of the mount and of the file system."""

    @property
    def kind(self) -> str:
        """Kind of file system: lustre, gpfs, nfs, beegfs, ext4, xfs, tmpfs, ...; one word for all versions."""
        return _SAME_KINDS.get(self.type, self.type)

    @property
    def shared(self) -> bool:
        """Whether other hosts can see the same files."""
        return self.kind in _SHARED_KINDS


def find_mount(path: Path, table: Path = MOUNT_TABLE) -> Mount | None:
    """Return the mount of a path, which need not exist yet: the longest mount point above it, the last of equal ones.

    table: a file in the form of /proc/self/mountinfo. None if no mount holds the path, or without a table.
    """
    place, longest = path.resolve(), None
    for mount in read_mounts(table):
        # >=: of two mounts on one point, the later one hides the earlier.
        deeper = longest is None or len(mount.point.parts) >= len(longest.point.parts)
        if deeper and place.is_relative_to(mount.point):
            longest = mount
    return longest


def read_mounts(table: Path = MOUNT_TABLE) -> list[Mount]:
    """Return the mounts of a table, in its order. Malformed lines are left out; a table that is not there is empty."""
    try:
        lines = table.read_text(errors="surrogateescape").split("\n")
    except OSError:
        return []
    return [mount for line in lines if (mount := _parse_mount(line))]


def _parse_mount(line: str) -> Mount | None:
    """Parse a line of the table; None if it is malformed."""
    fields, separator, rest = line.partition(" - ")
    first, last = fields.split(), rest.split()
    if not separator or len(first) < 6 or len(last) < 2:
        return None
    options = tuple(dict.fromkeys(",".join([first[5], *last[2:3]]).split(",")))  # of the mount, of the file system
    return Mount(Path(_decode_escapes(first[4])), last[0], _decode_escapes(last[1]), options)


def _decode_escapes(text: str) -> str:
    r"""Decode \ooo in a mount table: so the kernel writes blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)
