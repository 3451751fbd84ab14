"""index.h5: a list of tensors for any HDF5 tool; it has no values, so it never shows wrong ones."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import State, save_alone, sharded

from hpc_train.checkpoint import save_step
from hpc_train.checkpoint.format.hdf5_index import INDEX_FILE, find_index_problem, write_index
from hpc_train.checkpoint.storage.step_directory import try_read_manifest
from hpc_train.interfaces import World
from hpc_train.testing import run_ranks

TENSORS: State = {
    "layers.0.weight": torch.arange(35, dtype=torch.float32).reshape(7, 5),
    "a/odd name": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    "half": torch.tensor([1.5, -2.0, 0.25]).bfloat16(),
    "step": torch.tensor(12),
    "empty": torch.zeros(0, 4),
}


def save_on(directory: Path, ranks: int, dim: int) -> Path:
    """TENSORS, cut along a dimension."""

    def rank(world: World) -> None:
        save_step(directory, 1, sharded(TENSORS, dim, world.rank, world.size), {}, world).wait()

    run_ranks(rank, ranks)
    return directory / "step-1"


def tool(*words: str | Path) -> str:
    """Return what a program of Debian's hdf5-tools prints."""
    assert shutil.which(str(words[0])), f"{words[0]} is not installed: apt-get install hdf5-tools"
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def listed(step: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return (dtype, shape) of each tensor by name, read with plain h5py."""
    with h5py.File(step / INDEX_FILE) as file:
        rows = file["tensors"][()]
    return {
        row["name"].decode(): (row["dtype"].decode(), tuple(row["shape"][: row["dimensions"]].tolist())) for row in rows
    }


@pytest.mark.parametrize("dim", [0, 1])
def test_a_save_writes_it_and_h5py_lists_the_tensors(tmp_path: Path, dim: int) -> None:
    step = save_on(tmp_path / "before", 3, dim)
    moved = Path(shutil.move(step, tmp_path / "elsewhere"))
    found = listed(moved)
    assert {name: shape for name, (_, shape) in found.items()} == SHAPES
    assert {name: dtype for name, (dtype, _) in found.items()} == {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in TENSORS.items()
    }
    with h5py.File(moved / INDEX_FILE) as file:
        assert all((moved / name.decode()).is_file() for name in file["files"][()])
        assert "checkpoint verify" in file.attrs["about"]


def test_h5dump_and_h5ls_of_debian_list_the_tensors(tmp_path: Path) -> None:
    step = save_on(tmp_path, 2, 1)
    assert "layers.0.weight" in tool("h5dump", "-y", "-d", "/tensors", step / INDEX_FILE)
    assert "tensors" in tool("h5ls", step / INDEX_FILE)


@pytest.mark.parametrize("harm", ["missing", "damaged", "cut"])
def test_it_never_shows_values_of_a_shard_that_is_missing_or_damaged(tmp_path: Path, harm: str) -> None:
    """A view would show zeros or garbage, because HDF5 cannot tell."""
    step = save_on(tmp_path, 2, 0)
    shard = next(step.glob("shards/*/*.h5"))
    content = bytearray(shard.read_bytes())
    if harm == "missing":
        shard.unlink()
    else:
        content[-100] ^= 0x40
        shard.write_bytes(content if harm == "damaged" else content[:-200])
    with h5py.File(step / INDEX_FILE) as file:
        for name in TENSORS:
            with pytest.raises(KeyError):
                file[name]
        assert not any(dataset.is_virtual or dataset.external for dataset in file.values())
        assert {file.get(name, getlink=True).__class__ for name in file} == {h5py.HardLink}
    assert {name: shape for name, (_, shape) in listed(step).items()} == SHAPES


def test_damage_of_its_own_is_found_by_hdf5(tmp_path: Path) -> None:
    tensors = {f"layers.{index}.weight": torch.zeros(2) for index in range(500)}
    save_alone(tmp_path, 1, tensors)
    index = tmp_path / "step-1" / INDEX_FILE
    with h5py.File(index) as file:
        place = file["tensors"].id.get_chunk_info(0)
    content = bytearray(index.read_bytes())
    content[place.byte_offset + place.size // 2] ^= 1
    index.write_bytes(content)
    with pytest.raises(OSError, match="filter"):
        listed(tmp_path / "step-1")


def test_it_exists_at_any_size(tmp_path: Path) -> None:
    tensors = {f"layers.{index}.weight": torch.zeros(1) for index in range(9000)}
    save_alone(tmp_path, 1, tensors)
    assert len(listed(tmp_path / "step-1")) == 9000
    assert (tmp_path / "step-1" / INDEX_FILE).stat().st_size < 9000 * 100
    manifest = try_read_manifest(tmp_path / "step-1", 1)
    assert manifest is not None
    assert find_index_problem(tmp_path / "step-1", manifest) is None


def test_it_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = save_on(tmp_path, 2, 0)
    manifest = try_read_manifest(step, 1)
    assert manifest is not None
    first = (step / INDEX_FILE).read_bytes()
    (step / INDEX_FILE).unlink()
    assert find_index_problem(step, manifest) is None
    write_index(step, manifest)
    assert (step / INDEX_FILE).read_bytes() == first
    assert find_index_problem(step, manifest) is None
    terminal = Terminal(capsys)
    (step / INDEX_FILE).unlink()
    assert terminal.ok("inspect", step, "--json").json["index"] is False
    assert terminal.ok("inspect", step, "--index", "--json").json["index"] is True
    assert (step / INDEX_FILE).read_bytes() == first
    assert sorted(path.name for path in step.iterdir()) == [INDEX_FILE, "manifest.json", "shards"]


def test_two_saves_of_one_process_at_once(tmp_path: Path) -> None:
    def save_in(name: str) -> None:
        for step in range(1, 6):
            save_alone(tmp_path / name, step, TENSORS)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_in, "abcd"))
    for path in tmp_path.glob("*/step-*"):
        assert listed(path).keys() == TENSORS.keys()
    assert len(list(tmp_path.glob("*/step-*"))) == 20
