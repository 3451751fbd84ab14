"""A job whose time limit is near is noticed by asking squeue, which may also say nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_train.launch.slurm.supervisor.time_limit import TimeLimit, parse_time_left, read_time_left


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that prints the file that is returned."""
    (tmp_path / "squeue").write_text(f'#!/bin/sh\n[ "$2" = --jobs=7 ] && cat {tmp_path}/left\n')
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path / "left"


def ask(limit: TimeLimit) -> bool:
    """Ask until Slurm has answered once."""
    near = limit.is_near()
    end = time.monotonic() + 20
    while limit._question is not None and time.monotonic() < end:
        time.sleep(0.01)
        near = limit.is_near()
    return near


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:30", 90),
        ("1:30 RUNNING", 90),
        ("0:14 SIGNALING", 14),
        ("0:00 COMPLETING", None),
        ("2:00:05", 7205),
        ("1-00:00:01", 86401),
        ("UNLIMITED RUNNING", None),
        ("INVALID", None),
        ("", None),
    ],
)
def test_time_left_as_squeue_prints_it(text: str, seconds: float | None) -> None:
    assert parse_time_left(f"{text}\n") == seconds


def test_the_limit_is_near_once_no_more_is_left_than_the_notice(squeue: Path) -> None:
    limit = TimeLimit("7", 90)
    squeue.write_text("1:31\n")
    assert not ask(limit)
    time.sleep(1)
    squeue.write_text("1:30\n")
    assert ask(limit)
    limit.close()
    assert read_time_left("7") == 90


def test_ranks_that_start_or_save_have_time_until_a_requeue_would_come_too_late(
    squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for notice, saving, seconds in ((60, False, 40), (10, False, 10), (60, True, 20), (10, True, 5)):
        limit = TimeLimit("7", notice)
        assert limit.leaves_time(saving), "nothing is known yet"
        squeue.write_text("1:30\n")
        assert not ask(limit)
        for later, left in ((88 - seconds, True), (91 - seconds, False)):
            then = time.monotonic() + later
            with monkeypatch.context() as patch:
                patch.setattr("time.monotonic", lambda then=then: then)
                assert limit.leaves_time(saving) is left
        limit.close()


@pytest.mark.parametrize(
    ("before", "after", "preempted", "saving"),
    [
        ("10:00 RUNNING", "0:30 RUNNING", True, 10),
        ("UNLIMITED RUNNING", "0:09 RUNNING", True, 3),
        ("10:00 RUNNING", "9:59 RUNNING", False, 20),
        ("0:31 RUNNING", "0:30 RUNNING", False, 20),
        ("", "0:30 RUNNING", False, 20),
    ],
)
def test_a_limit_that_is_shortened_as_the_job_is_asked_to_stop_is_a_grace_time(
    squeue: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, preempted: bool, saving: float
) -> None:
    """Ranks that save may use two thirds of it; those that start have nothing to save."""
    limit = TimeLimit("7", 60)
    squeue.write_text(f"{before}\n")
    ask(limit)
    squeue.write_text(f"{after}\n")
    limit.ask_again()
    ask(limit)
    assert limit.is_preempted is preempted
    for later, time_left in ((-1, True), (1, False)):
        then = limit._end - saving + later
        with monkeypatch.context() as patch:
            patch.setattr("time.monotonic", lambda then=then: then)
            assert limit.leaves_time(saving=True) is time_left
    limit.close()


def test_a_limit_that_was_raised_is_no_longer_near(squeue: Path) -> None:
    limit = TimeLimit("7", 90)
    squeue.write_text("1:31\n")
    assert not ask(limit)
    time.sleep(1)
    squeue.write_text("2:00:00\n")
    assert not ask(limit)
    assert not limit.is_near()
    assert limit._question is None, "asked again when the new limit is near, and not before"


def test_without_an_answer_nothing_is_near(squeue: Path) -> None:
    limit = TimeLimit("7", 90)
    assert not ask(limit)
    assert read_time_left("7") is None
    limit.close()
