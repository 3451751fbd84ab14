"""A disk of the node between memory and the shared directory; and no save that begins without room for it."""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections import namedtuple
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from checkpoint_helpers import alone, blank, holds, names, same_pieces, save_alone, sharded, state, whole
from faults import at_call, disk_full, of_descriptor

from hpc_train.checkpoint import Saver, find_newest_verified, load_step, verify_step
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.save import local_stage
from hpc_train.checkpoint.save.local_stage import LocalStage
from hpc_train.checkpoint.storage.file_system import DEFAULT_POLICY, FileSystem
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStage:
    """A disk of the node. Where the tests' own directory is in memory, it is taken for one all the same."""
    folder = tmp_path / "disk"
    folder.mkdir()
    real = local_stage.detect_file_system
    monkeypatch.setattr(local_stage, "detect_file_system", lambda path: replace(real(path), kind="ext4"))
    return LocalStage(folder)


def image(size: int, seed: int = 0) -> memoryview:
    """Bytes in whole pages, as the arena has them."""
    memory = mmap.mmap(-1, -(-size // 4096) * 4096)
    memory.write(
        torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        .numpy()
        .tobytes()
    )
    return memoryview(memory)


@pytest.mark.parametrize("size", [1, 4096, 100_001, (16 << 20) + 4097, 40 << 20])
@pytest.mark.parametrize("direct", [True, False])
def test_what_goes_through_comes_out(disk: LocalStage, tmp_path: Path, size: int, direct: bool) -> None:
    memory = image(size)
    copy = disk.copy_from(memory, size)
    assert copy is not None
    assert names(disk.directory) == [], "it has no name there"
    digests = copy.copy_to(tmp_path / "file", replace(DEFAULT_POLICY, direct=direct))
    copy.close()
    assert (tmp_path / "file").read_bytes() == memory[:size]
    assert digests == copy.digests


@pytest.mark.parametrize("at", [0, 70_000, (16 << 20) + 5])
def test_damage_on_the_disk_of_the_node_shows(disk: LocalStage, tmp_path: Path, at: int) -> None:
    size = (16 << 20) + 10_000
    copy = disk.copy_from(image(size), size)
    assert copy is not None
    with Path(f"/proc/self/fd/{copy.descriptor}").open("r+b", buffering=0) as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())
    with pytest.raises(CheckpointError, match="stage_dir was damaged"):
        copy.copy_to(tmp_path / "file", DEFAULT_POLICY)
    copy.close()


def test_a_disk_that_has_no_files_without_names(
    disk: LocalStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", 0)  # an old kernel opens the directory then, which is an error
    copy = disk.copy_from(image(5000), 5000)
    assert copy is not None
    assert names(disk.directory) == []
    assert copy.copy_to(tmp_path / "file", DEFAULT_POLICY) == copy.digests
    copy.close()


def test_a_save_by_way_of_the_disk(disk: LocalStage, tmp_path: Path) -> None:
    directory = tmp_path / "c"

    def save(world: World) -> list[Any]:
        saver = Saver(directory, world, local_stage=disk)
        told = []
        for step in (1, 2):
            pieces = sharded(state(step), 0, world.rank, world.size)
            saver.save(step, pieces, {})
            for piece in pieces:
                piece.local.zero_()
            told += [it.error for it in saver.wait()]
        return told

    assert run_ranks(save, 2) == [[None, None]] * 2
    found = blank(whole(state(2)))
    load_step(directory, 2, found, alone())
    assert same_pieces(found, whole(state(2)))
    assert verify_step(directory, 1) == []
    assert names(disk.directory) == []


def test_the_memory_is_back_while_the_shared_directory_is_slow(
    disk: LocalStage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, reached, real = threading.Event(), threading.Event(), os.mkdir

    def mkdir(path: Any, *args: Any, **named: Any) -> None:
        if str(path).startswith(str(tmp_path / "c")):
            reached.set()
            assert free.wait(60)
        real(path, *args, **named)

    monkeypatch.setattr(os, "mkdir", mkdir)
    saver = Saver(tmp_path / "c", alone(), local_stage=disk)
    tensors = {"w": torch.arange(4 << 20, dtype=torch.int32)}
    before = lazily_free()
    saver.save(1, whole(tensors), {})
    assert reached.wait(60)
    assert lazily_free() - before > 12 << 20, "nearly all of the 16 MiB are the kernel's for the taking"
    assert find_newest_verified(tmp_path / "c") is None
    free.set()
    assert [it.error for it in saver.wait()] == [None]
    assert holds(tmp_path / "c", 1, tensors)
    saver.save(2, whole(tensors), {})
    assert [it.error for it in saver.wait()] == [None]
    assert holds(tmp_path / "c", 2, tensors)


def lazily_free() -> int:
    """Bytes of this process that the kernel may take without asking (MADV_FREE, proc_pid_smaps(5))."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("LazyFree:"))


def test_a_full_disk_of_the_node_costs_a_warning_and_nothing_else(
    disk: LocalStage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(tmp_path / "c", alone(), background=False, local_stage=disk)
    with at_call(0, disk_full) as made:
        saver.save(1, whole(state(1)), {})
    number = made.index("posix_fallocate") + 1
    for step in (2, 3):
        with at_call(number, disk_full):
            saver.save(step, whole(state(step)), {})
    assert [it.error for it in saver.wait()] == [None] * 3
    assert holds(tmp_path / "c", 3, state(3))
    (warning,) = (it.getMessage() for it in caplog.records)
    assert warning.startswith(f"checkpoint.stage_dir={disk.directory} is not used: No space left on device; the save")


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"kind": "tmpfs"}, "it is in memory, where a copy gains nothing"),
        ({"free_bytes": 4096}, "it has 4.00 KiB free, this rank needs 4.88 KiB"),
    ],
)
def test_a_disk_that_is_of_no_use_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, facts: dict[str, Any], why: str
) -> None:
    system = FileSystem("ext4", Path("/"), "", (), 1 << 40, None)
    monkeypatch.setattr(local_stage, "detect_file_system", lambda path: replace(system, **facts))
    disk = LocalStage(tmp_path)
    for _ in range(2):
        assert disk.copy_from(image(5000), 5000) is None
    (warning,) = (it.getMessage() for it in caplog.records if it.levelno == logging.WARNING)
    assert why in warning


def test_a_directory_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = Saver(tmp_path / "c", alone(), background=False, local_stage=LocalStage(tmp_path / "none"))
    saver.save(1, whole(state(1)), {})
    assert [it.error for it in saver.wait()] == [None]
    assert "No such file or directory" in caplog.text


def test_the_setting_means_the_node_it_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", "/local/job-7")
    assert LocalStage.from_setting("$SLURM_TMPDIR/stage") == LocalStage(Path("/local/job-7/stage"))
    assert LocalStage.from_setting(None) is None


def save_and_stop(disk: LocalStage, shared: Path, to_the_disk: bool, said: Connection) -> None:
    """Save step 2, and stop half-way through the first large write to this disk, or to the shared directory."""
    write = os.pwrite

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        where = of_descriptor(descriptor)
        if where.is_relative_to(disk.directory) == to_the_disk and len(data) > 1 << 20:
            os.pwritev(descriptor, [data[: len(data) // 2]], offset)
            said.send("now")
            time.sleep(60)
        return write(descriptor, data, offset)

    large = torch.arange(8 << 20, dtype=torch.int32)
    with patch.object(os, "pwrite", pwrite):
        saver = Saver(shared, alone(), background=False, local_stage=disk)
        saver.save(2, [TensorShard("w", (8 << 20,), large.dtype, (0,), large)], {})


@pytest.mark.parametrize("when", ["to the disk", "from the disk"])
def test_killed_in_the_middle(disk: LocalStage, tmp_path: Path, when: str) -> None:
    """Nothing is left on the disk of the node, and the newest checkpoint is the one before."""
    save_alone(tmp_path / "c", 1, state(1))
    fork = multiprocessing.get_context("fork")
    heard, said = fork.Pipe(duplex=False)
    process = fork.Process(target=save_and_stop, args=(disk, tmp_path / "c", when == "to the disk", said))
    process.start()
    try:
        assert heard.poll(60)
        there = names(disk.directory)
    finally:
        process.kill()
        process.join()
    assert (heard.recv(), there) == ("now", [])
    assert process.exitcode == -signal.SIGKILL
    assert names(disk.directory) == []
    assert find_newest_verified(tmp_path / "c") == 1
    assert holds(tmp_path / "c", 1, state(1))
    save_alone(tmp_path / "c", 3, state(3))
    assert [name for name in names(tmp_path / "c") if "tmp" in name] == []


# Room


Space = namedtuple("Space", "f_bavail f_frsize f_files f_favail")


def test_a_save_without_room_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The need is that of all ranks: each alone would fit."""
    save_alone(tmp_path, 1, state(1))

    def save(world: World) -> tuple[str, list[str]]:
        rows = torch.ones(100, 1000)
        pieces = [TensorShard("w", (200, 1000), rows.dtype, (100 * world.rank, 0), rows)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "statvfs", lambda _: Space(600, 1024, 1000, 1000))
            with at_call(0, disk_full) as made:
                saver = Saver(tmp_path, world)
                saver.save(2, pieces, {})
                (saved,) = saver.wait()
        made_there = [call for call in made if call in ("rename", "posix_fallocate", "fsync")]
        saver.save(3, pieces, {})
        assert [it.error for it in saver.wait()] == [None], "the training goes on, and the next one has room"
        return str(saved.error), made_there

    first, second = run_ranks(save, 2)
    assert first == second
    text, made = first
    assert made == []
    assert text.startswith(f"checkpoint step 2 was not saved in {tmp_path}: it needs 1.0")
    assert f" MiB, {tmp_path} has 600.00 KiB free: remove old checkpoints" in text
    assert names(tmp_path) == ["step-1", "step-3"]
