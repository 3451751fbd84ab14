"""Steps that earlier releases have written, of two ranks each, go on being of use."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch
from checkpoint_helpers import alone, blank, same_pieces, whole

from hpc_train.checkpoint import load, verify
from hpc_train.checkpoint.manifest import read

ROWS = torch.arange(24, dtype=torch.float32).reshape(4, 6) + 0.5
HALVES = {f"half.{index}": torch.full((3,), float(index)).bfloat16() for index in range(4)}
TENSORS = {"rows": ROWS, **HALVES, "step": torch.tensor(7)}
FORMATS = {1: (2, TENSORS), 2: (3, {**TENSORS, "zeros": torch.zeros(4, 4096)})}
"""By step; in the second the tensors are compressed."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("older_formats.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "older"


@pytest.mark.parametrize("step", FORMATS)
def test_it_is_sound_and_has_what_was_saved(directory: Path, step: int) -> None:
    version, tensors = FORMATS[step]
    assert f'"format_version":{version},' in (directory / f"step-{step}/manifest.json").read_text()
    assert verify(directory, step) == []
    pieces = blank(whole(tensors))
    assert load(directory, step, pieces, alone()) == {"consumed": step + 2}
    assert same_pieces(pieces, whole(tensors))
    holdings = read(directory / f"step-{step}", step).holdings
    assert {it.name: it.shape for it in holdings.tensors} == {name: tuple(it.shape) for name, it in tensors.items()}
