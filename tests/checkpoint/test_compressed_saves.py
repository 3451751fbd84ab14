"""checkpoint.compression: fewer bytes on the disk, and nothing else about a checkpoint changes."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import (
    State,
    alone,
    blank,
    holds,
    names,
    random_bits,
    same_bits,
    same_pieces,
    save_alone,
    sharded,
    whole,
)
from drawn import draw
from faults import EVERY, Fault, at_call, disk_full, is_killed, kill, torn
from incremental_helpers import adapter, check, steps_of, trained
from safetensors.torch import load_file
from test_layouts_random import LARGE, pieces_of, read, state_of

from hpc_train.checkpoint import Saver, find_newest_verified, load_step, prune_steps, verify_step
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.compressed_chunks import (
    CHUNK_BYTES,
    choose_chunk_shape,
    deflate_chunk,
    inflate_chunk,
    iterate_chunks,
)
from hpc_train.checkpoint.format.hdf5_index import find_index_problem
from hpc_train.checkpoint.format.hdf5_layout import DatasetRow
from hpc_train.checkpoint.format.manifest import read_manifest as read_manifest
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter, SharingLimits
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

LEVELS = pytest.mark.parametrize("level", [1, 6])


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Like weights: exponents that are alike, mantissas that are not."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


TRAINED: State = {
    "weight": numbers((700, 513)),
    "half": numbers((3, 5, 30_000), torch.bfloat16, 1),
    "optim.exp_avg.weight": numbers((700, 513), torch.float64, 2),
    "mask": torch.arange(9000) % 7 > 2,
    "zeros": torch.zeros(70_001),
    "noise": random_bits((300_001,), torch.uint8),
    "small": numbers((3, 5)),
    "scalar": torch.tensor(7),
    "none": torch.zeros(0, 3),
}


def saver(directory: Path, level: int = 1, world: World | None = None, **named: Any) -> Saver:
    return Saver(directory, world or alone(), background=False, level=level, **named)


def saved(directory: Path, tensors: State, step: int = 1, level: int = 1) -> Path:
    """A committed step, and where it is."""
    of = saver(directory, level)
    of.save(step, whole(tensors), {"n": step})
    of.wait()[0].wait()
    return directory / f"step-{step}"


@LEVELS
def test_a_round_trip_takes_less_room(tmp_path: Path, level: int) -> None:
    step = saved(tmp_path, TRAINED, level=level)
    assert holds(tmp_path, 1, TRAINED)
    assert verify_step(tmp_path, 1) == []
    (file,) = read_manifest(step, 1).files
    assert file.bytes == (step / file.name).stat().st_size < 0.8 * file.image
    assert find_index_problem(step, read_manifest(step, 1)) is None


def test_the_exponents_of_numbers_are_what_is_spared(tmp_path: Path) -> None:
    """By no less than zlib's own levels do."""
    for dtype, least in ((torch.float32, 0.14), (torch.bfloat16, 0.28)):
        tensors = {"w": numbers((1000, 1000), dtype)}
        sizes = [read_manifest(saved(tmp_path / f"{dtype}{level}", tensors, 1, level), 1).size for level in (1, 6)]
        assert sizes[0] < (1 - least) * tensors["w"].nbytes
        assert sizes[0] < 1.01 * sizes[1]


def test_bits_that_mean_nothing_are_stored_as_they_are(tmp_path: Path) -> None:
    tensors = {"noise": random_bits((500, 1000), torch.float32)}
    (file,) = read_manifest(saved(tmp_path, tensors), 1).files
    assert file.bytes < file.image + 10_000
    assert holds(tmp_path, 1, tensors)


def test_what_was_saved_before_is_forgotten_and_the_pieces_are_not_touched(tmp_path: Path) -> None:
    """The memory is that of the last save, and is overwritten in it."""
    of = Saver(tmp_path, alone(), level=1)
    for step in (1, 2, 3):
        tensors = {**TRAINED, "weight": numbers((700, 513), seed=step)}
        pieces = whole(tensors)
        of.save(step, pieces, {})
        for piece in pieces:
            piece.local.zero_()  # it may change at once
        assert [it.error for it in of.wait()] == [None]
        assert holds(tmp_path, step, tensors)


@pytest.mark.parametrize("savers", draw([4, 1], [4]))
def test_any_layout_into_any_other(tmp_path: Path, savers: int) -> None:
    def write(world: World) -> None:
        of = saver(tmp_path, world=world)
        for step, case in enumerate(LARGE):
            axes = case.saved if world.size == 4 else []
            of.save(step, pieces_of(state_of(case, step), axes, world.rank), {})
            of.wait()[0].wait()

    run_ranks(write, savers)
    assert run_ranks(read, 4, tmp_path, LARGE) == [[]] * 4
    assert [verify_step(tmp_path, step) for step in range(len(LARGE))] == [[]] * len(LARGE)


