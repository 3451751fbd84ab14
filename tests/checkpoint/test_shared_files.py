"""checkpoint.ranks_per_file: several ranks write sections of one file; nothing else about a checkpoint changes."""

from __future__ import annotations

import random
from math import prod
from pathlib import Path
from unittest.mock import patch

import h5py
import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import blank, holds, random_bits, same_pieces, sharded, state, whole
from drawn import draw
from sharing import LARGE, files, manifest, save_steps, shards

from hpc_train.checkpoint import Saver, list_committed_steps, load_step, verify_step
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, name_datasets
from hpc_train.checkpoint.format.shard_layout import FileLayout
from hpc_train.checkpoint.save.local_stage import LocalFile, LocalStage
from hpc_train.checkpoint.save.shared_file import SharedFile, make_section, make_shared_head
from hpc_train.checkpoint.save.writer_group import WriterSharing
from hpc_train.checkpoint.storage.file_system import WritePolicy
from hpc_train.interfaces import TensorShard, World
from hpc_train.testing import run_ranks

GOOD = [""]


FILES = {
    (1, 1): ["000000.h5", "000001.h5", "000002.h5", "000003.h5"],
    (2, 1): ["000000-000001.h5", "000002-000003.h5"],
    (4, 1): ["000000-000003.h5"],
    (3, 1): ["000000-000002.h5", "000003.h5"],
    (0, 1): ["000000-000003.h5"],
    (0, 2): ["000000-000001.h5", "000002-000003.h5"],
}
"""By (ranks_per_file, nodes), of four ranks."""


@pytest.mark.parametrize("sharing", draw(FILES, [(3, 1), (0, 2)]))
def test_a_round_trip(tmp_path: Path, sharing: tuple[int, int]) -> None:
    (ranks_per_file, nodes), names = sharing, FILES[sharing]
    steps = {1: shards(LARGE), 2: shards(state(2))}
    assert save_steps(tmp_path, steps, 4, WriterSharing(ranks_per_file), nodes) == [GOOD * 2] * 4
    assert files(tmp_path) == names
    assert verify_step(tmp_path, 1) == verify_step(tmp_path, 2) == []
    assert holds(tmp_path, 1, LARGE)
    assert holds(tmp_path, 2, state(2))

    def load_shards(world: World) -> bool:
        mine = sharded(LARGE, 0, world.rank, world.size)
        found = blank(mine)
        assert load_step(tmp_path, 1, found, world) == {"n": 1}
        return same_pieces(found, mine)

    assert run_ranks(load_shards, 3) == [True] * 3


def test_uneven_files_and_ranks_without_data(tmp_path: Path) -> None:
    """Three ranks, two a file; then one rank of a file has all, then the other, then nobody has anything."""
    only = {rank: lambda world, rank=rank: whole(LARGE) if world.rank == rank else [] for rank in (0, 1, 2)}
    steps = {1: shards(LARGE), 2: only[0], 3: only[1], 4: only[2], 5: lambda world: []}
    assert save_steps(tmp_path, steps, 3, WriterSharing(2)) == [GOOD * 5] * 3
    both, last = "000000-000001.h5", "000002.h5"
    assert [files(tmp_path, step) for step in steps] == [[both, last], [both], [both], [last], []]
    assert [verify_step(tmp_path, step) for step in steps] == [[]] * 5
    assert all(holds(tmp_path, step, LARGE) for step in (1, 2, 3, 4))


def test_layouts_that_change_on_one_rank(tmp_path: Path) -> None:
    """What the first rank of a file has heard before is not told again, and what is new is."""
    more = {"more": random_bits((40, 40), torch.float64, 5)}

    def pieces(step: int, world: World) -> list[TensorShard]:
        changed = {2: 1, 3: 1, 4: 0, 5: 0}.get(step) == world.rank
        return sharded(state(step), 0, world.rank, 2) + (whole(more) if changed else [])

    steps = {step: lambda world, step=step: pieces(step, world) for step in range(1, 7)}
    assert save_steps(tmp_path, steps, 2, WriterSharing(0)) == [GOOD * 6] * 2
    for step in steps:
        assert verify_step(tmp_path, step) == []
        assert holds(tmp_path, step, state(step) | (more if 2 <= step <= 5 else {}))


