"""Logical tensors to read by name and rectangle: of a committed step, or of a state dict in memory or mapped files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from hpc_train.checkpoint.format.hdf5_layout import (
    dtype_name,
    parse_dtype,
)
from hpc_train.checkpoint.format.manifest import Manifest
from hpc_train.checkpoint.format.rectangle import Rectangle, make_slices
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.checkpoint.load.load_step import check_reads, plan_reads, report_damage
from hpc_train.checkpoint.load.read_schedule import LoadDestinations
from hpc_train.checkpoint.load.reader import TensorReader
from hpc_train.checkpoint.load.verified_reader import ShardReader
from hpc_train.interfaces import TensorShard

_OPEN_FILES = 1000
"""Shard files that are open at a time: a process may usually have 1,024."""


class TensorSource(Protocol):
    """Logical tensors whose parts can be read."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """The tensors, in the order in which reading them is cheapest."""

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Read `local` of every shard. Raises CheckpointError or OSError."""


class SavedStepTensors:
    """Tensors of a committed step, verified block by block as they are read (a TensorSource)."""

    def __init__(self, path: Path, manifest: Manifest, where: str) -> None:
        self._path, self._manifest, self._where = path, manifest, where
        self._source = ShardReader(path, manifest)
        self._open: set[int] = set()

    def __enter__(self) -> SavedStepTensors:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.__exit__()

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """All tensors of the step."""
        return self._manifest.step_layout.tensors

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Read the shards as load_step does, in one process."""
        plan = plan_reads(shards, self._manifest, self._where)
        self._make_room(set(plan["file"].tolist()))
        targets = LoadDestinations(shards)
        report_damage(self._where, lambda: check_reads(plan, self._source, targets))
        report_damage(self._where, lambda: TensorReader(self._source, shards, targets).run(plan))
        targets.finish()

    def _make_room(self, files: set[int]) -> None:
        """Close all files if these would be too many: a step may have more files than a process may open."""
        # ShardReader opens files when they are first read, and closes them all at its end.
        if len(self._open | files) > _OPEN_FILES:
            self._source.__exit__()
            self._source, self._open = ShardReader(self._path, self._manifest), set()
        self._open |= files


@dataclass(frozen=True)
class StateDictTensors:
    """Tensors of a state dict, which may be views of mapped files (a TensorSource)."""

    state: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    """The dtype that each tensor is converted to."""

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """The tensors in the order of the state dict."""
        return [
            SavedTensor(name, dtype_name(self.dtypes[name]), tuple(tensor.shape)) for name, tensor in self.state.items()
        ]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Copy the tensors into the shards, converted if the dtype differs."""
        for shard in shards:
            shard.local.copy_(self.state[shard.name][make_slices(shard.offset, shard.local.shape)])


def make_blank_shard(tensor: SavedTensor, rectangle: Rectangle) -> TensorShard:
    """Make a shard with uninitialised memory."""
    dtype = parse_dtype(tensor.dtype)
    return TensorShard(tensor.name, tensor.shape, dtype, rectangle.offset, torch.empty(rectangle.shape, dtype=dtype))


def read_whole_tensors(source: TensorSource, tensors: Sequence[SavedTensor]) -> dict[str, torch.Tensor]:
    """Read whole tensors into memory; returns them by name."""
    shards = [make_blank_shard(tensor, tensor.rectangle) for tensor in tensors]
    source.fill([shard for shard in shards if shard.local.numel()])
    return {shard.name: shard.local for shard in shards}


def read_cast(source: TensorSource, shards: Sequence[TensorShard]) -> None:
    """Read the shards, and cast those that are of another floating-point type than the source has them in."""
    dtypes = {tensor.name: parse_dtype(tensor.dtype) for tensor in source.tensors}
    read = [_retype(shard, dtypes.get(shard.name, shard.dtype)) for shard in shards]
    source.fill(read)
    for shard, stored in zip(shards, read, strict=True):
        if stored is not shard:
            shard.local.copy_(stored.local)


def _retype(shard: TensorShard, dtype: torch.dtype) -> TensorShard:
    """Return the shard, or where only the floating-point type differs, one of this type with memory of its own."""
    if dtype == shard.dtype or not (dtype.is_floating_point and shard.dtype.is_floating_point):
        return shard
    return replace(shard, dtype=dtype, local=torch.empty(shard.local.shape, dtype=dtype))
