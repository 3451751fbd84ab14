"""Which rank writes which file and when, computed for any number of ranks without processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from checkpoint_helpers import names
from faults import at_call

from hpc_train.checkpoint.format.block_digests import DIGESTS_SUFFIX
from hpc_train.checkpoint.save.commit_step import prepare_directory
from hpc_train.checkpoint.save.writer_group import WriterGroup, assign_turns, group_ranks_by_file
from hpc_train.checkpoint.storage.checkpoint_directory import CheckpointDirectory
from hpc_train.checkpoint.storage.step_directory import list_shard_folders, shard_file_name
from hpc_train.cli.checkpoint.inspect import count_writers

RANKS = 10_000
NODES = [rank // 8 for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("nodes", "ranks_per_file", "files"),
    [
        ([0, 0, 0, 0], 1, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([0, 0, 0, 0], 3, [(0, 3), (3, 4)]),
        ([0, 0, 0, 0], 9, [(0, 4)]),
        ([0, 0, 0, 1, 1, 2], 0, [(0, 3), (3, 5), (5, 6)]),
        ([0, 0, 0, 1, 1, 2], 2, [(0, 2), (2, 3), (3, 5), (5, 6)]),
        ([0, 1, 1, 0, 0, 1], 0, [(0, 1), (1, 3), (3, 5), (5, 6)]),
    ],
)
def test_a_file_is_that_of_ranks_that_follow_one_another_on_a_node(
    nodes: list[int], ranks_per_file: int, files: list[tuple[int, int]]
) -> None:
    assert group_ranks_by_file(nodes, ranks_per_file) == tuple(range(*ends) for ends in files)


@pytest.mark.parametrize("ranks_per_file", [1, 3, 8, 0])
def test_ten_thousand_ranks_never_meet_in_one_folder(tmp_path: Path, ranks_per_file: int) -> None:
    """Shard files with their tables of digests; and the folders for them take one mkdir each."""
    files = group_ranks_by_file(NODES, ranks_per_file)
    assert [rank for ranks in files for rank in ranks] == list(range(RANKS))
    made = [shard_file_name(number, ranks) for number, ranks in enumerate(files)]
    assert len(set(made)) == len(files) == {1: 10_000, 3: 3750, 8: 1250, 0: 1250}[ranks_per_file]
    assert [count_writers(name) for name in made] == [len(ranks) for ranks in files]
    entries = Counter(str(Path(name).parent) for file in made for name in (file, file + DIGESTS_SUFFIX))
    assert max(entries.values()) <= 128
    assert sorted(entries) == list_shard_folders(len(files))

    needs = WriterGroup(files, 0).sum_by_file([1] * RANKS)
    assert needs == [len(ranks) for ranks in files]
    with at_call(0, lambda call, args: None) as calls:
        token, _ = prepare_directory(tmp_path / "step-1", needs, CheckpointDirectory())
    assert calls.count("mkdir") == len(entries) + 3, "and those of checkpoints, which is there, the step and shards/"
    assert len(calls) < len(entries) + 20
    assert names(tmp_path / f"step-1.tmp-{token}" / "shards") == [Path(folder).name for folder in sorted(entries)]


@pytest.mark.parametrize("writers", [0, 1, 3, 8, 20])
def test_ranks_of_a_node_take_turns(writers: int) -> None:
    """Every rank has one before it that knows of it, and the longest row is no longer than it must be."""
    nodes = [0] * 8 + [1] * 5 + [0] * 2
    turns = [assign_turns(rank, nodes, writers) for rank in range(len(nodes))]
    for rank, turn in enumerate(turns):
        for before, after in ((turn.before, rank), (rank, turn.after)):
            if before is not None and after is not None:
                assert (turns[before].after, turns[after].before) == (after, before)
                assert nodes[before] == nodes[after]
                assert before < after
    first = Counter(nodes[rank] for rank, turn in enumerate(turns) if turn.before is None)
    assert first == {node: min(writers or 99, nodes.count(node)) for node in (0, 1)}
