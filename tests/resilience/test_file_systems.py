"""A file system that does not answer is found, and no node is to blame for it unless it answers on others."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_train.launch import watching
from hpc_train.launch.watching import HangResponse, WatchSettings, find_stall, list_paths
from hpc_train.resilience import file_systems
from hpc_train.resilience.agent import Report, decode_report, encode_report
from hpc_train.resilience.deadlines import HangLimits
from hpc_train.resilience.file_systems import Disk, DiskWatch, find_mount, list_file_systems
from hpc_train.resilience.heartbeat import Heartbeat, Phase, remove_entries
from hpc_train.resilience.incident import read_hang
from hpc_train.resilience.watch import STOPPED, WAITS_FOR_DISK, Hang, NodeWatch, RankView

STALLS = Disk("/scratch", "lustre", "/scratch/run/data.h5", 12.0)
ANSWERS = replace(STALLS, seconds=0.0)
ON_DISK = Path("/var/tmp")
LIMITS = HangLimits(step=10, save=900)


def view(task: int, state: str = "S", silent: float = 11.0) -> RankView:
    return RankView(task, Phase.STEP, 50, silent, 10.0, state, f"node{task + 1}")


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    logs = tmp_path / "run" / "logs" / "0"
    logs.mkdir(parents=True)
    yield logs
    remove_entries(logs)


def events(logs: Path) -> list[dict[str, Any]]:
    path = logs.parents[1] / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_mount_point_is_the_longest_that_a_path_begins_with() -> None:
    mounts = {"/": "ext4", "/scratch": "lustre", "/scratch/me": "nfs4"}
    expected = {"/scratch/me/a": "/scratch/me", "/scratch/mean": "/scratch", "/scratch": "/scratch", "/home/a": "/"}
    assert {path: find_mount(path, mounts) for path in expected} == expected
    assert find_mount("/home", {"/scratch": "lustre"}) is None


def test_files_that_a_rank_has_open_are_found_by_their_file_systems(tmp_path: Path) -> None:
    path = ON_DISK / f"open-{os.getpid()}"
    with path.open("w"):
        found = list_file_systems([os.getpid()], tmp_path)
        path.unlink()
    assert str(path) in [name for _, paths in found.values() for name in paths]
    named = list_file_systems(
        [], tmp_path, list_paths({"data": {"path": "/etc/hosts", "seed": 1}, "all": ["x", "/usr"]})
    )
    assert {"/etc/hosts", "/usr"} <= {name for _, paths in named.values() for name in paths}
    assert not [name for _, paths in found.values() for name in paths if name.startswith(("/dev", "/proc", "/sys"))]
    assert "tmpfs" not in {kind for kind, _ in found.values()}


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """A disk that does not answer until the returned function is called."""
    thawed = tmp_path / "thawed"

    def wait(path: str) -> None:
        while not thawed.exists():
            time.sleep(0.01)

    monkeypatch.setattr(file_systems, "_read", wait)
    monkeypatch.setattr(file_systems, "_write", wait)
    monkeypatch.setattr(file_systems, "list_file_systems", lambda _, folder, paths: {"/disk": ("nfs4", [str(folder)])})
    monkeypatch.setattr(file_systems, "STALL_SECONDS", 0.2)
    return thawed.touch


def wait_for_recovery(watch: DiskWatch) -> None:
    end = time.monotonic() + 10
    while not watch.read_answers():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_file_system_that_does_not_answer_is_found_and_its_end(logs: Path, frozen: Callable[[], None]) -> None:
    watch = DiskWatch(logs)
    assert watch.look([]) == []
    (first,) = watch.look([1])
    assert (first.mount, first.kind, first.path) == ("/disk", "nfs4", str(logs))
    assert not first.answers
    time.sleep(0.3)
    (disk,) = watch.look([1])
    assert disk.stalls
    assert not watch.read_answers()
    frozen()
    wait_for_recovery(watch)
    assert not watch.read_answers()
    (disk,) = watch.look([1])
    assert disk.answers


def test_a_file_system_that_answers_is_asked_without_leaving_anything() -> None:
    folder = ON_DISK / f"asked-{os.getpid()}"
    folder.mkdir()
    watch, end = DiskWatch(folder), time.monotonic() + 10
    while not (found := watch.look([os.getpid()])) or not all(disk.answers for disk in found):
        assert time.monotonic() < end
        time.sleep(0.02)
        watch.read_answers()
    while watch._questions:
        watch.read_answers()
    folder.rmdir()


def test_the_time_of_a_stall_does_not_count_against_a_rank(logs: Path, frozen: Callable[[], None]) -> None:
    Heartbeat(logs, 0).enter(Phase.STEP, 3)
    watch = NodeWatch(logs, HangLimits(step=0.3, first_step=0.3, save=900))
    (seen,), end = watch.look(), time.monotonic() + 10
    while not (seen.overdue and watch.disks and watch.disks[0].stalls):
        assert time.monotonic() < end
        time.sleep(0.05)
        (seen,) = watch.look()
    frozen()
    while watch.look()[0].overdue:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_an_agent_knows_of_file_systems_is_reported() -> None:
    report = Report("node1", [], disks=[STALLS, ANSWERS])
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize(
    ("culprits", "disks", "hosts"),
    [
        ([view(0, WAITS_FOR_DISK)], {"node1": [STALLS], "node2": [STALLS]}, (("node1", "node2"), ())),
        ([view(0)], {"node1": [STALLS], "node2": [ANSWERS]}, (("node1",), ("node2",))),
        ([], {"node1": [ANSWERS], "node2": [STALLS]}, (("node2",), ("node1",))),
        ([view(0)], {"node1": [ANSWERS], "node2": [ANSWERS]}, None),
        ([view(0)], {}, None),
        ([view(0, STOPPED)], {"node1": [STALLS], "node2": [STALLS]}, None),
        ([view(0, "R")], {"node1": [STALLS], "node2": [STALLS]}, None),
    ],
)
def test_ranks_that_wait_for_a_file_system_are_told_from_those_that_hang(
    culprits: list[RankView], disks: dict[str, list[Disk]], hosts: tuple[tuple[str, ...], tuple[str, ...]] | None
) -> None:
    stall = find_stall(Hang(tuple(culprits), 2), disks)
    assert (stall and (stall.hosts, stall.answers)) == hosts


@pytest.mark.hangs
def test_ranks_that_wait_for_a_file_system_are_left_alone_and_no_node_is_to_blame(logs: Path) -> None:
    response = HangResponse(logs, WatchSettings(LIMITS, act=True), lambda: None)
    views, both = [view(0, WAITS_FOR_DISK), view(1)], {"node1": [STALLS], "node2": [STALLS]}
    assert not response.respond(views, {}, both)
    assert not response.respond(views, {}, both)
    (event,) = events(logs)
    assert event["event"] == "stall"
    assert event["why"] == (
        "the file system /scratch (lustre) has not answered for 12 s (asked for /scratch/run/data.h5) on node1, node2"
    )
    assert event["action"] == "the ranks wait for it, up to resilience.hang.save_seconds=900"
    too_long = {host: [replace(STALLS, seconds=901.0)] for host in both}
    assert response.respond(views, {}, too_long)
    hang = read_hang(logs)
    assert hang is not None
    assert (hang.task, hang.host) == (None, "")
    assert "/scratch (lustre) has not answered for 901 s" in hang.text


@pytest.mark.hangs
def test_a_node_on_which_alone_a_file_system_stalls_is_to_blame(logs: Path) -> None:
    """Also where the other rank looks as if it were."""
    response = HangResponse(logs, WatchSettings(LIMITS, act=True), lambda: None)
    views = [view(0), replace(view(1), step=49)]
    assert response.respond(views, {}, {"node1": [STALLS], "node2": [ANSWERS]})
    hang = read_hang(logs)
    assert hang is not None
    assert (hang.task, hang.host) == (0, "node1")
    assert "on node1, but answers on node2" in hang.text


@pytest.mark.hangs
def test_ranks_are_looked_at_again_where_the_disk_has_held_up_the_watcher(
    logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may go on by then: it was the disk of the run that they had waited for."""
    response = HangResponse(logs, WatchSettings(LIMITS, act=True), lambda: None)
    views = [view(0), view(1)]
    with monkeypatch.context() as patch:
        patch.setattr(watching, "_HELD_UP_SECONDS", -1.0)
        assert not response.respond(views, {})
    assert read_hang(logs) is None
    assert [event["event"] for event in events(logs)] == ["stall"]
    assert response.respond(views, {})
    assert [event["event"] for event in events(logs)] == ["stall", "hang"]
