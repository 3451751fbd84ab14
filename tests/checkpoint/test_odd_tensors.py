"""Tensors that are odd in any way: shared, empty, scalar, strided, very many, of any name."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from checkpoint_helpers import State, alone, blank, holds, random_bits, same_pieces, save_alone, sharded, whole
from faults import is_killed

from hpc_train.checkpoint import load_step, save_step, verify_step
from hpc_train.checkpoint.format import hdf5_layout
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES
from hpc_train.checkpoint.save.save_step import StepWriter, stage_step
from hpc_train.checkpoint.save.shard_file import ShardStager
from hpc_train.checkpoint.save.shared_file import make_shared_head
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

NAMES = ("ünïcödé.重み.вес", "emoji 🔥.weight", "a" * 3000, "deep." * 400 + "w", "with/slash", "..", "  ", "%2F", "w@1")


def test_two_names_of_one_storage(tmp_path: Path) -> None:
    """Tied weights: each name has the values, and a load may tie them or not."""
    shared = random_bits((6, 4), torch.float32)
    tied: State = {"embed.weight": shared, "out.weight": shared, "row": shared[2], "transposed": shared.t()}
    pieces = [TensorShard(name, tuple(t.shape), t.dtype, (0,) * t.dim(), t) for name, t in tied.items()]
    save_step(tmp_path, 1, pieces, {}, alone()).wait()
    assert holds(tmp_path, 1, {name: tensor.clone() for name, tensor in tied.items()})
    into = torch.zeros(6, 4)
    both = [TensorShard(name, (6, 4), into.dtype, (0, 0), into) for name in ("embed.weight", "out.weight")]
    load_step(tmp_path, 1, both, alone())
    assert same_pieces(whole({"w": into}), whole({"w": shared}))


def test_locals_that_are_views(tmp_path: Path) -> None:
    base = random_bits((8, 10), torch.float64)
    views = {"columns": base[:, 2:5], "rows": base[::2], "transposed": base.t(), "expanded": base[:1].expand(5, 10)}
    pieces = [TensorShard(name, tuple(t.shape), t.dtype, (0,) * t.dim(), t) for name, t in views.items()]
    save_step(tmp_path, 1, pieces, {}, alone()).wait()
    assert holds(tmp_path, 1, {name: tensor.clone() for name, tensor in views.items()})
    target = torch.zeros(10, 8, dtype=torch.float64)
    load_step(tmp_path, 1, [TensorShard("columns", (8, 3), base.dtype, (0, 0), target.t()[:, :3])], alone())
    assert torch.equal(target.t()[:, :3].contiguous().view(torch.int64), base[:, 2:5].contiguous().view(torch.int64))


@pytest.mark.parametrize("ranks", [1, 2])
def test_empty_and_scalar_ones_and_all_names(tmp_path: Path, ranks: int) -> None:
    tensors: State = {name: random_bits((3, 2), torch.bfloat16, n) for n, name in enumerate(NAMES)}
    tensors |= {"none": torch.zeros(0), "no rows": torch.zeros(0, 5), "no columns": torch.zeros(4, 0)}
    tensors |= {"scalar": random_bits((), torch.float64), "one": random_bits((1, 1, 1), torch.int8)}

    def save_and_load(world: World) -> bool:
        pieces = sharded(tensors, 0, world.rank, world.size)
        save_step(tmp_path, 1, pieces, {}, world).wait()
        other = blank(sharded(tensors, 1, world.rank, world.size))
        load_step(tmp_path, 1, other, world)
        return same_pieces(other, sharded(tensors, 1, world.rank, world.size))

    assert run_ranks(save_and_load, ranks) == [True] * ranks
    assert verify_step(tmp_path, 1) == []
    assert holds(tmp_path, 1, tensors)


def test_very_many_tiny_ones(tmp_path: Path) -> None:
    many = {f"layers.{n // 100}.w{n % 100}": torch.full((n % 4,), float(n)) for n in range(5_000)}
    save_alone(tmp_path, 1, many)
    assert holds(tmp_path, 1, many)


ROWS = [hdf5_layout.DatasetRow(name, (2000,), torch.float32, (0,), (2000,)) for name in "ab"]
STRUCTURES: dict[str, Callable[[], object]] = {
    "of a rank": lambda: hdf5_layout.make_image(ROWS),
    "of several ranks": lambda: make_shared_head([ROWS, ROWS], BLOCK_BYTES),
}


@pytest.mark.parametrize("what", STRUCTURES)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_nothing_is_left_of_the_structure_of_a_file(tmp_path: Path, what: str, number: int) -> None:
    """kill -9 while HDF5 has it open, for the first time or again: no directory ever had it."""
    told = tmp_path / "told"
    opened = h5py.File.__init__

    def work() -> None:
        calls = iter(range(1, number + 1))

        def init(file: h5py.File, *args: Any, **named: Any) -> None:
            opened(file, *args, **named)
            if next(calls) == number:
                has = [it for it in Path("/proc/self/fd").iterdir() if it.exists()]
                told.write_text("\n".join(str(it.readlink()) for it in has))
                os.kill(os.getpid(), signal.SIGKILL)

        h5py.File.__init__ = init
        STRUCTURES[what]()

    killed = is_killed(work)
    assert killed == (number == 1 or what == "of several ranks")
    if killed:
        has = [name for name in told.read_text().split("\n") if "hpc_train-image" in name]
        assert has, "HDF5 had it open"
        assert [name for name in has if Path(name).exists()] == []


def test_no_memory_for_the_copy_on_one_rank(tmp_path: Path) -> None:
    """The training has its memory and goes on; the save fails on all ranks, and the next one works."""
    weight = torch.zeros(32 << 20, dtype=torch.uint8)

    def save_both(world: World) -> list[str | None]:
        stage, told = ShardStager(), []
        for step in (1, 2):
            pieces = sharded({"w": weight}, 0, world.rank, world.size)
            limits = resource.getrlimit(resource.RLIMIT_AS)
            if world.rank == 1 and step == 1:
                resource.setrlimit(resource.RLIMIT_AS, (virtual_memory() + (10 << 20), limits[1]))
            taken = stage_step(stage, step, pieces, {})
            resource.setrlimit(resource.RLIMIT_AS, limits)
            told.append(StepWriter(tmp_path, world).write_and_commit(taken).error)
        return [str(error) if error else None for error in told]

    first, second = run_ranks(save_both, 2)
    assert first == second
    assert "rank 1: no memory for a copy of" in str(first[0])
    assert first[1] is None
    assert holds(tmp_path, 2, {"w": weight})


def virtual_memory() -> int:
    """Bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
