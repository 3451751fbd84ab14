"""Cutting strips and grouping them into reads loses no byte, moves none, and reads no block twice."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import torch
from checkpoint_helpers import random_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES
from hpc_train.checkpoint.format.rectangle import Rectangle, explain_coverage, forms_grid
from hpc_train.checkpoint.load.read_schedule import (
    CELL_BYTES,
    MAX_GAP_BYTES,
    WIDE_READ_BYTES,
    LoadDestination,
    Strips,
    copy_strips,
    cut_at_cells,
    list_blocks,
    make_strips,
    plan_block_reads,
    sort_by_file,
    strip_ends,
    view_runs,
)

Run = tuple[int, int, int, int, int]
"""(file, begin, end, piece, at)"""


def runs(of: Strips) -> list[Run]:
    """Every run, with those that follow each other in the file and in memory joined."""
    every = sorted(
        (file, begin + i * stride, begin + i * stride + run, piece, at + i * step)
        for file, begin, count, stride, run, piece, at, step in of.tolist()
        for i in range(count)
    )
    joined: list[Run] = []
    for file, begin, end, piece, at in every:
        last = joined[-1] if joined else None
        if last and (last[0], last[2], last[3], last[4] + last[2] - last[1]) == (file, begin, piece, at):
            joined[-1] = (file, last[1], end, piece, last[4])
        else:
            joined.append((file, begin, end, piece, at))
    return joined


@st.composite
def strip_rows(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Rows of several pieces one after the other in two files, with lengths from a byte to more than a cell."""
    lengths = st.one_of(
        st.integers(1, 9), st.integers(BLOCK_BYTES - 9, BLOCK_BYTES + 9), st.integers(1, 3 * CELL_BYTES)
    )
    free = [0, 0]
    found: list[tuple[int, ...]] = []
    for piece in range(draw(st.integers(1, 6))):
        file, count, run = draw(st.integers(0, 1)), draw(st.integers(1, 12)), draw(lengths)
        stride = run + draw(st.one_of(st.just(0), lengths))
        begin = free[file] + draw(lengths)
        found.append((file, begin, count, stride, run, piece, 5 * piece, run + draw(st.integers(0, 3))))
        free[file] = begin + count * stride
    return found


@given(strip_rows())
@settings(max_examples=200)
def test_cut_strips_are_the_same_bytes_in_one_cell_each(rows: list[tuple[int, ...]]) -> None:
    before = make_strips(rows)
    after = cut_at_cells(before)
    assert runs(after) == runs(before)
    assert (after["begin"] // CELL_BYTES == (strip_ends(after) - 1) // CELL_BYTES).all()
    assert ((after["count"] == 1) | (after["stride"] - after["run"] <= MAX_GAP_BYTES)).all()


@given(strip_rows(), st.sampled_from([CELL_BYTES, WIDE_READ_BYTES]))
@settings(max_examples=100)
def test_reads_have_all_strips_and_no_block_twice(rows: list[tuple[int, ...]], most: int) -> None:
    plan = sort_by_file(cut_at_cells(make_strips(rows)))
    sizes = [max([1, *strip_ends(plan[plan["file"] == file]).tolist()]) for file in (0, 1)]
    found = plan_block_reads(plan, sizes, most)
    assert runs(np.concatenate([read.strips for read in found])) == runs(plan)
    for read in found:
        assert read.begin <= read.strips["begin"].min()
        assert strip_ends(read.strips).max() <= read.end
        assert read.begin % BLOCK_BYTES == 0
        assert read.end % BLOCK_BYTES == 0 or read.end == sizes[read.file]
        assert read.end - read.begin <= most
    touched = list(zip(*list_blocks(found), strict=True))
    assert len(set(touched)) == len(touched)
    needed = {(f, b) for f, begin, end, _, _ in runs(plan) for b in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES))}
    assert needed <= set(touched)
    assert len(touched) <= 2 * len(needed)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Rectangle, Rectangle, Rectangle]:
    """(a part as it is saved, a piece, what both hold)."""
    dims = [sorted(draw(st.lists(st.integers(0, 6), min_size=4, max_size=4))) for _ in range(draw(st.integers(0, 4)))]

    def box(which: list[tuple[int, int]]) -> Rectangle:
        return Rectangle(tuple(b for b, _ in which), tuple(e - b for b, e in which))

    swapped = [draw(st.booleans()) for _ in dims]
    saved = box([(a, c + 1) if s else (b, d + 1) for (a, b, c, d), s in zip(dims, swapped, strict=True)])
    held = box([(b, d + 1) if s else (a, c + 1) for (a, b, c, d), s in zip(dims, swapped, strict=True)])
    common = saved.overlap(held)
    assert common is not None
    return saved, held, common