def test_a_few_rows_and_a_few_columns(tmp_path: Path) -> None:
    saved(tmp_path, TRAINED)
    for dim, parts in ((0, 50), (1, 19)):
        for index in (0, 7, parts - 1):
            wanted = sharded({"weight": TRAINED["weight"], "noise": TRAINED["noise"]}, dim, index, parts)
            found = blank(wanted)
            assert load_step(tmp_path, 1, found, alone()) == {"n": 1}
            assert same_pieces(found, wanted)


def h5dump(*words: str) -> str:
    return subprocess.run(["h5dump", *words], capture_output=True, text=True, check=True).stdout


@LEVELS
def test_any_tool_reads_it(tmp_path: Path, level: int) -> None:
    tensors = {"w": numbers((60, 50)), "half": numbers((3, 700), torch.bfloat16)}
    halves: dict[str, list[object]] = {name: [] for name in tensors}

    def rank(world: World) -> None:
        of = saver(tmp_path, level, world)
        of.save(1, sharded(tensors, 1, world.rank, world.size), {})
        of.wait()[0].wait()

    run_ranks(rank, 2)
    for name, tensor in tensors.items():
        for shard in sorted((tmp_path / "step-1").glob("shards/*/*.h5")):
            dumped = h5dump("-y", "-w", "0", "-m", "%.9g", "-d", f"/{name}", str(shard))
            data = re.search(r"DATA \{(.*?)\}", dumped, re.DOTALL)
            assert data is not None
            values = np.array([float(text) for text in re.findall(r"[-+.e0-9]+", data[1])], np.float32)
            halves[name].append(values.reshape(tensor.shape[0], -1))
        assert np.array_equal(np.concatenate(halves[name], axis=1), tensor.float().numpy())  # type: ignore[arg-type]
    header = h5dump("-H", "-p", "-d", "/w", f"{tmp_path}/step-1/shards/000/000001.h5")
    assert "COMPRESSION DEFLATE" in header
    assert "PREPROCESSING SHUFFLE" in header


def test_hdf5_reads_chunks_of_every_shape(tmp_path: Path) -> None:
    """Whole ones and those at edges, those with filters and those without; by h5py as it would read anybody's."""
    draw = random.Random(1)
    shapes = [(1, 1, 5000), (300_007,), (3, 100_003), (2, 3, 70_001), (70_001, 1, 2), (5, 40_000, 2), (1 << 17,)]
    dtypes = (torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.complex128)
    tensors: State = {}
    for shape in shapes:
        for dtype in draw.sample(dtypes, 2):
            noise = draw.random() < 0.4
            made = random_bits(shape, dtype, len(tensors)) if noise else numbers(shape).abs().mul(3000).to(dtype)
            tensors[f"{len(tensors)}"] = made
    step = saved(tmp_path, tensors)
    assert holds(tmp_path, 1, tensors)
    masks = set()
    with h5py.File(step / "shards/000/000000.h5") as file:
        for name, tensor in tensors.items():
            dataset = file[name]
            stored = np.empty(dataset.shape, f"V{tensor.itemsize}")
            dataset.id.read(h5py.h5s.ALL, h5py.h5s.ALL, stored, dataset.id.get_type())
            assert stored.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), (name, dataset.chunks)
            masks |= {dataset.id.get_chunk_info(index).filter_mask for index in range(dataset.id.get_num_chunks())}
    assert masks == {0, 3}


