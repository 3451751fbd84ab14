"""`hpc-train checkpoint verify`: what is wrong, in which file, tensor and byte."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_commands import Terminal
from checkpoint_helpers import save_alone, state

from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES

SHARD = "shards/000/000000.h5"


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Steps 1 and 2, of some megabytes."""
    large = {"large": torch.randn(600, 1024), "last": torch.randn(300, 1024)}
    for step in (1, 2):
        save_alone(tmp_path, step, {**state(step), **large})
    return tmp_path


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_sound_step(directory: Path, terminal: Terminal, jobs: int) -> None:
    size = (directory / "step-2" / SHARD).stat().st_size
    verdict = terminal.ok("verify", directory, "--json", "--jobs", jobs).json
    assert verdict == {"step": 2, "ok": True, "tensors": 6, "bytes": size, "problems": []}
    assert "step-2: sound: 6 tensors" in terminal.ok("verify", directory).out


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_flipped_bit_has_a_file_a_tensor_and_an_offset(directory: Path, terminal: Terminal, jobs: int) -> None:
    at = (directory / "step-1" / SHARD).stat().st_size - 100
    flip(directory / "step-1" / SHARD, at)
    printed = terminal.call("verify", directory, "--step", 1, "--json", "--jobs", jobs)
    assert (printed.code, printed.err) == (1, "")
    assert printed.json["ok"] is False
    problem = {"file": SHARD, "what": "its content is not what was committed", "tensor": "last"}
    assert printed.json["problems"] == [{**problem, "offset": at // BLOCK_BYTES * BLOCK_BYTES}]
    plain = terminal.call("verify", directory / "step-1")
    assert (plain.code, plain.out) == (1, "")
    assert (
        f"{SHARD}: tensor 'last': its content is not what was committed at byte {at // BLOCK_BYTES * BLOCK_BYTES}"
        in plain.err
    )


def test_all_steps(directory: Path, terminal: Terminal) -> None:
    (directory / "step-1" / SHARD).unlink()
    (directory / "step-2/manifest.json").write_text("{")
    printed = terminal.call("verify", directory, "--all", "--json")
    assert printed.code == 1
    found = {verdict["step"]: verdict["problems"] for verdict in printed.json}
    assert [(it["file"], it["what"]) for it in found[1]] == [(SHARD, "it is missing")]
    assert [it["file"] for it in found[2]] == ["manifest.json"]


def test_several_files_each_with_its_damage(directory: Path, terminal: Terminal) -> None:
    step = directory.parent / "resharded"
    terminal.ok("reshard", directory, step, "--ranks", 3)
    flip(step / "step-2/shards/000/000000.h5", 300_000)
    with (step / "step-2/shards/000/000002.h5").open("ab") as file:
        file.write(b"x")
    printed = terminal.call("verify", step, "--json")
    assert printed.code == 1
    whats = {it["file"]: it["what"] for it in printed.json["problems"]}
    assert whats.keys() == {"shards/000/000000.h5", "shards/000/000002.h5"}
    assert "were committed" in whats["shards/000/000002.h5"]


def test_an_index_of_another_step_is_a_problem_and_none_is_not(directory: Path, terminal: Terminal) -> None:
    terminal.ok("reshard", directory, directory.parent / "other", "--ranks", 2)
    index = directory / "step-2/index.h5"
    shutil.copy(directory.parent / "other/step-2/index.h5", index)
    printed = terminal.call("verify", directory, "--json")
    assert printed.code == 1
    assert [it["file"] for it in printed.json["problems"]] == ["index.h5"]
    index.write_bytes(b"not HDF5")
    assert "index.h5: its content is not what was committed" in terminal.call("verify", directory).err
    index.unlink()
    assert terminal.ok("verify", directory, "--json").json["ok"]


def test_bad_requests(directory: Path, terminal: Terminal) -> None:
    assert "step 3 is not in" in terminal.refused("verify", directory, "--step", 3)
    assert "is one step already" in terminal.refused("verify", directory / "step-1", "--all")
    assert "not allowed with" in terminal.refused("verify", directory, "--step", 1, "--all")
    assert "not a number of 1 or more" in terminal.refused("verify", directory, "--jobs", "many")
