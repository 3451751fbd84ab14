"""Notices of clouds: files and commands, also those that hang, fail, or are not there."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hpc_train.resilience.notices import NoticeWatch


def wait_for_notice(watch: NoticeWatch, seconds: float) -> str | None:
    """Poll as an agent does, until a notice comes or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if notice := watch.poll():
            return notice
        time.sleep(0.02)
    return None


def test_a_file_with_text_is_a_notice(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    watch = NoticeWatch(file=str(file))
    assert watch.poll() is None
    file.touch()
    assert watch.poll() is None
    file.write_text("\n\x1b[2Jinstance \x07ends at 12:00\nmore\n")
    assert watch.poll() == "[2Jinstance ends at 12:00"


def test_a_pipe_or_a_directory_in_its_place_is_none_and_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", tmp_path):
        assert NoticeWatch(file=str(file)).poll() is None


def test_a_command_that_prints_is_a_notice() -> None:
    watch = NoticeWatch(command=[sys.executable, "-c", "print('taken away')"])
    assert wait_for_notice(watch, 30) == "taken away"


def test_a_command_that_fails_or_prints_nothing_is_none_and_is_asked_again(tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); print('no'); raise SystemExit(22)"
    watch = NoticeWatch(command=[sys.executable, "-c", code], every_seconds=0.05)
    end = time.monotonic() + 30
    while not (count.exists() and len(count.read_text()) > 2) and time.monotonic() < end:
        assert watch.poll() is None
        time.sleep(0.01)
    watch.close()
    assert len(count.read_text()) > 2


def test_a_command_that_hangs_is_killed_and_asked_again() -> None:
    watch = NoticeWatch(command=["sleep", "1000"], every_seconds=0.01, timeout_seconds=0.1)
    watch.poll()
    first = watch._process
    assert first is not None
    end = time.monotonic() + 30
    while first.poll() is None and time.monotonic() < end:
        assert watch.poll() is None
    assert first.poll() is not None
    watch.close()


def test_a_command_that_is_not_there_is_said() -> None:
    watch = NoticeWatch(command=["/no/such/command"])
    assert watch.poll() is None
    assert watch.failure == "/no/such/command: No such file or directory"
