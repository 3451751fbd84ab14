"""index.h5: whole tensors for any HDF5 tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import State, save_alone, sharded, state

from hpc_train.api import World
from hpc_train.checkpoint import save
from hpc_train.checkpoint.catalogue import readable
from hpc_train.checkpoint.index import INDEX, index_problem, mappings, write_index
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
        save(directory, 1, sharded(TENSORS, dim, world.rank, world.size), {}, world).wait()

    run_ranks(rank, ranks)
    return directory / "step-1"


def tool(*words: str | Path) -> str:
    """A program of Debian's hdf5-tools."""
    assert shutil.which(str(words[0])), f"{words[0]} is not installed: apt-get install hdf5-tools"
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("dim", [0, 1])
def test_a_save_writes_it_and_h5py_reads_whole_tensors(tmp_path: Path, dim: int) -> None:
    step = save_on(tmp_path / "before", 3, dim)
    moved = shutil.move(step, tmp_path / "elsewhere")
    with h5py.File(Path(moved) / INDEX) as file:
        assert set(file) == {"layers.0.weight", "a%2Fodd name", "half", "step", "empty"}
        np.testing.assert_array_equal(file["layers.0.weight"][...], TENSORS["layers.0.weight"].numpy())
        np.testing.assert_array_equal(file["a%2Fodd name"][...], TENSORS["a/odd name"].numpy())
        np.testing.assert_array_equal(file["half"][...], TENSORS["half"].float().numpy())
        assert file["step"][()] == 12
        assert file["empty"].shape == (0, 4)
        assert file["half"].attrs["torch_dtype"] == b"bfloat16"


def test_h5dump_and_h5ls_of_debian_read_whole_tensors(tmp_path: Path) -> None:
    step = save_on(tmp_path, 2, 1)
    dumped = tool("h5dump", "-y", "-w", "0", "-d", "/layers.0.weight", step / INDEX)
    data = re.search(r"DATA \{(.*?)\}", dumped, re.DOTALL)
    assert data is not None
    assert [float(text) for text in re.findall(r"[0-9.]+", data[1])] == list(map(float, range(35)))
    half = tool("h5dump", "-y", "-d", "/half", step / INDEX)
    assert "1.5, -2, 0.25" in half
    listed = tool("h5ls", step / INDEX)
    shapes = dict(re.findall(r"^(\S+)\s+Dataset \{(.*)\}", listed.replace("\\ ", "_"), re.MULTILINE))
    assert (shapes["layers.0.weight"], shapes["half"], shapes["step"]) == ("7, 5", "3", "SCALAR")


def test_it_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = save_on(tmp_path, 2, 0)
    manifest = readable(step, 1)
    assert manifest is not None
    first = (step / INDEX).read_bytes()
    (step / INDEX).unlink()
    assert index_problem(step, manifest) is None
    write_index(step, manifest)
    assert (step / INDEX).read_bytes() == first
    assert index_problem(step, manifest) is None
    terminal = Terminal(capsys)
    (step / INDEX).unlink()
    assert terminal.ok("inspect", step, "--json").json["index"] is False
    assert terminal.ok("inspect", step, "--index", "--json").json["index"] is True
    assert (step / INDEX).read_bytes() == first
    assert sorted(path.name for path in step.iterdir()) == [INDEX, "manifest.json", "shards"]


def test_a_very_large_one_is_made_by_force_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_train.checkpoint.index.ORDINARY", 3)
    save_alone(tmp_path, 1, state(0))
    manifest = readable(tmp_path / "step-1", 1)
    assert manifest is not None
    assert mappings(manifest) == 4
    assert not (tmp_path / "step-1" / INDEX).exists()
    terminal = Terminal(capsys)
    assert "would have 4 mappings" in terminal.refused("inspect", tmp_path, "--index")
    assert terminal.ok("inspect", tmp_path, "--index", "--force", "--json").json["index"] is True


def test_two_saves_of_one_process_at_once(tmp_path: Path) -> None:
    def save_in(name: str) -> None:
        for step in range(1, 6):
            save_alone(tmp_path / name, step, TENSORS)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save_in, "abcd"))
    for path in tmp_path.glob("*/step-*"):
        with h5py.File(path / INDEX) as file:
            assert file["step"][()] == 12
    assert len(list(tmp_path.glob("*/step-*"))) == 20
