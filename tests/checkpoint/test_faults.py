"""Whatever happens to a writer, the newest committed step loads bit for bit, and it is the old one or the new one."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from checkpoint_helpers import alone, holds, names, random_bits, save_alone, sharded, state, whole
from drawn import draw, draw_thirds
from faults import CALLS, EVERY, Fault, at_all, at_call, disk_full, fails, is_killed, kill, short, torn

from hpc_train.checkpoint import CheckpointError, Saver, find_newest_verified, save_step
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import RankFailure, run_ranks

OLD, NEW = state(1), state(2)
ERRORS = {
    **{name: fails(getattr(errno, name)) for name in ("ENOSPC", "EDQUOT", "EIO", "ESTALE", "EROFS", "ENOTCONN")},
    "torn write": torn,
}
STEPS = (2, 1)
"""The step that is saved beside OLD: the next one, or the same one again."""


def save_new(
    world: World, directory: Path, step: int, number: int = 0, rank: int = 0, fault: Fault = disk_full
) -> tuple[str, list[str]]:
    """Save NEW, with a fault at the given call of the given rank; returns the error and the calls made."""
    pieces = sharded(NEW, 0, world.rank, world.size)
    with at_call(number if rank == world.rank else 0, fault, EVERY, directory) as made:
        try:
            save_step(directory, step, pieces, {}, world).wait()
        except CheckpointError as error:
            return str(error), made
    return "", made


def save_and_die(world: World, directory: Path, step: int, number: int, rank: int) -> None:
    with at_call(number if rank == world.rank else 0, kill, EVERY, directory):
        save_step(directory, step, sharded(NEW, 0, world.rank, world.size), {}, world).wait()


def holding_old(directory: Path) -> Path:
    """A directory of checkpoints with OLD as step 1; the first one beside it is saved, the others are its copies."""
    first = directory.with_name("old")
    if not first.exists():
        save_alone(first, 1, OLD)
    shutil.copytree(first, directory, dirs_exist_ok=True)
    return directory


def every_call(calls: list[list[str]]) -> list[tuple[int, int]]:
    """(rank, number from 1) of each call that each rank makes."""
    return [(rank, number + 1) for rank, made in enumerate(calls) for number in range(len(made))]


def calls_of_a_save(directory: Path, ranks: int, step: int) -> list[list[str]]:
    calls = [made for _, made in run_ranks(save_new, ranks, holding_old(directory), step)]
    assert {call for made in calls for call in made} >= {*CALLS, "scandir", "io.open", "stat"}
    return calls


@pytest.mark.parametrize(("step", "third"), draw_thirds(STEPS))
def test_killed_at_any_call_alone(tmp_path: Path, step: int, third: int) -> None:
    outcomes, number, killed = [], third - 2, True
    while killed:
        number += 3
        directory = holding_old(tmp_path / str(number))
        killed = is_killed(lambda at=number, where=directory: save_and_die(alone(), where, step, at, 0))  # type: ignore[misc]
        outcomes.append(old_or_new(directory, step))
        still_usable(directory)
    assert set(outcomes) == {"old", "new"}
    assert number > 25


@pytest.mark.parametrize(("step", "third"), draw_thirds(STEPS))
def test_killed_at_any_call_of_two(tmp_path: Path, step: int, third: int) -> None:
    """All calls of rank 1, every other one of rank 0 (all of them: above); some where the step is replaced."""
    calls = calls_of_a_save(tmp_path / "trial", 2, step)
    places = [(rank, number) for rank, number in every_call(calls) if rank == 1 or number % 2]
    places = places if step == 2 else random.Random(str(calls)).sample(places, 8)
    outcomes = []
    for rank, number in places[third::3]:
        directory = holding_old(tmp_path / f"{rank}-{number}")
        with pytest.raises(RankFailure, match=r"died without a word|gone, or did not come"):
            run_ranks(save_and_die, 2, directory, step, number, rank)
        outcomes.append(old_or_new(directory, step))
        still_usable(directory)
    assert set(outcomes) >= {"old"}


def old_or_new(directory: Path, step: int) -> str:
    found = find_newest_verified(directory)
    if found == step and holds(directory, step, NEW):
        return "new"
    assert found == 1
    assert holds(directory, 1, OLD)
    return "old"


def still_usable(directory: Path) -> None:
    """The next save commits, and takes away what the dead one left."""
    save_alone(directory, 3, NEW)
    assert find_newest_verified(directory) == 3
    assert [name for name in names(directory) if ".tmp-" in name or ".trash-" in name] == []


@pytest.mark.parametrize(("kind", "third"), draw_thirds(["ENOSPC", "EIO", "torn write"]))
def test_any_call_that_fails_alone(tmp_path: Path, kind: str, third: int) -> None:
    step, every = {"ENOSPC": (2, 1), "EIO": (1, 1), "torn write": (1, 2)}[kind]
    fails_alone(tmp_path, kind, step, 1 + third * every, 3 * every)


@pytest.mark.parametrize(("number", "kind"), [(1, "EDQUOT"), (2, "ESTALE"), (3, "EROFS"), (4, "ENOTCONN")])
def test_some_calls_that_fail_alone(tmp_path: Path, number: int, kind: str) -> None:
    """Of each kind other calls, together all: what is done about an error does not depend on its number."""
    fails_alone(tmp_path, kind, 1 + number % 2, number, 4)


def fails_alone(tmp_path: Path, kind: str, step: int, number: int, every: int) -> None:
    outcomes, made = [], ["more"] * 1000
    number -= every
    while len(made) >= number:
        number += every
        directory = holding_old(tmp_path / str(number))
        error, made = save_new(alone(), directory, step, number, fault=ERRORS[kind])
        outcomes.append(old_or_new(directory, step))
        assert (outcomes[-1] == "new") == (error == ""), (number, made[number - 1], error)
        assert "\n" not in error
        still_usable(directory)
    assert set(outcomes) == {"old", "new"}


@pytest.mark.parametrize("kind", ["EIO", "EROFS"])
def test_a_file_system_that_fails_from_some_call_on_and_recovers(tmp_path: Path, kind: str) -> None:
    """An evicted Lustre client, or a file system that was mounted anew for reading only."""
    numbers = range(1, len(calls_of_a_save(tmp_path / "trial", 1, 1)[0]), 3)
    for step, number in ((1 + number % 2, number) for number in numbers):
        directory = holding_old(tmp_path / str(number))
        with at_call(number, ERRORS[kind], EVERY, directory, lasting=True), suppress(CheckpointError):
            save_step(directory, step, whole(NEW), {}, alone()).wait()
        old_or_new(directory, step)
        still_usable(directory)


@pytest.mark.parametrize(("step", "third"), draw_thirds(STEPS))
def test_a_call_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path, step: int, third: int) -> None:
    kind = {2: "ENOSPC", 1: "EIO"}[step]
    calls = calls_of_a_save(tmp_path / "trial", 2, step)
    some = [(rank, number) for rank, number in every_call(calls) if rank == 1 or number % 2 == step % 2]
    places = {place: holding_old(tmp_path / "{}-{}".format(*place)) for place in some[third::3]}

    def save_everywhere(world: World) -> list[str]:
        return [save_new(world, at, step, number, rank, ERRORS[kind])[0] for (rank, number), at in places.items()]

    of_first, of_other = run_ranks(save_everywhere, 2)
    assert of_first == of_other, "all ranks agree"
    for error, directory in zip(of_first, places.values(), strict=True):
        assert old_or_new(directory, step) == ("old" if error else "new")
        assert "\n" not in error
        still_usable(directory)
    assert sum(os.strerror(getattr(errno, kind)) in error for error in of_first) >= 5


@pytest.mark.parametrize("fault", [disk_full, fails(errno.EIO), torn], ids=["ENOSPC", "EIO", "torn"])
def test_any_call_that_fails_in_the_background(tmp_path: Path, fault: Fault) -> None:
    number, made = 0, [""]
    while len(made) >= number:
        number += 3
        directory = holding_old(tmp_path / str(number))
        saver = Saver(directory, alone())
        with at_call(number, fault, EVERY, directory) as made:
            saver.save(2, whole(NEW), {})
            (saved,) = saver.wait()
        assert old_or_new(directory, 2) == ("old" if saved.error else "new")
        saver.save(3, whole(NEW), {})
        assert [it.error for it in saver.wait()] == [None]
        assert holds(directory, 3, NEW)


@pytest.mark.parametrize("third", draw(range(3), [0]))
def test_a_larger_state_at_random_calls(tmp_path: Path, third: int) -> None:
    """Several writes are under way at once; which calls and faults is drawn from the number of calls there are."""
    large = {f"w{n}": random_bits((1250, 4000), torch.float32, n) for n in range(2)}
    with at_call(0, disk_full, EVERY, tmp_path) as made:
        save_alone(tmp_path, 1, large)
    drawn = random.Random(3 * len(made) + third)
    for _ in range(3):
        number, (kind, fault) = drawn.randint(1, len(made)), drawn.choice(list(ERRORS.items()))
        changed = {name: tensor + 1 for name, tensor in large.items()}
        with at_call(number, fault, EVERY, tmp_path):
            outcome = save_error(tmp_path, 2, changed)
        newest_state = (changed, 2) if outcome == "" else (large, 1)
        assert holds(tmp_path, newest_state[1], newest_state[0]), (number, kind, outcome)
        large, step = (changed, 1) if outcome == "" else (large, 1)
        save_alone(tmp_path, step, large)


def save_error(directory: Path, step: int, tensors: dict[str, torch.Tensor]) -> str:
    try:
        save_alone(directory, step, tensors)
    except CheckpointError as error:
        return str(error)
    return ""


def test_an_error_of_fsync_alone_is_an_error(tmp_path: Path) -> None:
    """The kernel may have dropped the pages: another fsync would succeed and mean nothing, so there is no second."""
    save_alone(tmp_path, 1, OLD)
    with at_call(1, fails(errno.EIO), ("fsync",), tmp_path) as made:
        assert "Input/output error" in save_error(tmp_path, 2, NEW)
    assert made == ["fsync"]
    assert names(tmp_path) == ["step-1"]


def test_writes_and_reads_that_do_less_than_they_are_asked_for(tmp_path: Path) -> None:
    with at_all(("pwrite", "preadv"), short) as made:
        save_alone(tmp_path, 1, OLD)
        assert holds(tmp_path, 1, OLD)
    assert {"pwrite", "preadv"} <= set(made)
    assert find_newest_verified(tmp_path) == 1


def test_a_disk_that_takes_nothing_and_says_no_error(tmp_path: Path) -> None:
    with at_all(("pwrite",), lambda call, args: (args[0], b"", *args[2:])):
        assert "takes no more bytes" in save_error(tmp_path, 1, OLD)


def test_signals_at_every_moment_interrupt_nothing(tmp_path: Path) -> None:
    """Real ones, every half millisecond: system calls end early with EINTR."""
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: heard.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        large = {"w": random_bits((1250, 4000), torch.float32)}
        for step in range(3):
            save_alone(tmp_path, step, large)
            assert holds(tmp_path, step, large)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(heard) > 10


def refuse_direct_open(call: str, args: tuple[object, ...]) -> None:
    if isinstance(args[1], int) and args[1] & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def refuse_direct_write(call: str, args: tuple[int, ...]) -> None:
    if is_direct(args[0]):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()
    return bool(int(flags[flags.index("flags:") + 1], 8) & os.O_DIRECT)


REFUSALS: dict[str, tuple[tuple[str, ...], Fault]] = {
    "O_DIRECT at open": (("open",), refuse_direct_open),
    "O_DIRECT at the first write": (("pwrite", "preadv"), refuse_direct_write),
    "O_DIRECT does a part, unaligned": (("pwrite", "preadv"), short),
    "fallocate": (("posix_fallocate",), fails(errno.EOPNOTSUPP)),
    "fsync of a directory": (
        ("fsync",),
        lambda call, args: None if Path(f"/proc/self/fd/{args[0]}").is_file() else fails(errno.EINVAL)(call, args),
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_a_file_system_may_refuse_is_done_without(tmp_path: Path, refusal: str) -> None:
    calls, fault = REFUSALS[refusal]
    large = {"w": random_bits((1250, 4001), torch.float32), **NEW}
    with at_all(calls, fault):
        save_alone(tmp_path, 1, large)
        assert holds(tmp_path, 1, large)
    assert find_newest_verified(tmp_path) == 1


def test_everything_is_on_the_disk_before_its_name_is(tmp_path: Path) -> None:
    """A power cut loses what was not synchronised, in any order: files and directory come before the rename."""
    done: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition("-")[0])

    def rename(source: Path, target: Path) -> None:
        real_rename(source, target)
        done.append(f"rename to {target.name}")

    with patch.multiple(os, fsync=fsync, rename=rename):
        save_alone(tmp_path / "checkpoints", 1, OLD)
    parent = tmp_path.name.partition("-")[0]
    assert done[0] == parent
    assert sorted(done[1:3]) == ["000000.h5", "000000.h5.digests"]
    assert sorted(done[3:7]) == ["000", "index.h5", "manifest.json", "shards"]
    assert done[7:] == ["step", "rename to step-1", "checkpoints"]


def test_a_file_system_that_really_refuses_the_data(tmp_path: Path) -> None:
    """A limit on the size of files, met by rank 1 only, in the middle of its file."""
    save_alone(tmp_path, 1, OLD)

    def save_large(world: World) -> str:
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        rows = torch.ones(100, 1000)
        pieces = [TensorShard(f"w{n}", (200, 1000), rows.dtype, (100 * world.rank, 0), rows) for n in range(3)]
        with pytest.raises(CheckpointError) as error:
            save_step(tmp_path, 2, pieces, {}, world).wait()
        return str(error.value)

    first, second = run_ranks(save_large, 2)
    assert first == second == f"checkpoint step 2 was not saved in {tmp_path}: rank 1: [Errno 27] File too large"
    assert names(tmp_path) == ["step-1"]
    assert holds(tmp_path, 1, OLD)


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not saved"):
        save_step(tmp_path / "file" / "checkpoints", 1, whole(OLD), {}, alone()).wait()


def test_an_error_of_the_training_code_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    def save_nonsense(world: World) -> str:
        pieces = (TensorShard(f"w{n}", (n,), torch.float32, (0,), torch.ones(n // (1 - world.rank))) for n in (1, 2))
        with pytest.raises(CheckpointError) as error:
            save_step(tmp_path, 1, pieces, {}, world).wait()
        return str(error.value)

    first, second = run_ranks(save_nonsense, 2)
    assert first == second
    assert "rank 1: ZeroDivisionError" in first
    assert names(tmp_path) == []
