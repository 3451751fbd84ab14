"""Old checkpoints go, whole ones stay, and what dead processes left is taken away."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import holds, names, save_alone, state
from drawn import draw
from faults import at_call, disk_full, kill
from other_user import need_root

from hpc_train.checkpoint import find_newest_verified, list_committed_steps, prune_steps
from hpc_train.checkpoint.storage.retention import make_token

SMALL = {"w": torch.ones(2)}


def saved(directory: Path, *steps: int) -> Path:
    for step in steps:
        save_alone(directory, step, SMALL)
    return directory


def test_the_newest_stay(tmp_path: Path) -> None:
    assert prune_steps(saved(tmp_path, 1, 2, 3, 4), keep=2) == [1, 2]
    assert names(tmp_path) == ["step-3", "step-4"]
    assert prune_steps(tmp_path, keep=2) == []


def test_after_a_rollback_the_abandoned_future_goes_not_the_present(tmp_path: Path) -> None:
    assert prune_steps(saved(tmp_path, 500, 600, 700, 550), keep=2) == [500, 600]
    assert list_committed_steps(tmp_path) == [700, 550]


def test_damaged_ones_do_not_count_and_the_only_whole_one_stays(tmp_path: Path) -> None:
    saved(tmp_path, 100, 150, 175)
    (tmp_path / "step-150" / "manifest.json").unlink()
    (tmp_path / "step-175" / "shards/000/000000.h5").write_bytes(b"")
    assert prune_steps(tmp_path, keep=2) == []
    assert find_newest_verified(tmp_path) == 100
    assert prune_steps(tmp_path, keep=1) == [150, 175]
    assert names(tmp_path) == ["step-100"]


def test_nothing_to_prune(tmp_path: Path) -> None:
    assert prune_steps(tmp_path / "absent", keep=1) == []


def leave(directory: Path, name: str, hours_ago: float = 0) -> None:
    path = directory / name
    shard = path / "shards/000/000000.h5"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"half")
    for item in (shard, shard.parent, shard.parent.parent, path):
        os.utime(item, (time.time() - 3600 * hours_ago,) * 2)


def dead_process() -> int:
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()
    assert process.pid is not None
    return process.pid


@pytest.mark.parametrize("ending", [".trash-anything", ".tmp-elsewhere.1.ab"])
def test_trash_and_what_nobody_touched_for_long_goes(tmp_path: Path, ending: str) -> None:
    leave(tmp_path, f"step-9{ending}", hours_ago=3)
    prune_steps(tmp_path, keep=1)
    assert names(tmp_path) == []


def test_the_temporary_directory_of_a_dead_process_goes_and_of_a_live_one_stays(tmp_path: Path) -> None:
    host, own, random, here = make_token().split(".")
    assert own == str(os.getpid())
    live = f"step-9.tmp-{host}.{os.getppid()}.{random}.{here}"
    elsewhere = f"step-9.tmp-elsewhere.1.{random}.{here}"
    another_namespace = f"step-9.tmp-{host}.{dead_process()}.{random}.0123456789ab"
    without_machine = f"step-9.tmp-{host}.{dead_process()}.{random}"
    leave(tmp_path, f"step-9.tmp-{host}.{dead_process()}.{random}.{here}")
    for name in (live, elsewhere, another_namespace, without_machine):
        leave(tmp_path, name)
    prune_steps(tmp_path, keep=1)
    assert names(tmp_path) == sorted([live, elsewhere, another_namespace, without_machine])


NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child")
PRUNE = (
    "import sys; from pathlib import Path; from hpc_train.checkpoint import "
    "prune_steps as prune; prune(Path(sys.argv[1]), keep=1)"
)


def save_slowly(directory: Path, word: Connection) -> None:
    def pause(call: str, arguments: tuple[object, ...]) -> None:
        word.send("saving")
        word.recv()

    with at_call(1, pause, ("fsync",), directory):
        save_alone(directory, 2, state(2))


@pytest.mark.parametrize("mount", [(), ("--mount-proc",)], ids=["proc of the host", "proc of its own"])
def test_a_save_is_left_alone_by_who_cannot_see_its_process(tmp_path: Path, mount: tuple[str, ...]) -> None:
    need_root()
    fork = multiprocessing.get_context("fork")
    mine, its = fork.Pipe()
    saving = fork.Process(target=save_slowly, args=(tmp_path, its))
    saving.start()
    assert mine.recv() == "saving"
    subprocess.run([*NAMESPACE, *mount, sys.executable, "-c", PRUNE, tmp_path], check=True)
    prune_steps(tmp_path, keep=1)
    assert len([name for name in names(tmp_path) if ".tmp-" in name]) == 1
    mine.send("go on")
    saving.join()
    assert saving.exitcode == 0
    assert list_committed_steps(tmp_path) == [2]
    assert holds(tmp_path, 2, state(2))


def test_files_that_are_not_ours_stay(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    others = ["notes.txt", "step-1.bak", "step-one", "step-01"]
    for name in others:
        (tmp_path / name).mkdir()
    prune_steps(tmp_path, keep=1)
    assert names(tmp_path) == sorted(["step-2", *others])
    assert list_committed_steps(tmp_path) == [2]


def test_a_step_in_the_middle_of_its_replacement_is_still_there(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, state(1))
    (tmp_path / "step-1").rename(tmp_path / "step-1.old-host.1.ab")
    assert find_newest_verified(tmp_path) == 1
    assert holds(tmp_path, 1, state(1))
    assert prune_steps(tmp_path, keep=1) == []
    save_alone(tmp_path, 1, state(2))
    assert holds(tmp_path, 1, state(2))
    prune_steps(tmp_path, keep=1)
    assert names(tmp_path) == ["step-1"]


def kill_while_pruning(directory: Path, number: int) -> int | None:
    """Exit code of a process that prunes and is killed at its `number`-th call."""

    def run() -> None:
        with at_call(number, kill):
            prune_steps(directory, keep=1)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode


@pytest.mark.parametrize("third", draw(range(3), [2]))
def test_killed_while_pruning(tmp_path: Path, third: int) -> None:
    number = 1 + third
    while True:
        directory = saved(tmp_path / str(number), 1, 2, 3)
        code = kill_while_pruning(directory, number)
        assert find_newest_verified(directory) == 3
        assert all(holds(directory, step, SMALL) for step in list_committed_steps(directory)), "what is listed is whole"
        prune_steps(directory, keep=1)
        assert names(directory) == ["step-3"]
        if code == 0:
            break
        number += 3
    assert number > 4


def test_what_cannot_be_removed_is_left_for_the_next_time(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    with at_call(1, disk_full, calls=("rename",)) as made:
        assert prune_steps(tmp_path, keep=1) == []
    assert made == ["rename"]
    assert prune_steps(tmp_path, keep=1) == [1]