def test_one_flipped_bit_in_any_section_names_the_tensor(tmp_path: Path) -> None:
    assert save_steps(tmp_path, {1: shards(LARGE)}, 4, WriterSharing(2)) == [GOOD] * 4
    found = manifest(tmp_path)
    parts = found.step_layout.parts()["large"]
    assert [part.file for part in parts] == [0, 0, 1, 1]
    for part in parts:
        name = found.files[part.file].name
        path, at = tmp_path / "step-1" / name, part.place + part.rectangle.volume * 4 - 1
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)
        (problem,) = verify_step(tmp_path, 1)
        assert (problem.file, problem.tensor, problem.offset) == (name, "large", at // BLOCK_BYTES * BLOCK_BYTES)
        data[at] ^= 1
        path.write_bytes(data)
    assert verify_step(tmp_path, 1) == []


def test_hdf5_shows_every_rectangle_in_the_file_and_in_the_index(tmp_path: Path) -> None:
    assert save_steps(tmp_path, {1: shards(LARGE)}, 4, WriterSharing(2)) == [GOOD] * 4
    step, rows = tmp_path / "step-1", LARGE["large"].numpy()
    for file, first in zip(manifest(tmp_path).files, (0, 150), strict=True):
        with h5py.File(step / file.name, "r") as opened:
            for name, begin in (("large", first), ("large@1", first + 75)):
                assert opened[name].attrs["offset"].tolist() == [begin, 0]
                assert opened[name][:].tobytes() == rows[begin : begin + 75].tobytes()
    with h5py.File(step / "index.h5", "r") as opened:
        assert "large" in [row["name"].decode() for row in opened["tensors"][()]]


def test_by_way_of_a_disk_of_the_node(tmp_path: Path) -> None:
    directory, disk = tmp_path / "c", LocalStage(tmp_path / "disk")
    disk.directory.mkdir()

    def work(world: World) -> int:
        saver = Saver(directory, world, sharing=WriterSharing(0), local_stage=disk)
        with patch.object(LocalFile, "copy_into", autospec=True, side_effect=LocalFile.copy_into) as copies:
            for step in (1, 2):
                mine = sharded(state(step), 0, world.rank, world.size)
                saver.save(step, mine, {})
                for piece in mine:
                    piece.local.zero_()  # it may change at once
                assert [it.error for it in saver.wait()] == [None]
            return copies.call_count

    assert run_ranks(work, 3) == [2] * 3
    assert verify_step(directory, 1) == verify_step(directory, 2) == []
    assert holds(directory, 1, state(1))
    assert holds(directory, 2, state(2))


def test_inspect_shows_how_many_ranks_a_file_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step, ranks_per_file in enumerate((1, 2, 3), 1):
        assert save_steps(tmp_path, {step: shards(state(step))}, 4, WriterSharing(ranks_per_file)) == [GOOD] * 4
    call = Terminal(capsys).ok
    shown = [call("inspect", tmp_path / f"step-{step}").out for step in (1, 2, 3)]
    assert "in 4 files, saved by 4 ranks" in shown[0]
    assert "in 2 files of 2 ranks each, saved by 4 ranks" in shown[1]
    assert "in 2 files of 1 to 3 ranks, saved by 4 ranks" in shown[2]
    assert [it["ranks"] for it in call("inspect", tmp_path / "step-3", "--json").json["files"]] == [3, 1]


def test_a_single_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert save_steps(tmp_path, {1: shards(LARGE)}, 1, WriterSharing(0, 1)) == [GOOD]
    assert files(tmp_path) == ["000000.h5"]
    assert list_committed_steps(tmp_path) == [1]
    assert holds(tmp_path, 1, LARGE)


def any_rows(draw: random.Random) -> list[DatasetRow]:
    """Sizes around all that HDF5 treats differently: none, below and above 2 KiB, a page, a block."""
    dtypes = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.complex128)
    shapes = [
        tuple(draw.choice((0, 1, 3, 17, 300)) for _ in range(draw.randrange(4))) for _ in range(draw.choice((0, 1, 40)))
    ]
    return [
        DatasetRow(f"t{draw.randrange(9)}", shape, draw.choice(dtypes), (0,) * len(shape), shape) for shape in shapes
    ]


@pytest.mark.parametrize("seed", range(8))
def test_a_section_is_what_its_own_rank_takes_it_for(tmp_path: Path, seed: int) -> None:
    """Wherever it lies, whatever the others have; and HDF5 finds every dataset there."""
    draw = random.Random(seed)
    members, interval = [any_rows(draw) for _ in range(5)], draw.choice((BLOCK_BYTES, 16 << 20))
    head = make_shared_head(members, interval)
    path, end = tmp_path / "file.h5", len(head.content)
    path.write_bytes(head.content)
    with path.open("r+b") as file:
        file.truncate(head.size)
    with h5py.File(path, "r") as file:
        names = iter(name_datasets(row.name for rows in members for row in rows))
        for rows, begin, places in zip(members, head.begins, head.places, strict=True):
            section = make_section(rows)
            assert section.places == places
            if section.size:
                assert begin % interval == 0
                assert begin >= end
                end = begin + section.size
            for row, place in zip(rows, places, strict=True):
                dataset = file[next(names)]
                assert dataset.shape == row.local_shape
                assert dataset.id.get_offset() == (begin + place if prod(row.local_shape) else None)
    assert head.size == end
    assert make_shared_head(members, interval) == head, "equal layouts make equal files"


def test_on_lustre_large_sections_begin_at_stripes_and_small_ones_do_not_wait_for_one(tmp_path: Path) -> None:
    lustre = WritePolicy(kind="lustre", write_bytes=1 << 20, reserve=False)
    for rows, expected in ((300, BLOCK_BYTES), (3000, 1 << 20)):
        mine = [DatasetRow("w", (rows, 513), torch.float32, (0, 0), (rows, 513))]
        held = FileLayout(tuple(mine), make_section(mine).places)
        spots = SharedFile().create(tmp_path / f"{rows}.h5", [held] * 3, lustre)
        assert [spot.begin % expected for spot in spots] == [0, 0, 0]
        assert any(spot.begin % (1 << 20) for spot in spots) == (expected == BLOCK_BYTES)
