"""What several ranks want is read once: bytes are counted, at the system call, over all ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from checkpoint_helpers import State, alone, blank, random_bits, same_pieces, sharded, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.checkpoint import CheckpointError, load_step, save_step
from hpc_train.checkpoint.load import exchange as exchanging
from hpc_train.checkpoint.load.exchange import EXCHANGE_BYTES, CellDemand, plan_rounds
from hpc_train.checkpoint.load.read_schedule import CELL_BYTES
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

TENSORS, SHAPE = 6, (1024, 512)
BYTES = TENSORS * 1024 * 512 * 4


@functools.cache
def large(seed: int = 0) -> State:
    return {f"blocks.{i}.weight": random_bits(SHAPE, torch.float32, seed + i) for i in range(TENSORS)}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of every read of a file at a place, by any thread."""
    made: list[int] = []
    real = os.preadv

    def preadv(*args: Any) -> int:
        count = real(*args)
        made.append(count)
        return count

    with patch.object(os, "preadv", preadv):
        yield made


def save_by(world: World, directory: Path, dim: int | None) -> None:
    save_step(directory, 1, pieces(world, dim), {}, world).wait()


def pieces(world: World, dim: int | None) -> list[TensorShard]:
    """Cut along a dimension, or whole on every rank."""
    if dim is not None:
        return sharded(large(), dim, world.rank, world.size)
    return [TensorShard(p.name, p.shape, p.dtype, p.offset, p.local, replica=world.rank) for p in whole(large())]


def read_by(world: World, directory: Path, dim: int | None) -> tuple[bool, int]:
    """(whether all bits are right, bytes that this rank read)."""
    expected = pieces(world, dim)
    loaded = blank(expected)
    with counted() as made:
        load_step(directory, 1, loaded, world)
    return same_pieces(loaded, expected), sum(made)


