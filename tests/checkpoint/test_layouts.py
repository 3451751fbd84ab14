"""Saved in one layout, loaded in any other, by any number of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, blank, random_bits, same_bits, same_pieces, sharded, state, whole
from drawn import draw as draw_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_train.checkpoint import find_newest_verified, load_step, save_step, verify_step
from hpc_train.checkpoint.format.rectangle import Rectangle, explain_coverage
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks


def save_by_rows(world: World, directory: Path) -> None:
    save_step(directory, 1, sharded(state(0), 0, world.rank, world.size), {"ranks": world.size}, world).wait()


def load_by(world: World, directory: Path, dims: list[int]) -> list[tuple[bool, dict[str, object], int | None]]:
    return [load_cut_along(world, directory, dim) for dim in dims]


def load_cut_along(world: World, directory: Path, dim: int) -> tuple[bool, dict[str, object], int | None]:
    expected = sharded(state(0), dim, world.rank, world.size)
    pieces = blank(expected)
    extra = load_step(directory, 1, pieces, world)
    return same_pieces(pieces, expected), extra, find_newest_verified(directory, world)


@pytest.fixture(scope="module")
def by_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("by_rows")
    run_ranks(save_by_rows, 4, directory)
    return directory


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_saved_by_rows_on_four_ranks_loads_by_rows_and_columns_on_any(by_rows: Path, ranks: int) -> None:
    assert run_ranks(load_by, ranks, by_rows, [0, 1]) == [[(True, {"ranks": 4}, 1)] * 2] * ranks


def test_saved_by_four_ranks_loads_whole_without_a_process_group(by_rows: Path) -> None:
    pieces = blank(whole(state(0)))
    load_step(by_rows, 1, pieces, alone())
    assert same_pieces(pieces, whole(state(0)))
    assert verify_step(by_rows, 1) == []


def test_ranks_that_want_different_tensors(by_rows: Path) -> None:
    def load_one(world: World) -> bool:
        expected = whole(state(0))[world.rank : world.rank + 1] if world.rank < 2 else []
        pieces = blank(expected)
        load_step(by_rows, 1, pieces, world)
        return same_pieces(pieces, expected)

    assert run_ranks(load_one, 3) == [True] * 3


def test_a_rank_without_pieces_writes_no_file(tmp_path: Path) -> None:
    def save_on_first(world: World) -> list[str]:
        save_step(tmp_path, 1, whole(state(0)) if world.rank == 0 else [], {}, world).wait()
        return sorted(path.name for path in (tmp_path / "step-1").rglob("*.*"))

    assert run_ranks(save_on_first, 2) == [["000000.h5", "000000.h5.digests", "index.h5", "manifest.json"]] * 2


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Rectangle]:
    """Rectangles that cover a tensor exactly once, from random cuts along random dimensions."""
    parts = [Rectangle((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        parts.extend(draw(halves(part)))
    return parts


@st.composite
def halves(draw: st.DrawFn, part: Rectangle) -> list[Rectangle]:
    axes = [axis for axis, size in enumerate(part.shape) if size > 1]
    if not axes:
        return [part]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(1, part.shape[axis] - 1))

    def with_axis(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    rest = Rectangle(with_axis(part.offset, part.offset[axis] + at), with_axis(part.shape, part.shape[axis] - at))
    return [Rectangle(part.offset, with_axis(part.shape, at)), rest]


@st.composite
def two_partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Rectangle], list[Rectangle]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    return shape, draw(partitions(shape)), draw(partitions(shape))


def pieces_of(tensor: torch.Tensor, parts: list[Rectangle]) -> list[TensorShard]:
    return [
        TensorShard("w", tuple(tensor.shape), tensor.dtype, part.offset, tensor[window(part)].clone()) for part in parts
    ]


def window(part: Rectangle) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(part.offset, part.shape, strict=True))


@pytest.mark.parametrize("third", draw_cases(range(3), [0]))
@given(case=two_partitions(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
@settings(max_examples=20)
def test_any_rectangles_to_any_rectangles(
    third: int, case: tuple[tuple[int, ...], list[Rectangle], list[Rectangle]], dtype: torch.dtype
) -> None:
    shape, saved, wanted = case
    tensor = random_bits(shape, dtype)
    with tempfile.TemporaryDirectory() as folder:
        save_step(Path(folder), 1, pieces_of(tensor, saved), {}, alone()).wait()
        expected = pieces_of(tensor, wanted)
        loaded = blank(expected)
        load_step(Path(folder), 1, loaded, alone())
    assert same_pieces(loaded, expected)


@pytest.mark.parametrize("half", draw_cases(range(2), [0]))
@given(case=two_partitions(), savers=st.integers(1, 3), loaders=st.integers(1, 3))
@settings(max_examples=4)
def test_any_rectangles_on_some_ranks_to_any_on_others(
    half: int, case: tuple[tuple[int, ...], list[Rectangle], list[Rectangle]], savers: int, loaders: int
) -> None:
    shape, saved, wanted = case
    tensor = random_bits(shape, torch.float32)

    def write(world: World, directory: Path) -> None:
        save_step(directory, 1, pieces_of(tensor, saved[world.rank :: world.size]), {}, world).wait()

    def read(world: World, directory: Path) -> bool:
        expected = pieces_of(tensor, wanted[world.rank :: world.size])
        loaded = blank(expected)
        load_step(directory, 1, loaded, world)
        return same_pieces(loaded, expected)

    with tempfile.TemporaryDirectory() as folder:
        run_ranks(write, savers, Path(folder))
        assert run_ranks(read, loaders, Path(folder)) == [True] * loaders


@given(two_partitions())
@settings(max_examples=100)
def test_a_partition_covers_and_any_change_of_it_does_not(
    case: tuple[tuple[int, ...], list[Rectangle], list[Rectangle]],
) -> None:
    shape, parts, _ = case
    tensor = Rectangle((0,) * len(shape), shape)
    assert explain_coverage(tensor, parts) is None
    assert "in no piece" in (explain_coverage(tensor, parts[1:]) or "")
    assert "overlap" in (explain_coverage(tensor, [*parts, parts[0]]) or "")


def test_only_the_rectangle_that_is_wanted_is_touched(tmp_path: Path) -> None:
    tensor = random_bits((6, 6), torch.int64)
    save_step(tmp_path, 1, pieces_of(tensor, [Rectangle((0, 0), (6, 6))]), {}, alone()).wait()
    around = torch.full((6, 6), -1)
    load_step(tmp_path, 1, [TensorShard("w", (6, 6), torch.int64, (2, 3), around[2:4, 3:5])], alone())
    assert same_bits(around[2:4, 3:5], tensor[2:4, 3:5])
    assert (around == -1).sum() == 32
