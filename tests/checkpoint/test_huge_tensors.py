"""Tensors of more bytes, and more elements, than 31 or 32 bits count: in files that are almost all holes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from checkpoint_helpers import alone, random_bits, same_bits
from torch import Tensor

from hpc_train.checkpoint import CheckpointError, load_step
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, count_blocks, digest_blocks
from hpc_train.checkpoint.format.compressed_chunks import choose_chunk_shape, iterate_chunks
from hpc_train.checkpoint.format.hdf5_index import find_index_problem
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, ShardImage, make_image
from hpc_train.checkpoint.format.manifest import Manifest, read_manifest
from hpc_train.checkpoint.format.rectangle import split_slabs
from hpc_train.checkpoint.format.shard_layout import gather_layouts, make_file_layout
from hpc_train.checkpoint.save.commit_step import commit_step
from hpc_train.checkpoint.save.incremental.row_runs import merge_runs, split_runs
from hpc_train.checkpoint.save.shard_file import write_digest_table
from hpc_train.checkpoint.save.shared_file import make_section, make_shared_head
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

LONG = DatasetRow("long", (5 << 30,), torch.uint8, (0,), (5 << 30,))
WIDE = DatasetRow("wide", (70_000, 40_001), torch.bfloat16, (0, 0), (70_000, 40_001))
"""Of 5.6 GB; behind the other, so that it begins beyond 32 bits."""
ROWS = (LONG, WIDE)
_EDGES = (1 << 31, 1 << 32)
NAME = "shards/000/000000.h5"
Marks = dict[str, list[tuple[tuple[int, ...], Tensor]]]
"""By tensor: where rectangles with anything in them begin, and what is in them."""


def marks() -> Marks:
    """Across every edge of bytes and of elements, within the tensor and within the file, and at its end."""
    place, width = make_image(ROWS).places[1], WIDE.local_shape[1]
    long = [((edge - 70,), random_bits((140,), torch.uint8, n)) for n, edge in enumerate(_EDGES)]
    edges = [edge // 2 // width for edge in (*_EDGES, (1 << 33) - place, 2 << 31)] + [69_998]
    wide = [((row, 11), random_bits((2, 300), torch.bfloat16, row)) for row in sorted(set(edges))]
    return {"long": [*long, ((LONG.bytes - 9,), random_bits((9,), torch.uint8, 9))], "wide": wide}


def pieces_of(found: Marks) -> list[TensorShard]:
    """What has every mark, and a little more."""
    pieces = []
    for row in ROWS:
        for begin, tensor in found[row.name]:
            rooms = (whole - at for at, whole in zip(begin, row.shape, strict=True))
            shape = tuple(min(size + 5, room) for size, room in zip(tensor.shape, rooms, strict=True))
            pieces.append(TensorShard(row.name, row.shape, row.dtype, begin, torch.ones(shape, dtype=row.dtype)))
    return pieces


def right(pieces: Sequence[TensorShard], found: Marks) -> bool:
    expected = []
    for row in ROWS:
        for _, tensor in found[row.name]:
            like = torch.zeros(pieces[len(expected)].local.shape, dtype=row.dtype)
            like[tuple(slice(size) for size in tensor.shape)] = tensor
            expected.append(like)
    return all(same_bits(piece.local, like) for piece, like in zip(pieces, expected, strict=True))


def bytes_at(row: DatasetRow, place: int, begin: tuple[int, ...], tensor: Tensor) -> list[tuple[int, bytes]]:
    """(byte of the file, bytes) of every contiguous part of a mark."""
    item, inner = row.dtype.itemsize, row.shape[-1]
    lines = tensor.reshape(-1, tensor.shape[-1]).contiguous().view(torch.uint8).numpy()
    first = begin[0] * inner + begin[1] if len(begin) == 2 else begin[0]
    return [(place + (first + n * inner) * item, line.tobytes()) for n, line in enumerate(lines)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a step 1 of one rank, committed as any other; of its 11 GB some pages are on the disk."""
    directory, image = tmp_path_factory.mktemp("huge"), make_image(ROWS)
    temporary = directory / "step-1.tmp-1"
    (temporary / NAME).parent.mkdir(parents=True)
    table = _write(temporary / NAME, image, marks())
    held = make_file_layout(ROWS, image)
    file = write_digest_table(temporary, NAME, image.size, table, held)
    manifest = Manifest(1, 1, 1, gather_layouts([held]), (file,), {"n": 1})
    assert commit_step(temporary, directory / "step-1", manifest) == image.size > 10 << 30
    return directory