def amplification(answers: Sequence[tuple[bool, int]]) -> tuple[float, float]:
    """(bytes read by all ranks over those of the checkpoint, the largest rank's share of them)."""
    assert all(right for right, _ in answers)
    total = sum(count for _, count in answers)
    return total / BYTES, max(count for _, count in answers) / total


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The same state saved by rows, by number of ranks."""
    found = {ranks: tmp_path_factory.mktemp(f"by_{ranks}") for ranks in (1, 3)}
    for ranks, directory in found.items():
        run_ranks(save_by, ranks, directory, 0)
    return found


CUTS = {"rows": 0, "columns": 1, "copies": None}


@pytest.mark.parametrize("loaders", [1, 2, 4])
def test_all_ranks_together_read_the_checkpoint_once(saved: dict[int, Path], loaders: int) -> None:
    """Checkpoints of one rank and of three ranks, saved by rows, by columns, and whole on every rank."""

    def read_all(world: World) -> list[tuple[bool, int]]:
        return [read_by(world, directory, dim) for directory in saved.values() for dim in CUTS.values()]

    for answers in zip(*run_ranks(read_all, loaders), strict=True):
        times, share = amplification(answers)
        assert times <= 1.05
        assert share <= 1.5 / loaders


def test_columns_that_one_rank_alone_wants_cost_the_blocks_that_they_are_in(tmp_path: Path) -> None:
    tensor = random_bits((64, 1 << 18), torch.float32)  # a row is a mebibyte, eight blocks
    save_step(tmp_path, 1, whole({"w": tensor}), {}, alone()).wait()
    wanted = [TensorShard("w", (64, 1 << 18), torch.float32, (0, 100), torch.zeros(64, 1000))]
    with counted() as made:
        load_step(tmp_path, 1, wanted, alone())
    assert torch.equal(wanted[0].local.view(torch.int32), tensor[:, 100:1100].view(torch.int32))
    assert sum(made) <= 65 * (128 << 10)


def test_rounds_of_little_memory_pass_on_the_same(saved: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanging, "EXCHANGE_BYTES", 1 << 20)  # less than a cell: rounds of a few
    for dim in (1, None):
        times, _ = amplification(run_ranks(read_by, 3, saved[3], dim))
        assert times <= 1.05


def test_ranks_that_want_different_parts_of_the_same(tmp_path: Path) -> None:
    """Some whole, some a column, some nothing at all, one of them twice."""
    state = large(7)
    save_step(tmp_path, 1, whole(state), {}, alone()).wait()

    def read(world: World) -> bool:
        wanted = [whole(state), sharded(state, 1, 2, 5), [], [*whole(state)[:2], *whole(state)[:1]]][world.rank]
        loaded = blank(wanted)
        load_step(tmp_path, 1, loaded, world)
        return same_pieces(loaded, wanted)

    assert run_ranks(read, 4) == [True] * 4


def test_memory_that_is_not_contiguous_is_filled_by_others_too(tmp_path: Path) -> None:
    tensor = random_bits((512, 256), torch.float64)
    save_step(tmp_path, 1, whole({"w": tensor}), {}, alone()).wait()

    def read(world: World) -> bool:
        turned = torch.zeros(256, 512, dtype=torch.float64).t()
        load_step(tmp_path, 1, [TensorShard("w", (512, 256), tensor.dtype, (0, 0), turned)], world)
        return torch.equal(turned.contiguous().view(torch.int64), tensor.view(torch.int64))

    assert run_ranks(read, 2) == [True, True]


@pytest.mark.parametrize("at", [0.02, 0.5, 0.98])
def test_damage_that_one_rank_reads_for_all_is_heard_of_by_all(
    tmp_path: Path, at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "EXCHANGE_BYTES", 1 << 20)
    save_step(tmp_path, 1, whole(large()), {}, alone()).wait()
    shard = tmp_path / "step-1" / "shards/000/000000.h5"
    with shard.open("r+b") as file:
        where = int(shard.stat().st_size * at)
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 4]))

    def read(world: World) -> str:
        with pytest.raises(CheckpointError) as error:
            load_step(tmp_path, 1, blank(pieces(world, None)), world)
        return str(error.value)

    answers = run_ranks(read, 3)
    assert len(set(answers)) == 1
    assert "shards/000/000000.h5" in answers[0]
    assert f"block at byte {where // (128 << 10) * (128 << 10)}" in answers[0]


@st.composite
def demands(draw: st.DrawFn) -> tuple[CellDemand, int]:
    """What some ranks want of some cells: anything from a byte to all of it."""
    ranks, cells = draw(st.integers(2, 50)), draw(st.integers(1, 200))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    each = random.integers(0, CELL_BYTES + 1, (ranks, cells)) * random.integers(0, 2, (ranks, cells))
    wanted = random.integers(1, 1 << 32, cells)
    reads = random.integers(0, 32 * ranks, cells)
    return CellDemand(np.zeros(1, dtype=np.int64), wanted, reads, each.sum(axis=0), each.max(axis=0)), ranks


@given(demands())
@settings(max_examples=100)
def test_rounds_have_every_shared_cell_once_and_little_memory(case: tuple[CellDemand, int]) -> None:
    demand, ranks = case
    rounds = plan_rounds(demand, ranks)
    cells = np.concatenate([np.zeros(0, dtype=np.int64), *(it.cells for it in rounds)])
    assert cells.tolist() == np.flatnonzero(demand.shared).tolist()
    for it in rounds:
        assert (np.diff(it.owners) >= 0).all()
        assert 0 <= it.owners.min() <= it.owners.max() < ranks
        assert len(it.cells) == 1 or demand.largest[it.cells].sum() <= EXCHANGE_BYTES
        assert len(it.cells) == 1 or demand.copied[it.cells].sum() <= EXCHANGE_BYTES * ranks
        if len(it.cells) >= ranks:
            assert len(set(it.owners.tolist())) > ranks / 3
