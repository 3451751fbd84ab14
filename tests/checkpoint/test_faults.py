"""Whatever happens to a writer, the newest committed step loads bit for bit, and it is the old one or the new one."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from checkpoint_helpers import alone, holds, names, save_alone, sharded, state, whole
from faults import CALLS, at_call, disk_full, kill

from hpc_train.api import Piece, World
from hpc_train.checkpoint import CheckpointError, newest, save
from hpc_train.testing import RankFailure, run_ranks

OLD, NEW = state(1), state(2)


def save_new(world: World, directory: Path, step: int, number: int = 0, rank: int = 0) -> tuple[str, list[str]]:
    """Save NEW, with a full disk at the given call of the given rank; returns the error and the calls made."""
    pieces = sharded(NEW, 0, world.rank, world.size)
    with at_call(number if rank == world.rank else 0, disk_full) as made:
        try:
            save(directory, step, pieces, {}, world).wait()
        except CheckpointError as error:
            return str(error), made
    return "", made


def save_and_die(world: World, directory: Path, step: int, number: int, rank: int) -> None:
    with at_call(number if rank == world.rank else 0, kill):
        save(directory, step, sharded(NEW, 0, world.rank, world.size), {}, world).wait()


def holding_old(directory: Path) -> Path:
    save_alone(directory, 1, OLD)
    return directory


def every_call(calls: list[list[str]]) -> list[tuple[int, int]]:
    """(rank, number from 1) of each call that each rank makes."""
    return [(rank, number + 1) for rank, made in enumerate(calls) for number in range(len(made))]


def calls_of_a_save(directory: Path, ranks: int, step: int) -> list[list[str]]:
    return [made for _, made in run_ranks(save_new, ranks, holding_old(directory), step)]


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "the same step again"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_any_call(tmp_path: Path, ranks: int, step: int) -> None:
    calls = calls_of_a_save(tmp_path / "trial", ranks, step)
    assert set(calls[0]) == set(CALLS)
    outcomes = []
    for rank, number in every_call(calls):
        directory = holding_old(tmp_path / f"{rank}-{number}")
        with pytest.raises(RankFailure, match=r"died without a word|gloo"):
            run_ranks(save_and_die, ranks, directory, step, number, rank)
        outcomes.append(old_or_new(directory, step))
        still_usable(directory)
    assert set(outcomes) == {"old", "new"}


def old_or_new(directory: Path, step: int) -> str:
    found = newest(directory)
    if found == step and holds(directory, step, NEW):
        return "new"
    assert found == 1
    assert holds(directory, 1, OLD)
    return "old"


def still_usable(directory: Path) -> None:
    """The next save commits, and takes away what the dead one left."""
    save_alone(directory, 3, NEW)
    assert newest(directory) == 3
    assert [name for name in names(directory) if "tmp" in name or "trash" in name] == []


@pytest.mark.parametrize("step", [2, 1], ids=["next step", "the same step again"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_call_that_fails_on_one_rank_fails_the_save_on_all(tmp_path: Path, ranks: int, step: int) -> None:
    calls = calls_of_a_save(tmp_path / "trial", ranks, step)
    places = {place: holding_old(tmp_path / "{}-{}".format(*place)) for place in every_call(calls)}

    def save_everywhere(world: World) -> list[str]:
        return [save_new(world, place, step, number, rank)[0] for (rank, number), place in places.items()]

    of_first, *of_others = run_ranks(save_everywhere, ranks)
    assert all(errors == of_first for errors in of_others), "all ranks agree"
    for error, directory in zip(of_first, places.values(), strict=True):
        assert old_or_new(directory, step) == ("old" if error else "new")
        if error:
            assert "No space left on device" in error
            assert "\n" not in error
            assert names(directory) == ["step-1"]
    assert sum(bool(error) for error in of_first) >= 4 * ranks + 4


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
    files = ["000000.h5", "000000.h5.digests", "manifest.json"]
    assert done == [parent, *files, "000", "shards", "step", "rename to step-1", "checkpoints"]


def test_a_file_system_that_really_refuses_the_data(tmp_path: Path) -> None:
    """A limit on the size of files, met by rank 1 only, in the middle of its file."""
    holding_old(tmp_path)

    def save_large(world: World) -> str:
        if world.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        rows = torch.ones(100, 1000)
        pieces = [Piece(f"w{n}", (200, 1000), rows.dtype, (100 * world.rank, 0), rows) for n in range(3)]
        with pytest.raises(CheckpointError) as error:
            save(tmp_path, 2, pieces, {}, world).wait()
        return str(error.value)

    first, second = run_ranks(save_large, 2)
    assert first == second == f"checkpoint step 2 was not saved in {tmp_path}: rank 1: [Errno 27] File too large"
    assert names(tmp_path) == ["step-1"]
    assert holds(tmp_path, 1, OLD)


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="was not saved"):
        save(tmp_path / "file" / "checkpoints", 1, whole(OLD), {}, alone()).wait()


def test_an_error_of_the_training_code_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    def save_nonsense(world: World) -> str:
        pieces = (Piece(f"w{n}", (n,), torch.float32, (0,), torch.ones(n // (1 - world.rank))) for n in (1, 2))
        with pytest.raises(CheckpointError) as error:
            save(tmp_path, 1, pieces, {}, world).wait()
        return str(error.value)

    first, second = run_ranks(save_nonsense, 2)
    assert first == second
    assert "rank 1: ZeroDivisionError" in first
    assert names(tmp_path) == []