def _write(path: Path, image: ShardImage, found: Marks) -> list[int]:
    """The digests of its blocks; most are those of zeros."""
    parts = list(image.structure)
    for row, place in zip(ROWS, image.places, strict=True):
        parts += [part for begin, tensor in found[row.name] for part in bytes_at(row, place, begin, tensor)]
    table = digest_blocks(memoryview(bytes(BLOCK_BYTES))) * count_blocks(image.size)
    with path.open("w+b") as file:
        file.truncate(image.size)
        for at, data in parts:
            file.seek(at)
            file.write(data)
        touched = {
            block for at, data in parts for block in range(at // BLOCK_BYTES, (at + len(data) - 1) // BLOCK_BYTES + 1)
        }
        for block in {*touched, count_blocks(image.size) - 1}:
            file.seek(block * BLOCK_BYTES)
            (table[block],) = digest_blocks(memoryview(file.read(BLOCK_BYTES)))
    return table


def test_places_and_sizes_are_beyond_32_bits(directory: Path) -> None:
    image = make_image(ROWS)
    assert image.places[1] >= LONG.bytes > 1 << 32
    assert WIDE.bytes > 1 << 32
    manifest = read_manifest(directory / "step-1", 1)
    assert manifest.step_layout.layouts[0].places.tolist() == list(image.places)
    assert manifest.size == image.size


def test_what_lies_across_the_edges_is_loaded(directory: Path) -> None:
    pieces = pieces_of(marks())
    assert load_step(directory, 1, pieces, alone()) == {"n": 1}
    assert right(pieces, marks())


def test_two_ranks_read_it_for_each_other(directory: Path) -> None:
    def rank(world: World) -> bool:
        pieces = pieces_of(marks())
        load_step(directory, 1, pieces, world)
        return right(pieces, marks())

    assert run_ranks(rank, 2) == [True, True]


def test_damage_there_has_an_address(directory: Path) -> None:
    (begin,), _ = marks()["long"][1]
    path, at = directory / "step-1" / NAME, make_image(ROWS).places[0] + begin
    for turn in ("damaged", "sound again"):
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        if turn == "damaged":
            with pytest.raises(
                CheckpointError, match=rf"tensor 'long': .* \(block at byte {at // BLOCK_BYTES * BLOCK_BYTES}\)"
            ):
                load_step(directory, 1, pieces_of(marks()), alone())
    load_step(directory, 1, pieces_of(marks()), alone())


def test_hdf5_finds_it_in_the_file(directory: Path) -> None:
    (row, column), mark = marks()["wide"][-1]
    (begin,), end = marks()["long"][-1]
    with h5py.File(directory / "step-1" / NAME) as file:
        found = file["wide"][row : row + 2, column : column + 300]
        assert np.array_equal(found, mark.float().numpy(), equal_nan=True)
        assert file["long"][begin:].tobytes() == end.numpy().tobytes()
    assert find_index_problem(directory / "step-1", read_manifest(directory / "step-1", 1)) is None


def test_sections_of_several_ranks() -> None:
    head = make_shared_head([ROWS, ROWS], BLOCK_BYTES)
    section = make_section(ROWS)
    assert head.places == (section.places, section.places)
    assert head.begins[1] >= section.size > 10 << 30
    assert head.size == head.begins[1] + section.size


@pytest.mark.parametrize("row", ROWS, ids=["long", "wide"])
def test_runs_and_chunks_make_up_the_whole(row: DatasetRow) -> None:
    held = make_file_layout([row], make_image([row]))
    runs = split_runs(held)
    assert len(runs) <= 2048
    assert all(one.begin + one.size == other.begin for one, other in pairwise(runs))
    assert sum(run.size for run in runs) == row.bytes
    assert [(whole.begin, whole.size) for whole, _ in merge_runs(runs)] == [(held.places[0], row.bytes)]
    chunk = choose_chunk_shape(row)
    assert chunk is not None
    found = list(iterate_chunks(row, chunk))
    assert all(one.begin + one.size == other.begin for one, other in pairwise(found))
    assert found[-1].begin + found[-1].size == row.bytes
    assert sum(slab.volume for slab in split_slabs(runs[0].rectangle, 1000)) == runs[0].rectangle.volume


def test_it_is_almost_all_holes(directory: Path) -> None:
    assert (directory / "step-1" / NAME).stat().st_blocks * 512 < 10 << 20
