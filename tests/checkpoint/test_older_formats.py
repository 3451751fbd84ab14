"""Steps that earlier releases have written, of two ranks each, go on being of use."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import alone, blank, same_pieces, whole
from test_hostile_manifests import reseal

from hpc_train.checkpoint import CheckpointError, load_step, verify_step
from hpc_train.checkpoint.format.manifest import read_manifest

ROWS = torch.arange(24, dtype=torch.float32).reshape(4, 6) + 0.5
HALVES = {f"half.{index}": torch.full((3,), float(index)).bfloat16() for index in range(4)}
TENSORS = {"rows": ROWS, **HALVES, "step": torch.tensor(7)}
ZEROS = {**TENSORS, "zeros": torch.zeros(4, 4096)}
COUNTED = {**ZEROS, "counted": (torch.arange(4 * 80000) % 50).reshape(4, 80000).float()}
MOVED = {**COUNTED, "step": torch.tensor(8), "counted": COUNTED["counted"].clone()}
MOVED["counted"][2] += 1
FORMATS = {1: (2, TENSORS), 2: (3, ZEROS), 3: (4, TENSORS), 4: (4, COUNTED), 5: (4, COUNTED), 6: (4, MOVED)}
"""Format and tensors of each step; in 2 and 4 the tensors are compressed, and 6 shares a file with 5, of one rank."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("older_formats.tar.xz", "format_4.tar.xz"):
        with tarfile.open(Path(__file__).with_name(name)) as archive:
            archive.extractall(tmp_path, filter="data")
    return tmp_path / "older"


@pytest.mark.parametrize("step", FORMATS)
def test_it_is_sound_and_has_what_was_saved(directory: Path, step: int) -> None:
    version, tensors = FORMATS[step]
    assert f'"format_version":{version},' in (directory / f"step-{step}/manifest.json").read_text()
    assert verify_step(directory, step) == []
    pieces = blank(whole(tensors))
    assert load_step(directory, step, pieces, alone()) == {"consumed": step + 2}
    assert same_pieces(pieces, whole(tensors))
    holdings = read_manifest(directory / f"step-{step}", step).holdings
    assert {it.name: it.shape for it in holdings.tensors} == {name: tuple(it.shape) for name, it in tensors.items()}


def swap_two_halves(body: dict[str, Any]) -> None:
    """Swap the names of two tensors that differ only in their values and places."""
    body["tensors"][1], body["tensors"][2] = body["tensors"][2], body["tensors"][1]


@pytest.mark.parametrize("step", FORMATS)
def test_a_lie_is_found_without_a_seal(directory: Path, step: int) -> None:
    reseal(directory / f"step-{step}", swap_two_halves)
    assert "half." in verify_step(directory, step)[0].what
    with pytest.raises(CheckpointError, match="half"):
        load_step(directory, step, blank(whole(FORMATS[step][1])), alone())
