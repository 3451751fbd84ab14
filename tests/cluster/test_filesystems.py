"""Which file system a path is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_train.cluster.filesystems import Mount, find_mount, read_mounts

TABLE = r"""
1 0 0:1 / / rw - rootfs rootfs rw
27 1 8:1 / / rw,relatime shared:1 - xfs /dev/sda1 rw,discard
30 27 0:22 / /dev/shm rw shared:2 - tmpfs tmpfs rw
60 27 0:44 / /lustre/scratch rw,nosuid shared:9 master:2 - lustre 10.1.0.1@o2ib:10.1.0.2@o2ib:/scratch rw,flock
61 27 0:45 / /gpfs rw - gpfs gpfs0 rw
62 27 0:46 / /home rw - nfs4 server:/home rw,vers=4.2
63 27 0:47 / /data rw - autofs auto.data rw
64 63 0:48 / /data/with\040space\134x rw - fhgfs host:/x\040y rw
65 27 8:2 / /lustre rw - ext4 /dev/nvme0n1 rw
66 27 8:3 / /local rw - ext4 /dev/nvme1n1 rw
67 27 0:49 / /local rw - tmpfs tmpfs rw
a line that is none
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return path


def find(path: Path, table: Path) -> Mount:
    mount = find_mount(path, table)
    assert mount is not None
    return mount


@pytest.mark.parametrize(
    ("path", "kind", "point", "shared"),
    [
        ("/", "xfs", "/", False),
        ("/homes/x", "xfs", "/", False),
        ("/home/user/run/../other", "nfs", "/home", True),
        ("/lustre/scratch/project", "lustre", "/lustre/scratch", True),
        ("/lustre/scratch2", "ext4", "/lustre", False),
        ("/gpfs/x", "gpfs", "/gpfs", True),
        ("/data/other", "autofs", "/data", False),
        ("/data/with space\\x/file", "beegfs", "/data/with space\\x", True),
        ("/dev/shm", "tmpfs", "/dev/shm", False),
        ("/local/scratch", "tmpfs", "/local", False),
    ],
)
def test_longest_and_latest_mount(table: Path, path: str, kind: str, point: str, shared: bool) -> None:
    mount = find(Path(path), table)
    assert (mount.kind, mount.point, mount.shared) == (kind, Path(point), shared)


def test_type_and_source_are_the_kernels_own(table: Path) -> None:
    assert (find(Path("/home"), table).type, find(Path("/home"), table).source) == ("nfs4", "server:/home")
    assert find(Path("/data/with space\\x"), table).source == "host:/x y"


def test_options_of_the_mount_and_of_the_file_system(table: Path) -> None:
    assert find(Path("/lustre/scratch"), table).options == ("rw", "nosuid", "flock")
    assert find(Path("/usr"), table).options == ("rw", "relatime", "discard")


def test_through_a_link(tmp_path: Path, table: Path) -> None:
    (tmp_path / "link").symlink_to("/gpfs/project")
    assert find(tmp_path / "link/run", table).kind == "gpfs"


def test_no_mounts(tmp_path: Path, table: Path) -> None:
    assert len(read_mounts(table)) == 11
    table.write_text("")
    assert find_mount(Path("/x"), table) is None
    assert find_mount(Path("/x"), tmp_path / "no table") is None


def test_of_this_process(tmp_path: Path) -> None:
    here = find_mount(tmp_path)
    assert here is not None
    assert tmp_path.resolve().is_relative_to(here.point)
    processes = find_mount(Path("/proc/self"))
    assert processes is not None
    assert processes.kind == "proc"