def test_chunks_are_contiguous_and_make_up_the_whole() -> None:
    draw = random.Random(2)
    for _ in range(300):
        shape = tuple(draw.choice((1, 2, 3, 17, 300, 5000)) for _ in range(draw.randrange(1, 5)))
        row = DatasetRow(
            "w", shape, draw.choice((torch.uint8, torch.float32, torch.complex128)), (0,) * len(shape), shape
        )
        chunk = choose_chunk_shape(row)
        if chunk is None or row.bytes > 1 << 24:
            continue
        item = row.dtype.itemsize
        assert np.prod(chunk) * item <= max(CHUNK_BYTES, item)
        found = list(iterate_chunks(row, chunk))
        ends = [it.begin + it.size for it in found]
        assert [0, *ends] == [*(it.begin for it in found), row.bytes]
        strides = [int(np.prod(shape[dim + 1 :])) * item for dim in range(len(shape))]
        assert all(sum(at * step for at, step in zip(it.at, strides, strict=True)) == it.begin for it in found)
        assert len({it.at for it in found}) == len(found)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_in_any_chunk_has_a_tensor_and_an_offset(tmp_path: Path) -> None:
    step = saved(tmp_path, TRAINED)
    path = step / "shards/000/000000.h5"
    with h5py.File(path) as file:
        infos = {name: it.id for name, it in file.items() if it.chunks}
        spots = {name: [it.get_chunk_info(n) for n in (0, it.get_num_chunks() - 1)] for name, it in infos.items()}
    assert spots.keys() == {"weight", "half", "optim.exp_avg.weight", "mask", "zeros", "noise"}
    for name, chunks in spots.items():
        for chunk in chunks:
            at = chunk.byte_offset + chunk.size // 2
            flip(path, at)
            (problem,) = verify_step(tmp_path, 1)
            assert problem.offset == at // (128 << 10) * (128 << 10)
            assert (problem.file, problem.what) == ("shards/000/000000.h5", "its content is not what was committed")
            assert problem.tensor is not None
            with pytest.raises(CheckpointError, match=rf"step 1 .* is damaged: shards/000/000000\.h5: tensor '{name}'"):
                load_step(tmp_path, 1, blank(whole({name: TRAINED[name]})), alone())
            flip(path, at)
    assert verify_step(tmp_path, 1) == []
    assert holds(tmp_path, 1, TRAINED)


