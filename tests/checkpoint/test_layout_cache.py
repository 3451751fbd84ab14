"""Cached file layouts: sent and encoded once, and never a wrong manifest after a failed save."""

from __future__ import annotations

import errno
from pathlib import Path
from unittest.mock import patch

import torch
from checkpoint_helpers import State, holds, random_bits, sharded, state, whole
from faults import at_all, fails

from hpc_train.checkpoint import Saver, list_committed_steps, verify_step
from hpc_train.checkpoint.format.hdf5_index import find_index_problem
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow
from hpc_train.checkpoint.format.manifest import ShardFile, read_manifest
from hpc_train.checkpoint.format.shard_layout import FileLayout
from hpc_train.checkpoint.save.layout_cache import FileUpdates, LayoutCache
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

MORE: State = {"more": random_bits((40, 40), torch.float64, 5)}
WITH_MORE = {3: 1, 4: 1, 5: 1, 8: 0}
"""Step -> the rank that has one tensor more."""
FAILS = {5: 1, 7: 0}


def saves(world: World, directory: Path) -> list[tuple[bool, bool]]:
    """Steps 1 to 9; of each, whether it was committed, and whether this rank told what it holds."""
    saver, told = Saver(directory, world), []
    tell = LayoutCache.omit_unchanged

    def recorded(known: LayoutCache, files: FileUpdates) -> FileUpdates:
        said = tell(known, files)
        told.append(said[0][1] is not None)
        return said

    def pieces(step: int) -> list[TensorShard]:
        mine = sharded(state(step), 0, world.rank, world.size)
        return mine + (whole(MORE) if WITH_MORE.get(step) == world.rank else [])

    ended = []
    with patch.object(LayoutCache, "omit_unchanged", recorded):
        for step in range(1, 10):
            calls = ("fsync",) if FAILS.get(step) == world.rank else ()
            with at_all(calls, fails(errno.EIO)):
                saver.save(step, pieces(step), {"n": step})
                ended += [it.error is None for it in saver.wait()]
            told += [False] * (len(ended) - len(told))  # it failed before there was anything to tell
    return list(zip(ended, told, strict=True))


def test_two_ranks_whose_layouts_change_and_whose_saves_fail(tmp_path: Path) -> None:
    first, second = run_ranks(saves, 2, tmp_path)
    good = [step not in FAILS for step in range(1, 10)]
    assert [ended for ended, _ in first] == [ended for ended, _ in second] == good
    assert list_committed_steps(tmp_path) == [1, 2, 3, 4, 6, 8, 9]
    for step in list_committed_steps(tmp_path):
        assert verify_step(tmp_path, step) == []
        assert holds(tmp_path, step, state(step) | (MORE if step in WITH_MORE else {}))
        assert find_index_problem(tmp_path / f"step-{step}", read_manifest(tmp_path / f"step-{step}", step)) is None
    news = [[step for step, (_, told) in enumerate(rank, 1) if told] for rank in (first, second)]
    assert news[1] == [1, 3, 6, 8], "at first, when it is new, and after a failure"
    assert 2 not in news[0]
    assert {1, 6, 8, 9} <= set(news[0])


def one(number: int) -> tuple[tuple[ShardFile, FileLayout], ...]:
    row = DatasetRow("w", (number,), torch.float32, (0,), (number,))
    return ((ShardFile(f"{number}.h5", 4 * number, "none"), FileLayout((row,), (0,))),)


def test_what_did_not_come_to_an_end_counts_as_never_told() -> None:
    """Also where it was committed and this rank has not heard of it."""
    rank, first, files, said = LayoutCache(), LayoutCache(), one(3), []
    for committed_there, heard_of_it in ((True, False), (False, False), (True, True), (True, False), (True, True)):
        told = rank.omit_unchanged(files)
        said.append(told[0][1] is not None)
        assert [held for _, held in first.restore_unchanged([told])] == [files[0][1]]
        if committed_there:
            first.confirm_received()
        if heard_of_it:
            rank.confirm_sent()
    assert said == [True, True, True, False, True]


def test_several_files_of_a_rank_are_always_told() -> None:
    rank, first = LayoutCache(), LayoutCache()
    for files in (one(3), one(3) + one(4), one(4), ()):
        told = rank.omit_unchanged(files)
        assert [held for _, held in first.restore_unchanged([told])] == [held for _, held in files]
        first.confirm_received()
        rank.confirm_sent()
