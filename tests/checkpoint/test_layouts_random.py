"""A training state in random layouts, saved on some ranks and loaded on others: parameters and optimizer bit for bit.

Layouts are what meshes make: axes that split a dimension, evenly or not, nested or along several dimensions, and axes
that replicate; ranks may hold nothing of a tensor.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import State, blank, random_bits, same_pieces
from drawn import draw as draw_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.checkpoint import load_step, save_step, verify_step
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

CASES = 5
"""Layouts a job, as starting ranks takes longest."""


@dataclass(frozen=True)
class Axis:
    """One axis of a mesh: what it does to a tensor."""

    degree: int
    dim: int | None
    """That it splits; None replicates."""
    at: tuple[float, ...] | None
    """Where it cuts, as shares of the dimension; None: as even as can be."""


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    saved: list[Axis]
    wanted: list[Axis]


def rectangle(shape: tuple[int, ...], axes: list[Axis], rank: int) -> tuple[list[int], list[int], int]:
    """(begin, end, replica) of what a rank holds."""
    begin, end, replica = [0] * len(shape), list(shape), 0
    for axis in axes:
        rank, index = divmod(rank, axis.degree)
        if axis.dim is None or axis.dim >= len(shape):
            replica = replica * axis.degree + index
            continue
        low, size = begin[axis.dim], end[axis.dim] - begin[axis.dim]
        if axis.at is None:
            cuts = [size * k // axis.degree for k in range(axis.degree + 1)]
        else:
            cuts = [0, *sorted(round(share * size) for share in axis.at), size]
        begin[axis.dim], end[axis.dim] = low + cuts[index], low + cuts[index + 1]
    return begin, end, replica


def pieces_of(state: State, axes: list[Axis], rank: int) -> list[TensorShard]:
    found = []
    for name, tensor in state.items():
        begin, end, replica = rectangle(tuple(tensor.shape), axes, rank)
        local = tensor[tuple(slice(b, e) for b, e in zip(begin, end, strict=True))].clone()
        found.append(TensorShard(name, tuple(tensor.shape), tensor.dtype, tuple(begin), local, replica))
    return found


def state_of(case: Case, seed: int) -> State:
    """A parameter, its moments, and the step that all hold."""
    return {
        "w": random_bits(case.shape, case.dtype, seed),
        "optim.exp_avg.w": random_bits(case.shape, torch.float32, seed + 1),
        "optim.exp_avg_sq.w": random_bits(case.shape, torch.float64, seed + 2),
        "optim.row.w": random_bits(case.shape[:1], torch.bool, seed + 3),
        "optim.step.w": random_bits((), torch.int64, seed + 4),
    }


@st.composite
def axes(draw: st.DrawFn, ranks: int, dims: int) -> list[Axis]:
    found, left = [], ranks
    while left > 1:
        degree = draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0]))
        dim = draw(st.one_of(st.none(), st.integers(0, dims - 1)))
        shares = st.tuples(*[st.floats(0, 1)] * (degree - 1))
        found.append(Axis(degree, dim, draw(st.one_of(st.none(), shares))))
        left //= degree
    return found


@st.composite
def cases(draw: st.DrawFn, savers: int, loaders: int) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex128]))
    return Case(shape, dtype, draw(axes(savers, len(shape))), draw(axes(loaders, len(shape))))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, int, list[Case]]:
    savers, loaders = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return savers, loaders, [draw(cases(savers, loaders)) for _ in range(CASES)]


def write(world: World, directory: Path, found: list[Case]) -> None:
    for step, case in enumerate(found):
        save_step(directory, step, pieces_of(state_of(case, step), case.saved, world.rank), {}, world).wait()


def read(world: World, directory: Path, found: list[Case]) -> list[int]:
    """The cases that come back otherwise."""
    wrong = []
    for step, case in enumerate(found):
        expected = pieces_of(state_of(case, step), case.wanted, world.rank)
        loaded = blank(expected)
        load_step(directory, step, loaded, world)
        if not same_pieces(loaded, expected):
            wrong.append(step)
    return wrong


@pytest.mark.parametrize("third", draw_cases(range(3), [0]))
@given(job=jobs())
@settings(max_examples=4)
def test_any_layout_on_some_ranks_to_any_on_others(third: int, job: tuple[int, int, list[Case]]) -> None:
    savers, loaders, found = job
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(write, savers, Path(folder), found)
        assert run_ranks(read, loaders, Path(folder), found) == [[]] * loaders


ROWS, COLUMNS, PLANES, COPIES = Axis(2, 0, None), Axis(2, 1, None), Axis(2, 2, (0.3,)), Axis(2, None, None)
LARGE = [
    Case((610, 1030), torch.float32, [ROWS, COLUMNS], [COLUMNS, COPIES]),
    Case((1_300_003,), torch.bfloat16, [Axis(4, 0, (0.1, 0.1, 0.7))], [Axis(4, 0, None)]),
    Case((31, 90, 300), torch.float32, [PLANES, COLUMNS], [Axis(4, 1, None)]),
    Case((3, 300_000), torch.float8_e4m3fn, [ROWS, COPIES], [Axis(4, 1, (0.25, 0.5, 0.51))]),
    Case((7, 11, 13, 500), torch.float32, [COLUMNS, PLANES], [COPIES, COPIES]),
]


def test_large_tensors_that_cross_every_boundary_of_a_read(tmp_path: Path) -> None:
    """Their moments have more bytes than a cell, their runs are longer than a block, and none begins at either."""
    assert max(prod(case.shape) * 8 for case in LARGE) > 8 << 20
    run_ranks(write, 4, tmp_path, LARGE)
    assert run_ranks(read, 4, tmp_path, LARGE) == [[]] * 4
    assert [verify_step(tmp_path, step) for step in range(len(LARGE))] == [[]] * len(LARGE)
