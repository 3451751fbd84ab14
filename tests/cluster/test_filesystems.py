"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.filesystems import find_filesystem, read_mount_table

MOUNTS = r"""rootfs / rootfs rw 0 0
/dev/sda1 / xfs rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
10.1.0.1@o2ib:10.1.0.2@o2ib:/scratch /lustre/scratch lustre rw,flock 0 0
gpfs0 /gpfs gpfs rw 0 0
server:/home /home nfs4 rw,vers=4.2 0 0
auto.data /data autofs rw 0 0
beegfs_nodev /data/with\040space fhgfs rw 0 0
/dev/nvme0n1 /lustre ext4 rw 0 0
/dev/nvme1n1 /local ext4 rw 0 0
tmpfs /local tmpfs rw 0 0
not a
"""


@pytest.mark.parametrize(
    ("path", "kind", "mount", "shared"),
    [
        ("/", "xfs", "/", False),
        ("/homes/x", "xfs", "/", False),
        ("/home/user/run/../other", "nfs", "/home", True),
        ("/lustre/scratch/project", "lustre", "/lustre/scratch", True),
        ("/lustre/scratch2", "ext4", "/lustre", False),
        ("/gpfs/x", "gpfs", "/gpfs", True),
        ("/data/other", "autofs", "/data", False),
        ("/data/with space/file", "beegfs", "/data/with space", True),
        ("/dev/shm", "tmpfs", "/dev/shm", False),
        ("/local/scratch", "tmpfs", "/local", False),
    ],
)
def test_longest_and_latest_mount(path: str, kind: str, mount: str, shared: bool) -> None:
    found = find_filesystem(Path(path), MOUNTS)
    assert found is not None
    assert (found.kind, found.mount, found.shared) == (kind, mount, shared)


def test_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/gpfs/project")
    found = find_filesystem(tmp_path / "link/run", MOUNTS)
    assert found is not None
    assert found.kind == "gpfs"


def test_no_mounts() -> None:
    assert find_filesystem(Path("/x"), "") is None
    assert len(read_mount_table(MOUNTS)) == 11


def test_of_this_process(tmp_path: Path) -> None:
    here, processes = find_filesystem(tmp_path), find_filesystem(Path("/proc/self"))
    assert here is not None
    assert tmp_path.resolve().is_relative_to(here.mount)
    assert processes is not None
    assert processes.kind == "proc"