def test_the_tensor_that_is_named_is_the_one_that_is_lost(tmp_path: Path) -> None:
    tensors = {name: numbers((600, 1024), seed=seed) for seed, name in enumerate("abc")}
    step = saved(tmp_path, tensors)
    path = step / "shards/000/000000.h5"
    with h5py.File(path) as file:
        middles = {name: file[name].id.get_chunk_info(file[name].id.get_num_chunks() // 2) for name in tensors}
    for name, chunk in middles.items():
        flip(path, chunk.byte_offset + chunk.size // 2)
        assert [problem.tensor for problem in verify_step(tmp_path, 1)] == [name]
        with pytest.raises(CheckpointError, match=f"tensor '{name}'"):
            load_step(tmp_path, 1, blank(whole(tensors)), alone())
        others = {other: tensor for other, tensor in tensors.items() if other != name}
        assert holds(tmp_path, 1, others), "what is sound can still be had"
        flip(path, chunk.byte_offset + chunk.size // 2)


@pytest.mark.parametrize("what", ["shorter", "longer", "tail lost", "missing", "table shorter", "table flipped"])
def test_damage_is_never_silent(tmp_path: Path, what: str) -> None:
    step = saved(tmp_path, TRAINED)
    path = step / "shards/000/000000.h5"
    table, size = path.with_name(path.name + ".digests"), path.stat().st_size
    if what in ("shorter", "longer"):
        os.truncate(path, size + (-7 if what == "shorter" else 1))
    elif what == "tail lost":
        os.truncate(path, size // 2)
        os.truncate(path, size)
    elif what == "missing":
        path.unlink()
    elif what == "table shorter":
        os.truncate(table, table.stat().st_size - 48)  # a part of it, and no digest
    else:
        flip(table, table.stat().st_size - 20)
    (problem,) = verify_step(tmp_path, 1)
    assert problem.file.startswith("shards/000/000000.h5")
    with pytest.raises(CheckpointError, match=r"step 1 .* is damaged: shards/000/000000\.h5"):
        load_step(tmp_path, 1, blank(whole(TRAINED)), alone())


def test_a_stream_of_other_bytes_is_an_error() -> None:
    stream = deflate_chunk(memoryview(numbers((1000,)).numpy()).cast("B"), 4, 4000, 1)
    assert stream is not None
    for wrong in (stream[:-1], stream[:50] + b"\0" + stream[51:], b"", stream[:-4] + b"\0\0\0\0"):
        with pytest.raises(CheckpointError, match="cannot be inflated"):
            inflate_chunk(memoryview(wrong), 4, 4000)
    with pytest.raises(CheckpointError, match="it has 4000 bytes inflated, and should have 4004"):
        inflate_chunk(memoryview(stream), 4, 4004)


def test_incremental_saves_of_compressed_files(tmp_path: Path) -> None:
    """What is shared stays as it was compressed; runs of rows that changed are chunks of their own."""
    frozen = {"body": numbers((500, 400)), "experts": numbers((3, 200, 100), torch.bfloat16)}
    tensors = {**frozen, **adapter(), "embedding": numbers((2000, 64))}
    of = saver(tmp_path, incremental=IncrementalWriter(SharingLimits(least=0, run=16 << 10)))
    for step in range(1, 6):
        of.save(step, whole(tensors), {})
        of.wait()[0].wait()
        check(tmp_path, step, tensors)
        assert all(file.inflated is not None for file in read_manifest(tmp_path / f"step-{step}", step).files)
        fresh = numbers((2000, 64), seed=step)
        rows = slice(100 * step, 100 * step + 30)
        embedding = tensors["embedding"].clone()
        embedding[rows] = fresh[rows]
        tensors = {**tensors, **trained(adapter(), step), "embedding": embedding}
    assert steps_of(tmp_path, 5)[0] == 1
    assert prune_steps(tmp_path, keep=1) == [1, 2, 3, 4]
    assert verify_step(tmp_path, 5) == []


def test_with_and_without_in_one_directory(tmp_path: Path) -> None:
    save_alone(tmp_path, 1, TRAINED)
    saved(tmp_path, TRAINED, 2)
    assert holds(tmp_path, 1, TRAINED)
    assert holds(tmp_path, 2, TRAINED)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terminal, step = Terminal(capsys), saved(tmp_path / "in", TRAINED)
    manifest = read_manifest(step, 1)
    facts = terminal.ok("inspect", step, "--json").json
    assert (facts["bytes"], facts["inflated"]) == (manifest.size, manifest.inflated)
    assert facts["files"][0]["inflated"] == manifest.inflated
    assert re.search(r"compressed +from [\d.]+ MiB, which saves \d\d\.\d%", terminal.ok("inspect", step).out)
    assert terminal.ok("verify", tmp_path / "in", "--json").json["ok"]
    assert terminal.ok("ls", tmp_path / "in", "--json").json[0]["bytes"] == manifest.size
    terminal.ok("reshard", tmp_path / "in", tmp_path / "out", "--ranks", 3, "--dim", 1)
    assert holds(tmp_path / "out", 1, TRAINED)
    assert read_manifest(tmp_path / "out/step-1", 1).inflated is None
    terminal.ok("export", tmp_path / "in", tmp_path / "exported", "--format", "safetensors")
    state = load_file(tmp_path / "exported/model.safetensors")
    assert all(same_bits(state[name], tensor) for name, tensor in TRAINED.items())


def test_room_is_asked_for_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How small it gets is known when it is too late to say no."""
    of, tensors = saver(tmp_path), {"w": torch.zeros(1 << 18)}
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=900, f_frsize=1024, f_favail=9, f_files=9))
        of.save(1, whole(tensors), {})
        (refused,) = of.wait()
    assert "it needs 1.1" in str(refused.error)
    assert "900.00 KiB free" in str(refused.error)
    assert saved(tmp_path, tensors).exists()
    assert read_manifest(tmp_path / "step-1", 1).size < 100_000


def test_nan_is_seen_before_it_is_compressed(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, float("nan"))):
        step_path = saved(tmp_path, {**TRAINED, "zeros": torch.full((70_001,), value)}, step)
        assert read_manifest(step_path, step).finite == (step == 1)


OLD, NEW = ({"w": numbers((100, 201), seed=seed), "n": torch.tensor(seed)} for seed in (1, 2))


def old_or_new(directory: Path) -> str:
    """Which of them the newest sound step is; the next save works."""
    found = find_newest_verified(directory)
    assert found in (1, 2)
    assert holds(directory, found, OLD if found == 1 else NEW)
    assert holds(saved(directory, NEW, 3).parent, 3, NEW)
    assert [name for name in names(directory) if ".tmp-" in name or ".trash-" in name] == []
    return "old" if found == 1 else "new"


def holding_old(directory: Path) -> Path:
    first = directory.with_name("old")
    if not first.exists():
        saved(first, OLD)
    return shutil.copytree(first, directory)


@pytest.mark.parametrize("third", draw(range(3), [1]))
def test_killed_at_any_call(tmp_path: Path, third: int) -> None:
    def save_and_die(directory: Path, number: int) -> None:
        with at_call(number, kill, EVERY, directory):
            saver(directory).save(2, whole(NEW), {})

    outcomes, number, killed = [], 2 * third - 5, True
    while killed:
        number += 6
        directory = holding_old(tmp_path / str(number))
        killed = is_killed(lambda at=number, where=directory: save_and_die(where, at))  # type: ignore[misc]
        outcomes.append(old_or_new(directory))
    assert set(outcomes) == {"old", "new"}


@pytest.mark.parametrize("fault", [disk_full, torn], ids=["ENOSPC", "torn write"])
def test_any_call_that_fails(tmp_path: Path, fault: Fault) -> None:
    outcomes, made, number = [], ["more"] * 1000, -1
    while len(made) >= number:
        number += 2
        directory = holding_old(tmp_path / str(number))
        of = saver(directory)
        with at_call(number, fault, EVERY, directory) as made:
            of.save(2, whole(NEW), {})
            (told,) = of.wait()
        outcomes.append(old_or_new(directory))
        assert (outcomes[-1] == "new") == (told.error is None)
    assert set(outcomes) == {"old", "new"}
