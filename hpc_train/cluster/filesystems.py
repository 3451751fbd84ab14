"""Find which file system a path is on, from the mount table.

For messages and warnings: the path need not exist yet, and no system call is made on it. How a checkpoint is written is
decided by statfs(2) and more, in checkpoint/storage/file_system.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
class MountedFileSystem:
    """One line of the mount table."""

    kind: str
    """Kind of file system: lustre, gpfs, nfs, beegfs, ext4, xfs, tmpfs, ...; one word for all versions."""
    mount: str
    """Mount point."""
    source: str
    """Source of the mount: a device, or the server and its directory."""

    @property
    def shared(self) -> bool:
        """Whether other hosts can see the same files."""
        return self.kind in _SHARED_KINDS


def find_filesystem(path: Path, mounts: str | None = None) -> MountedFileSystem | None:
    """Return the file system of a path, which need not exist yet; None if no mount holds it.

    mounts: a mount table as /proc/self/mounts has it; this process's own by default.
    """
    if mounts is None:
        mounts = _read_own_mounts()
    place, best = path.resolve(), None
    for mounted in read_mount_table(mounts):
        # >=: of two mounts on one point, the later one hides the earlier.
        longer = best is None or len(Path(mounted.mount).parts) >= len(Path(best.mount).parts)
        if longer and place.is_relative_to(mounted.mount):
            best = mounted
    return best


def read_mount_table(mounts: str) -> list[MountedFileSystem]:
    """Parse a mount table, in its order. Lines that are no mounts are left out."""
    rows = [line.split() for line in mounts.split("\n")]
    return [
        MountedFileSystem(_SAME_KINDS.get(row[2], row[2]), decode_escapes(row[1]), decode_escapes(row[0]))
        for row in rows
        if len(row) >= 3
    ]


def _read_own_mounts() -> str:
    try:
        return Path("/proc/self/mounts").read_text(errors="replace")
    except OSError:
        return ""


def decode_escapes(text: str) -> str:
    r"""Decode \ooo in a mount table: so the kernel writes blanks, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)
