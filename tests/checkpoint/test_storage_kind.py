"""What a directory is on, from the kernel's answers; and how to write there, tried out on the directory itself."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkpoint_helpers import names

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.storage.file_system import (
    WRITE_BYTES,
    FileSystem,
    check_free_space,
    choose_write_policy,
    detect_file_system,
    probe_directory,
    read_magic_number,
)
from hpc_train.cluster.filesystems import find_mount

GIB = 1 << 30


def mounts(folder: Path, table: str) -> Path:
    path = folder / "mountinfo"
    path.write_text(table)
    return path


def on(kind: str, **facts: Any) -> FileSystem:
    return FileSystem(
        **{"kind": kind, "mount": Path("/"), "source": "", "options": (), "free_bytes": GIB, "free_files": 9, **facts}
    )


def test_this_machine(tmp_path: Path) -> None:
    """Against what the kernel says elsewhere: /proc is proc, and a file system is called as it is mounted."""
    assert read_magic_number(Path("/proc")) == 0x9FA0
    assert detect_file_system(Path("/proc")).kind == "proc"
    system = detect_file_system(tmp_path)
    assert system.mount.is_mount()
    assert system.mount.stat().st_dev == tmp_path.stat().st_dev
    mount = find_mount(tmp_path)
    assert mount is not None
    assert system.kind == mount.type
    space = os.statvfs(tmp_path)
    assert abs(system.free_bytes - space.f_bavail * space.f_frsize) < GIB
    with pytest.raises(FileNotFoundError):
        detect_file_system(tmp_path / "none")


def test_a_table_that_says_nothing(tmp_path: Path) -> None:
    assert detect_file_system(tmp_path, mounts(tmp_path, ""), lambda _: 0x12345678).kind == "unknown (0x12345678)"


@pytest.mark.parametrize(
    ("number", "mounted_as", "kind"),
    [
        (0x0BD00BD0, "lustre", "lustre"),
        (0x47504653, "gpfs", "gpfs"),
        (0x6969, "nfs4", "nfs"),
        (0xEF53, "ext4", "ext4"),
        (0xEF53, "ext3", "ext3"),
        (0x58465342, "xfs", "xfs"),
        (0x01021994, "tmpfs", "tmpfs"),
        (0x794C7630, "overlay", "overlay"),
        (0x65735546, "fuse.gcsfuse", "fuse.gcsfuse"),
        (0x65735546, "fuse", "fuse"),
        (0x19830326, "beegfs", "beegfs"),
        (0x77777777, "wekafs", "wekafs"),
    ],
)
def test_kinds(tmp_path: Path, number: int, mounted_as: str, kind: str) -> None:
    table = mounts(tmp_path, f"1 0 0:1 / / rw - {mounted_as} x rw\n")
    assert detect_file_system(tmp_path, table, lambda _: number).kind == kind


@pytest.mark.parametrize(
    ("option", "flock"), [("flock", True), ("localflock", False), ("noflock", False), ("rw", False)]
)
def test_flock_on_lustre(option: str, flock: bool) -> None:
    assert on("lustre", options=("rw", option)).flock is flock
    assert on("xfs", options=("rw", option)).flock is None


# How to write


def test_the_probe_tells_what_the_directory_can_and_leaves_nothing(tmp_path: Path) -> None:
    found = probe_directory(tmp_path)
    assert names(tmp_path) == []
    words = ["dd", "if=/dev/zero", f"of={tmp_path / 'x'}", "bs=4096", "count=1", "oflag=direct"]
    assert found[0] == (subprocess.run(words, capture_output=True).returncode == 0)
    assert found[1] == (
        subprocess.run(["fallocate", "-l", "4096", tmp_path / "y"], capture_output=True).returncode == 0
    )


@pytest.mark.parametrize("call", ["open", "pwrite"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_refusal_of_direct_writes_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    real = os.open

    def refuse(*args: Any) -> int:
        if call == "open" and not args[1] & os.O_DIRECT:
            return real(*args)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    found = choose_write_policy(on("fuse"), tmp_path)
    assert (found.direct, found.write_bytes) == (False, WRITE_BYTES)
    assert names(tmp_path) == []


def test_a_full_disk_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        probe_directory(tmp_path)
    assert names(tmp_path) == []


def test_what_the_user_says_about_direct_writes_holds(tmp_path: Path) -> None:
    assert not choose_write_policy(on("ext4"), tmp_path, "buffered").direct
    assert choose_write_policy(on("tmpfs"), tmp_path, "direct").direct
    assert not choose_write_policy(on("tmpfs"), tmp_path).direct, "there is no disk to go to directly"


@pytest.mark.parametrize(
    ("round_mib", "write_mib"), [(None, 16), (1, 16), (16, 16), (5, 20), (48, 48), (64, 64), (65, 16), (1536, 16)]
)
def test_a_write_covers_whole_rounds_of_stripes(tmp_path: Path, round_mib: int | None, write_mib: int) -> None:
    round_bytes = round_mib << 20 if round_mib else None
    assert choose_write_policy(on("lustre"), tmp_path, round_bytes=round_bytes).write_bytes == write_mib << 20


# Room


def test_room_for_all_ranks_or_one_line_that_says_how_much_is_missing(tmp_path: Path) -> None:
    needs = [GIB, GIB // 2, 0]
    check_free_space(on("ext4", free_bytes=2 * GIB), tmp_path, needs)
    check_free_space(on("btrfs", free_bytes=2 * GIB, free_files=None), tmp_path, needs)
    with pytest.raises(CheckpointError) as error:
        check_free_space(on("ext4", free_bytes=GIB), tmp_path, needs)
    text = str(error.value)
    assert re.match(rf"it needs 1\.50 GiB, {re.escape(str(tmp_path))} has 1\.00 GiB free: remove old checkpoints", text)
    assert "checkpoint.keep" in text
    assert "\n" not in text


def test_files_are_counted_too(tmp_path: Path) -> None:
    check_free_space(on("ext4", free_files=7), tmp_path, [1, 1, 1])
    with pytest.raises(CheckpointError, match=r"it needs 7 files, .* may have 6 more"):
        check_free_space(on("ext4", free_files=6), tmp_path, [1, 1, 1])
