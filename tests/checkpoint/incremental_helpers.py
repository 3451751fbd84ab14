"""Savers that share unchanged tensors between steps, at sizes for tests, and checks of what they shared."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_helpers import State, alone, holds, whole
from torch import Tensor

from hpc_train.checkpoint import Saver, SaveResult, verify_step
from hpc_train.checkpoint.format.hdf5_index import find_index_problem
from hpc_train.checkpoint.format.manifest import Manifest, read_manifest
from hpc_train.checkpoint.save.incremental.incremental_writer import IncrementalWriter, SharingLimits

SMALL = SharingLimits(least=0, run=1024)


def saver(directory: Path, limits: SharingLimits = SMALL) -> Saver:
    """Return a saver of one process."""
    return Saver(directory, alone(), background=False, incremental=IncrementalWriter(limits))


def adapter(seed: int = 0) -> State:
    """Return an adapter's state: frozen weights of several types, and a small trained part with its moments."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "body.weight": drawn((64, 48), torch.float32),
        "body.bias": drawn((48,), torch.bfloat16),
        "experts": drawn((2, 30, 40), torch.float64),
        "adapter.weight": drawn((4, 48), torch.float32),
        "optim.exp_avg.adapter.weight": drawn((4, 48), torch.float32),
        "optim.step.adapter.weight": torch.tensor(seed),
        "none": torch.zeros(0, 3),
    }


def trained(tensors: State, step: int) -> State:
    """Return the same state after a step of training."""
    fresh = adapter(1000 * step)
    return {name: fresh[name] if "adapter" in name else tensor for name, tensor in tensors.items()}


def saved(of: Saver, step: int, tensors: State) -> SaveResult:
    """Save a step and check it bit for bit, with `verify` and by its index."""
    of.save(step, whole(tensors), {"step": step})
    (it,) = of.wait()
    assert it.error is None
    check(of.directory, step, tensors)
    return it


def check(directory: Path, step: int, tensors: State) -> None:
    """Check that a step is complete."""
    assert holds(directory, step, tensors)
    assert verify_step(directory, step) == []
    assert find_index_problem(directory / f"step-{step}", manifest(directory, step)) is None


def manifest(directory: Path, step: int) -> Manifest:
    """Read the manifest of a committed step."""
    return read_manifest(directory / f"step-{step}", step)


def steps_of(directory: Path, step: int) -> list[int | None]:
    """Return with which step each of its files was written."""
    return [file.written_at for file in manifest(directory, step).files]


def inodes(directory: Path, step: int) -> dict[int | None, int]:
    """Return the inode of the file that each step wrote."""
    path = directory / f"step-{step}"
    return {file.written_at: (path / file.name).stat().st_ino for file in manifest(directory, step).files}
