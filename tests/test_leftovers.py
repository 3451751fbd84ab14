"""What a test leaves behind is found, and named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import leftovers
import pytest


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(leftovers, "GRACE_SECONDS", 0.2)
    yield
    leftovers._threads_at_forks.clear()


def test_nothing_is_found_where_nothing_is_left() -> None:
    before = leftovers.record_surroundings()
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.05,))
    thread.start()
    assert leftovers.list_leftovers(before) == []


def test_a_thread_and_a_fork_beside_it_are_found() -> None:
    before, stop = leftovers.record_surroundings(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten")
    thread.start()
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert leftovers.list_leftovers(before) == ["thread forgotten", "forked beside the threads forgotten"]
    assert leftovers.list_leftovers(before, may_fork=True) == ["thread forgotten"]
    leftovers.record_surroundings()
    leftovers.note_fork()
    assert leftovers._threads_at_forks == [], "it is reported once"
    stop.set()
    thread.join()


def test_a_child_process_is_found() -> None:
    before = leftovers.record_surroundings()
    child = subprocess.Popen(["sleep", "77"])
    try:
        assert leftovers.list_leftovers(before) == [f"process {child.pid}: sleep 77"]
    finally:
        child.kill()
        child.wait()


def test_a_changed_variable_and_another_folder_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = leftovers.record_surroundings()
    monkeypatch.setenv("FORGOTTEN", "1")
    monkeypatch.chdir(tmp_path)
    assert leftovers.list_leftovers(before) == ["environment variable FORGOTTEN=1", f"working directory {tmp_path}"]


def test_a_new_file_is_found_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leftovers, "_folders", lambda: [str(tmp_path)])
    before = leftovers.record_surroundings()
    (tmp_path / "slurm-18.out").touch()
    (tmp_path / "__pycache__").mkdir()
    said = f"file {tmp_path}/slurm-18.out, of this test or of one in another worker"
    assert leftovers.list_leftovers(before) == [said]
    assert leftovers.list_leftovers(before) == []
