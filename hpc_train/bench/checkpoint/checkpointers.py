"""The sides whose ranks commit one checkpoint together: ours, and torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hpc_train.api import Piece, World
from hpc_train.bench.checkpoint.result import DCP, OURS
from hpc_train.bench.checkpoint.sides import Side
from hpc_train.bench.checkpoint.state import State
from hpc_train.checkpoint import Saver, load, verify

_STEP = 1


def hpc_train(folder: Path, world: World, state: State) -> Side:
    """As a run saves: digests of every block, memory kept between saves, a commit of all ranks. Loading verifies."""
    pieces = [Piece(name, tuple(t.shape), t.dtype, (0,) * t.dim(), t) for name, t in state.items()]
    saver = Saver(folder, world)

    def wait() -> None:
        for saved in saver.wait():
            saved.wait()

    def begin(background: bool = True) -> Callable[[], None]:
        saver.background = background
        saver.save(_STEP, pieces, {})
        return wait

    def save() -> None:
        begin(background=False)()

    def sound() -> None:
        problems = verify(folder, _STEP, world)
        assert not problems, problems

    return Side(OURS, save, begin, lambda: load(folder, _STEP, pieces, world), sound)


def torch_dcp(folder: Path, world: World, state: State) -> Side:
    """dcp.save and dcp.load with their defaults, which synchronise the shard files."""
    alone = world.size == 1

    def save() -> None:
        dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=alone)

    def load() -> None:
        dcp.load(dict(state), storage_reader=FileSystemReader(folder), no_dist=alone)

    return Side(DCP, save, load=load)


def torch_dcp_async(folder: Path, world: World, state: State, cached: bool) -> Side:
    """dcp.async_save with its defaults; cached: with a stager that keeps its memory between saves."""
    group = None if world.size == 1 else dist.new_group(backend="gloo")
    plain = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    how: dict[str, Any] = {"async_stager": DefaultStager(plain)} if cached else {}
    if "no_dist" in inspect.signature(dcp.async_save).parameters:
        how["no_dist"] = world.size == 1

    def begin() -> Callable[[], object]:
        future: Any = dcp.async_save(state, storage_writer=FileSystemWriter(folder), process_group=group, **how)
        return future.result  # type: ignore[no-any-return]

    return Side("dcp_async_cached" if cached else "dcp_async", begin=begin)
