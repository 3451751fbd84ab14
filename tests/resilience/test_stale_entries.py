"""Entries of dead ranks that no watcher has removed go at the next start on their node; those of the living stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_train.doctor import machine
from hpc_train.resilience import heartbeat
from hpc_train.resilience.heartbeat import Heartbeat, find_folder, read_beats, remove_stale_entries


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(heartbeat, "_MEMORY", folder)
    return folder


def die(rank: Heartbeat) -> None:
    """Unmap the entry of a rank, as the end of its process does."""
    assert rank._map is not None
    rank._map.close()
    rank._map = None


def test_the_next_attempt_removes_those_of_dead_ranks_of_its_run(tmp_path: Path, memory: Path) -> None:
    logs = tmp_path / "run/logs"
    dead, alive, other = (Heartbeat(where) for where in (logs / "0", logs / "1", tmp_path / "other/logs/0"))
    die(dead)
    die(other)
    attempt = Heartbeat(logs / "2")
    assert not find_folder(logs / "0").exists()
    assert [len(read_beats(logs / name)) for name in "12"] == [1, 1]
    assert len(read_beats(tmp_path / "other/logs/0")) == 1, "its watcher may be about to look at it"
    die(alive)
    die(attempt)


def test_those_of_other_runs_go_when_no_watcher_can_look_at_them_any_more(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, alive = Heartbeat(tmp_path / "a/logs/0"), Heartbeat(tmp_path / "b/logs/0")
    die(dead)
    empty = memory / f"hpc_train-{os.getuid()}-{'0' * 20}"
    empty.mkdir(mode=0o700)
    os.utime(empty, (0, 0))
    open_to_others = memory / f"hpc_train-{os.getuid()}-{'1' * 20}"
    open_to_others.mkdir(mode=0o755)
    os.utime(open_to_others, (0, 0))
    assert remove_stale_entries() == 1
    assert not empty.exists()
    later = time.monotonic() + heartbeat._STALE_SECONDS + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    findings = [finding for finding in machine.check_limits(tmp_path, False) if finding.name == "heartbeats"]
    assert [finding.text for finding in findings] == [
        "removed what dead ranks of 1 attempt(s) had left in /dev/shm",
    ]
    assert sorted(memory.iterdir()) == sorted([find_folder(tmp_path / "b/logs/0"), open_to_others])
    die(alive)
