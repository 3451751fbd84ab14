"""A job whose time limit is near is noticed by asking squeue, which may also say nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hpc_train.launch.slurm.supervisor.time_limit import TimeLimit, parse_grace, parse_time_left, read_time_left


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
    ("text", "grace", "saving"),
    [
        ("9:50 RUNNING 10:00 0:10 1000 1040", 30, 10),
        ("9:50 SIGNALING 10:00 0:10 1000 1019", 9, 3),
        ("UNLIMITED RUNNING UNLIMITED 1:00:00 1000 4630", 30, 10),
        ("0:30 RUNNING 10:00 9:30 1000 1600", None, 20),
        ("UNLIMITED RUNNING UNLIMITED 1:00:00 1000 NONE", None, None),
        ("9:50 RUNNING 10:00 0:10 2026-11-28T06:21:27 2026-11-28T06:21:42", None, 20),
        ("9:50 COMPLETING 10:00 0:10 1000 1040", None, None),
        ("", None, None),
    ],
)
def test_a_job_that_ends_before_its_limit_is_preempted_and_has_its_grace_time(
    squeue: Path, monkeypatch: pytest.MonkeyPatch, text: str, grace: float | None, saving: float | None
) -> None:
    """As Slurm 22.05 says it of such a job. Ranks that save may use two thirds of that time."""
    limit = TimeLimit("7", 60)
    squeue.write_text("10:00 RUNNING 10:00 0:00 1000 1600\n")
    assert not ask(limit)
    squeue.write_text(f"{text}\n")
    limit.ask_again()
    assert ask(limit) == (grace is not None or text.startswith("0:30"))
    assert (parse_grace(text), limit.is_preempted) == (grace, grace is not None)
    if saving is None:
        assert limit.leaves_time(saving=True)
    else:
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