@given(boxes(), st.sampled_from([1, 2, 8]))
@settings(max_examples=200)
def test_strips_copy_the_common_part_of_two_rectangles(case: tuple[Rectangle, Rectangle, Rectangle], item: int) -> None:
    saved, held, common = case
    file = np.arange(3 + saved.volume * item, dtype=np.int64)
    memory = np.full(held.volume * item, -1)
    for _, begin, count, stride, run, _, at, step in copy_strips(0, 3, saved, 0, held, common, item):
        for i in range(count):
            memory[at + i * step :][:run] = file[begin + i * stride :][:run]
    expected = np.full((*held.shape, item), -1)
    of_file = file[3:].reshape(*saved.shape, item)

    def window(outer: Rectangle) -> tuple[slice, ...]:
        return tuple(slice(b, b + s) for b, s in zip(common.start_in(outer), common.shape, strict=True))

    expected[window(held)] = of_file[window(saved)]
    assert (memory.reshape(expected.shape) == expected).all()


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=3))
@settings(max_examples=100)
def test_a_grid_is_known_and_any_change_of_it_is_not_one(lengths: list[list[int]]) -> None:
    begins = [np.cumsum([0, *of_dim[:-1]]).tolist() for of_dim in lengths]
    offsets, shapes = (
        np.array(list(product(*of_dims)), dtype=np.int64).reshape(prod(map(len, lengths)), len(lengths))
        for of_dims in (begins, lengths)
    )
    whole = tuple(sum(of_dim) for of_dim in lengths)
    assert forms_grid(whole, offsets, shapes)
    assert not forms_grid(whole, offsets[1:], shapes[1:])
    assert not forms_grid(whole, np.concatenate([offsets, offsets[:1]]), np.concatenate([shapes, shapes[:1]]))
    if len(offsets) > 1:
        moved = np.concatenate([offsets[:1], offsets[:1], offsets[2:]])
        assert not forms_grid(whole, moved, np.concatenate([shapes[:1], shapes[:1], shapes[2:]]))


def test_what_is_no_grid_may_cover_all_the_same() -> None:
    parts = [Rectangle((0, 0), (2, 1)), Rectangle((0, 1), (1, 2)), Rectangle((1, 1), (1, 2))]
    offsets, shapes = (np.array([getattr(p, of) for p in parts]) for of in ("offset", "shape"))
    assert forms_grid((2, 3), offsets, shapes) is False
    assert explain_coverage(Rectangle((0, 0), (2, 3)), parts) is None


@given(boxes(), st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]))
@settings(max_examples=60)
def test_memory_of_a_device_is_filled_as_that_of_the_host(
    case: tuple[Rectangle, Rectangle, Rectangle], dtype: torch.dtype
) -> None:
    """By the way that GPUs take, on a tensor that is a part of a storage."""
    saved, held, common = case
    data = random_bits(saved.shape, dtype).reshape(-1).view(torch.uint8).numpy()
    found = []
    for on_device in (False, True):
        local = torch.zeros(held.volume + 3, dtype=dtype)[3:].reshape(held.shape)
        target = LoadDestination(local)
        if on_device:
            target.memory = None
        for _, begin, count, stride, run, _, at, step in copy_strips(0, 0, saved, 0, held, common, dtype.itemsize):
            target.put(at, step, view_runs(data, begin, count, stride, run))
        found.append(local.reshape(-1).view(torch.uint8))
    assert torch.equal(*found)
