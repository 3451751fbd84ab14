"""One job at a time writes checkpoints in a directory; whoever comes second is told so, whatever the clocks say."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from checkpoint_helpers import alone, holds, names, save_alone, sharded, state, whole
from drawn import draw
from faults import EVERY, at_all, at_call, fails, kill

from hpc_train.checkpoint import CheckpointError, Saver, find_newest_verified, list_committed_steps
from hpc_train.checkpoint.storage.lock import Lock, LockOwner, describe_this_process, encode_lock, hold_lock, take_lock
from hpc_train.errors import UserError
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

BEAT = 0.05
FORK = multiprocessing.get_context("fork")


@contextmanager
def another_job(directory: Path) -> Iterator[int]:
    """A process that has the lock, until the end or until it is killed."""

    def hold(word: Connection) -> None:
        take_lock(directory, beat=BEAT)
        word.send(os.getpid())
        word.recv()

    mine, its = FORK.Pipe()
    process = FORK.Process(target=hold, args=(its,))
    process.start()
    try:
        yield mine.recv()
    finally:
        process.kill()
        process.join()


def elsewhere(directory: Path, **fields: str | int | None) -> Lock:
    """A lock as a process on another machine would have it; its heart does not beat yet."""
    take_lock(directory).release()
    owner = replace(describe_this_process({}), host="node7", machine="another boot", **fields)  # type: ignore[arg-type]
    lock = Lock(directory / "lock", owner, BEAT)
    lock.path.write_bytes(encode_lock(owner))
    return lock


def refusal(directory: Path, env: dict[str, str] | None = None) -> str:
    with pytest.raises(UserError) as error:
        take_lock(directory, env or {}, beat=BEAT)
    assert "\n" not in str(error.value)
    return str(error.value)


def is_free(directory: Path) -> bool:
    take_lock(directory, {}, beat=BEAT).release()
    return [name for name in names(directory) if "lock" in name] == []


def test_the_second_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with another_job(tmp_path) as process:
        assert f"process {process} on {os.uname().nodename} is writing checkpoints there" in refusal(tmp_path)
    assert is_free(tmp_path), "a process that was killed has no lock"


def test_the_same_process_is_a_second_one_too(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)
    assert str(tmp_path) in refusal(tmp_path)
    lock.release()
    assert is_free(tmp_path)


def test_a_process_id_that_is_another_process_now(tmp_path: Path) -> None:
    with another_job(tmp_path):
        text = (tmp_path / "lock").read_text()
        (tmp_path / "lock").write_text(text.replace('"started": "', '"started": "1'))
        assert is_free(tmp_path)


def test_a_requeued_job_takes_over_its_own_lock(tmp_path: Path) -> None:
    elsewhere(tmp_path, job="77", restarts=1)
    started = time.monotonic()
    take_lock(tmp_path, {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2"}, beat=1000).release()
    elsewhere(tmp_path, job="77", attempt=1)
    take_lock(tmp_path, {"SLURM_JOB_ID": "77", "HPC_TRAIN_ATTEMPT": "2"}, beat=1000).release()
    assert time.monotonic() - started < 500, "without looking for a heartbeat"


@pytest.mark.parametrize("job", ["77", "78", None])
def test_a_job_elsewhere_is_alive_while_its_heart_beats(tmp_path: Path, job: str | None) -> None:
    """Also another step of the same attempt of the same job."""
    lock = elsewhere(tmp_path, job=job, restarts=1, attempt=3)
    lock.start_beating()
    env = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1", "HPC_TRAIN_ATTEMPT": "3"}
    assert "on node7 is writing checkpoints there" in refusal(tmp_path, env)
    lock.release()
    assert is_free(tmp_path)


def test_a_job_elsewhere_whose_heart_does_not_beat_is_dead(tmp_path: Path) -> None:
    elsewhere(tmp_path, job="77")
    assert is_free(tmp_path)


@pytest.mark.parametrize("text", ["", "{", '{"host": 1}\n', "\0" * 300])
def test_a_lock_that_cannot_be_read_is_dead_if_nothing_changes_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    assert is_free(tmp_path)


@pytest.mark.parametrize("hours", [-1, 1])
def test_clocks_mean_nothing(tmp_path: Path, hours: int) -> None:
    """Times of files an hour off, or going back: neither the lock, nor which step is the newest, depends on them."""
    for step in (5, 9, 7):
        save_alone(tmp_path, step, state(step))
        at = time.time() + 3600 * hours * step
        for path in (tmp_path / f"step-{step}").rglob("*"):
            os.utime(path, (at, at))
        os.utime(tmp_path / f"step-{step}", (at, at))
    assert list_committed_steps(tmp_path) == [5, 9, 7]
    lock = elsewhere(tmp_path, job="77")
    lock.start_beating()
    os.utime(lock.path, (time.time() + 3600 * hours,) * 2)
    assert "is writing" in refusal(tmp_path)
    lock.release()


def contend(directory: Path, begin: Callable[[], object], word: Connection) -> None:
    begin()
    try:
        take_lock(directory, {}, beat=BEAT)
    except UserError:
        word.send(False)
    else:
        word.send(True)
        word.poll(60)


def test_of_many_at_once_one_gets_it(tmp_path: Path) -> None:
    for number in range(3):
        directory = tmp_path / str(number)
        directory.mkdir()
        if number:
            elsewhere(directory, job="77")  # stale: all of them find that out at about the same time
        barrier = FORK.Barrier(6)
        pipes = [FORK.Pipe() for _ in range(6)]
        processes = [FORK.Process(target=contend, args=(directory, barrier.wait, its)) for _, its in pipes]
        for process in processes:
            process.start()
        won = [mine.recv() for mine, _ in pipes]
        for process, (mine, _) in zip(processes, pipes, strict=True):
            mine.send("end")
            process.join()
        assert won.count(True) == 1, number


def test_who_lost_the_lock_commits_nothing(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, state(1))
    lock = take_lock(tmp_path)
    saver = Saver(tmp_path, alone(), lock=lock)
    saver.save(2, whole(state(2)), {})
    assert [saved.error for saved in saver.wait()] == [None]
    elsewhere_path = tmp_path / "lock"
    elsewhere_path.write_text(elsewhere_path.read_text().replace(lock.owner.token, "another"))
    saver.save(3, whole(state(3)), {})
    (saved,) = saver.wait()
    assert "no longer has the lock" in str(saved.error)
    lock.release()
    assert elsewhere_path.exists(), "it is another's now"
    assert find_newest_verified(tmp_path) == 2


def test_who_loses_it_in_the_middle_of_a_save_commits_nothing(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)

    def steal(call: str, args: tuple[int, ...]) -> None:
        lock.path.unlink(missing_ok=True)

    with at_call(1, steal, ("posix_fallocate",), tmp_path):
        saver = Saver(tmp_path, alone(), lock=lock)
        saver.save(3, whole(state(3)), {})
        (saved,) = saver.wait()
    lock.release()
    assert "it was removed" in str(saved.error)
    assert list_committed_steps(tmp_path) == []


class Sleeper(Lock):
    """A lock whose owner falls asleep right before a commit, after it has checked that it still has the lock."""

    asleep: Connection

    def check(self) -> None:
        super().check()
        if list(self.path.parent.glob("step-*.tmp-*/manifest.json")):
            self._stop.set()
            self.asleep.send("asleep")
            self.asleep.recv()


def sleep_before_commit(directory: Path, word: Connection) -> None:
    """Save a step as a process on another machine would, and send the outcome."""
    take_lock(directory).release()
    owner = replace(describe_this_process({}), host="node7", machine="another boot")
    lock = Sleeper(directory / "lock", owner, BEAT)
    lock.asleep = word
    lock.path.write_bytes(encode_lock(owner))
    lock.start_beating()
    saver = Saver(directory, alone(), lock=lock)
    saver.save(3, whole(state(3)), {})
    (saved,) = saver.wait()
    word.send(str(saved.error))
    lock.release()


@pytest.mark.parametrize("there", [False, True], ids=["a new step", "a step that is replaced"])
@pytest.mark.parametrize("again", [False, True], ids=["and nothing else", "and the newcomer saves the same step"])
def test_who_falls_asleep_between_look_and_commit_commits_nothing(tmp_path: Path, there: bool, again: bool) -> None:
    if there:
        save_alone(tmp_path, 3, state(33))
    mine, its = FORK.Pipe()
    process = FORK.Process(target=sleep_before_commit, args=(tmp_path, its))
    process.start()
    assert mine.recv() == "asleep"
    lock = take_lock(tmp_path, {}, beat=BEAT)
    seen = list_committed_steps(tmp_path)
    if again:
        saver = Saver(tmp_path, alone(), lock=lock)
        saver.save(3, whole(state(4)), {})
        assert [saved.error for saved in saver.wait()] == [None]
    mine.send("awake")
    assert mine.recv() != "None"
    process.join()
    lock.check()
    assert list_committed_steps(tmp_path) == ([3] if again else seen) == ([3] if again or there else [])
    assert not list_committed_steps(tmp_path) or holds(tmp_path, 3, state(4 if again else 33))
    lock.release()
    assert is_free(tmp_path)


def test_a_lock_that_changes_hands_while_it_is_given_back_is_left(tmp_path: Path) -> None:
    lock = take_lock(tmp_path)
    theirs = encode_lock(replace(lock.owner, token="another"))

    def steal(call: str, args: tuple[Path, ...]) -> None:
        beside = tmp_path / "theirs"
        beside.write_bytes(theirs)
        beside.replace(lock.path)

    with at_call(1, steal, ("rename", "unlink"), tmp_path):
        lock.release()
    assert lock.path.read_bytes() == theirs


def test_who_has_the_lock_removes_what_any_dead_job_left(tmp_path: Path) -> None:
    """Also what another machine left a moment ago."""
    (tmp_path / "step-9.tmp-elsewhere.1.ab" / "shards").mkdir(parents=True)
    save_alone(tmp_path, 1, state(1))
    assert len(names(tmp_path)) == 2, "without the lock it may be alive"
    lock = take_lock(tmp_path)
    saver = Saver(tmp_path, alone(), lock=lock)
    saver.save(2, whole(state(2)), {})
    saver.wait()
    assert names(tmp_path) == ["lock", "step-1", "step-2"]
    lock.release()


def test_without_hard_links(tmp_path: Path) -> None:
    with at_all(("link",), fails(errno.EPERM)) as made:
        lock = take_lock(tmp_path)
        assert made
        assert "is writing" in refusal(tmp_path)
        lock.release()
        assert is_free(tmp_path)


def test_a_link_that_was_made_although_the_server_says_it_was_there(tmp_path: Path) -> None:
    """A request that a network repeats: the second one fails because of the first."""
    real = os.link

    def repeated(call: str, args: tuple[Path, Path]) -> None:
        real(*args)

    with at_call(1, repeated, ("link",), tmp_path):
        lock = take_lock(tmp_path)
    assert "is writing" in refusal(tmp_path)
    lock.release()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_any_call_that_fails(tmp_path: Path, number: int) -> None:
    made, at = [""], 0
    while len(made) >= at:
        at += 1
        with at_call(at, fails(number), EVERY, tmp_path) as made, suppress(UserError, CheckpointError):
            take_lock(tmp_path, {}, beat=BEAT).release()
        if (tmp_path / "lock").exists():  # that it could not be removed, or not be seen to be ours
            (tmp_path / "lock").unlink()
        assert is_free(tmp_path)
    assert at > 5


@pytest.mark.parametrize("third", draw(range(3), [0]))
def test_killed_at_any_call(tmp_path: Path, third: int) -> None:
    def take_and_die(at: int, killer: int) -> None:
        with at_call(at, kill, EVERY, tmp_path):
            take_lock(tmp_path, {}, beat=BEAT).release()

    at, code = third - 2, -signal.SIGKILL
    while code == -signal.SIGKILL:
        at += 3
        process = FORK.Process(target=take_and_die, args=(at, 0))
        process.start()
        process.join()
        assert process.exitcode is not None
        code = process.exitcode
        take_lock(tmp_path, {}, beat=BEAT).release()
    assert at > 5
    assert not (tmp_path / "lock").exists()


def test_all_ranks_of_the_second_job_are_refused(tmp_path: Path) -> None:
    def second(world: World) -> str:
        with pytest.raises(UserError) as error, hold_lock(tmp_path, world):
            pass
        return str(error.value)

    with another_job(tmp_path):
        one, other = run_ranks(second, 2)
    assert one == other
    assert "is writing" in one

    def first(world: World) -> list[object]:
        with hold_lock(tmp_path, world) as lock:
            saver = Saver(tmp_path, world, lock=lock)
            saver.save(1, sharded(state(1), 0, world.rank, world.size), {})
            return [saved.error for saved in saver.wait()]

    assert run_ranks(first, 2) == [[None], [None]]
    assert holds(tmp_path, 1, state(1))
    assert not (tmp_path / "lock").exists()


def test_an_owner_is_told_in_words() -> None:
    owner = LockOwner("node7", "boot", 12, "99", "77", 2, 5, "ab")
    assert str(owner) == "Slurm job 77, process 12 on node7"
