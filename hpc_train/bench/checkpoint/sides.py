"""Define the sides of `bench checkpoint`: ways to save this rank's tensors durably, and to load them.

Single-rank sides write the raw bytes (direct or buffered), or use torch.save and safetensors. In two sides all ranks
commit one checkpoint together: ours and torch.distributed.checkpoint (DCP). The tensors are those of a transformer and
its AdamW state, or of equal size. The cost of an operation is wall time, CPU time and bytes read.
"""

from __future__ import annotations

import gc
import inspect
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from hpc_train.bench.checkpoint.checkpoint import DCP, OUR_SIDE, RAW_BUFFERED, RAW_DIRECT, Samples
from hpc_train.checkpoint import Saver, load_step, verify_step
from hpc_train.checkpoint.storage.file_system import allocate_pages, open_descriptor, write_at_offset
from hpc_train.interfaces import TensorShard, World
from hpc_train.messages import all_gather_values

CHUNK_BYTES = 16 << 20
_PAGE_BYTES = 4096
_ARENA = 1 << 30
"""Bytes of the buffer of raw I/O, reused if the state is larger; far more than any processor's cache."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class CheckpointSide:
    """A way to save and load, in a folder of its own that is empty before each save."""

    name: str
    save: Callable[[], object] | None = None
    """Saves; returns when this rank's part is synchronised, or when the ranks have committed together."""
    begin: Callable[[], Callable[[], object]] | None = None
    """Starts an asynchronous save; returns when the tensors may change, with a function that waits for the rest."""
    load: Callable[[], object] | None = None
    """Loads into the tensors of the state, which already have these values."""
    verify: Callable[[], object] | None = None


def make_raw_direct(folder: Path, rank: int, state: Tensors) -> CheckpointSide:
    """Write and read as many bytes past the page cache, with one thread and one buffer.

    Raises OSError if the file system has no direct I/O.
    """
    path, size = folder / f"{rank}.raw", -(-count_bytes(state) // _PAGE_BYTES) * _PAGE_BYTES
    with open_descriptor(path, _NEW | os.O_DIRECT):
        # A trial: a file system without direct I/O refuses it here, before anything is measured.
        path.unlink()
    arena = _fill_buffers(min(size, _ARENA), state)

    def chunk(begin: int) -> memoryview:
        at = begin % _ARENA
        return arena[at : at + min(CHUNK_BYTES, size - begin)]

    def save() -> None:
        with open_descriptor(path, _NEW | os.O_DIRECT) as file:
            for begin in range(0, size, CHUNK_BYTES):
                write_at_offset(file, chunk(begin), begin)
            os.fsync(file)

    def load() -> None:
        with open_descriptor(path, os.O_RDONLY | os.O_DIRECT) as file:
            for begin in range(0, size, CHUNK_BYTES):
                _read_file(file, chunk(begin), begin)

    return CheckpointSide(RAW_DIRECT, save, load=load)


def _fill_buffers(size: int, state: Tensors) -> memoryview:
    """Allocate whole pages, huge ones if the kernel has them, filled with the first bytes of the state."""
    arena, at = memoryview(allocate_pages(size)), 0
    for tensor in state.values():
        count = min(tensor.nbytes, size - at)
        arena[at : at + count] = bytes_of_tensor(tensor)[:count]
        at += count
    return arena


def make_raw_buffered(folder: Path, rank: int, state: Tensors) -> CheckpointSide:
    """Write and read the bytes of one tensor after the other through the page cache, with fsync."""
    path = folder / f"{rank}.raw"

    def save() -> None:
        at = 0
        with open_descriptor(path, _NEW) as file:
            for tensor in state.values():
                write_at_offset(file, bytes_of_tensor(tensor), at)
                at += tensor.nbytes
            os.fsync(file)

    def load() -> None:
        at = 0
        with open_descriptor(path, os.O_RDONLY) as file:
            for tensor in state.values():
                _read_file(file, bytes_of_tensor(tensor), at)
                at += tensor.nbytes

    return CheckpointSide(RAW_BUFFERED, save, load=load)


def make_torch_save(folder: Path, rank: int, state: Tensors) -> CheckpointSide:
    """Save with torch.save and fsync, one file for each rank; load with torch.load(weights_only=True) and a copy."""
    path = folder / f"{rank}.pt"

    def save() -> None:
        torch.save(state, path)
        _sync_file(path)

    return CheckpointSide("torch_save", save, load=lambda: _copy_tensors(torch.load(path, weights_only=True), state))


def make_safetensors(folder: Path, rank: int, state: Tensors) -> CheckpointSide:
    """Save with safetensors and fsync, one file for each rank; load with a copy. Raises ImportError if missing."""
    if find_spec("safetensors") is None:
        raise ImportError("safetensors is not installed")
    from safetensors.torch import load_file, save_file

    path = folder / f"{rank}.safetensors"

    def save() -> None:
        save_file(state, path)
        _sync_file(path)

    return CheckpointSide("safetensors", save, load=lambda: _copy_tensors(load_file(path), state))


def _copy_tensors(source: Tensors, state: Tensors) -> None:
    for name, tensor in state.items():
        tensor.copy_(source[name])


def _read_file(file: int, memory: memoryview, begin: int) -> None:
    at = 0
    while at < len(memory):
        count = os.preadv(file, [memory[at:]], begin + at)
        assert count > 0, "the file is shorter than what was written"
        at += count


def _sync_file(path: Path) -> None:
    with open_descriptor(path, os.O_RDONLY) as file:
        os.fsync(file)


_STEP = 1


def make_hpc_train(folder: Path, world: World, state: Tensors) -> CheckpointSide:
    """Save and load as a run does: digest every block, reuse memory between saves, commit together; loads verify."""
    shards = [TensorShard(name, tuple(t.shape), t.dtype, (0,) * t.dim(), t) for name, t in state.items()]
    saver = Saver(folder, world)

    def wait() -> None:
        for saved in saver.wait():
            saved.wait()

    def begin(background: bool = True) -> Callable[[], None]:
        saver.background = background
        saver.save(_STEP, shards, {})
        return wait

    def save() -> None:
        begin(background=False)()

    def sound() -> None:
        problems = verify_step(folder, _STEP, world)
        assert not problems, problems

    return CheckpointSide(OUR_SIDE, save, begin, lambda: load_step(folder, _STEP, shards, world), sound)


def make_dcp(folder: Path, world: World, state: Tensors) -> CheckpointSide:
    """Save and load with dcp.save and dcp.load and their defaults, which synchronise the shard files."""
    alone = world.size == 1

    def save() -> None:
        dcp.save(state, storage_writer=FileSystemWriter(folder), no_dist=alone)

    def load() -> None:
        dcp.load(dict(state), storage_reader=FileSystemReader(folder), no_dist=alone)

    return CheckpointSide(DCP, save, load=load)


def make_dcp_async(folder: Path, world: World, state: Tensors, cached: bool) -> CheckpointSide:
    """Save with dcp.async_save and its defaults. cached: with a stager that reuses its memory between saves."""
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

    return CheckpointSide("dcp_async_cached" if cached else "dcp_async", begin=begin)


Tensors = dict[str, Tensor]
TensorShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor, by name."""
_LAYERS = 3
_PARAMETERS = 36.25
"""Parameters of the transformer below, in units of its hidden size squared."""
_BYTES = 14
"""Bytes of a parameter: bfloat16, and a master copy and two moments in float32."""


def make_tensors(size: int, tensors: int | None, rank: int) -> Tensors:
    """Make tensors of about `size` bytes of random finite values, named after the rank. tensors: see tensor_shapes."""
    generator = torch.Generator().manual_seed(rank)
    shapes = tensor_shapes(size, tensors)
    return {f"rank{rank}.{name}": _random_tensor(shape, dtype, generator) for name, (shape, dtype) in shapes.items()}


def tensor_shapes(size: int, tensors: int | None) -> TensorShapes:
    """Return shapes of about `size` bytes together.

    tensors: number of float32 tensors of equal size; None: those of a transformer with its AdamW state.
    """
    return _make_equal_shapes(size, tensors) if tensors else _list_transformer_shapes(size)


def _make_equal_shapes(size: int, tensors: int) -> TensorShapes:
    elements = max(1, size // tensors // 4)
    return {f"tensor.{index}": ((elements,), torch.float32) for index in range(tensors)}


def _list_transformer_shapes(size: int) -> TensorShapes:
    """Return the shapes of a Llama of three layers with grouped-query attention and a small vocabulary."""
    hidden = max(4, isqrt(int(size / _BYTES / _PARAMETERS)) // 4 * 4)
    key, feed_forward = hidden // 4, hidden * 11 // 4
    block = {
        "attention.query": (hidden, hidden),
        "attention.key": (key, hidden),
        "attention.value": (key, hidden),
        "attention.output": (hidden, hidden),
        "feed_forward.gate": (feed_forward, hidden),
        "feed_forward.down": (hidden, feed_forward),
        "feed_forward.up": (feed_forward, hidden),
        "attention_norm": (hidden,),
        "feed_forward_norm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (4 * hidden, hidden)}
    for layer in range(_LAYERS):
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    tensors: TensorShapes = {}
    for name, shape in shapes.items():
        tensors[name] = shape, torch.bfloat16
        tensors |= {f"optim.{kind}.{name}": (shape, torch.float32) for kind in ("master", "exp_avg", "exp_avg_sq")}
    return tensors


def _random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Make a tensor of random bits without the largest exponents, so that all values are finite."""
    # Random bits do not compress, as trained weights hardly do;
    # the mask clears the sign and the top bit of the exponent.
    bits, mask = (torch.int16, 0x3FFF) if dtype is torch.bfloat16 else (torch.int32, 0x3FFFFFFF)
    return torch.empty(shape, dtype=bits).random_(generator=generator).bitwise_and_(mask).view(dtype)


def count_bytes(state: Tensors) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def bytes_of_tensor(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's memory."""
    memory: NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return memory.data


OperationCost = tuple[float, float, float]
"""(wall seconds, CPU seconds, bytes read) of this rank."""


def time_operation(work: Callable[[], Any], then: Callable[[Any], object] = lambda result: None) -> OperationCost:
    """Time an operation that all ranks begin together. then: called with its result, untimed."""
    # So that no collection of an earlier side falls into this measurement.
    gc.collect()
    wait_for_all()
    before, wall, cpu = count_bytes_read(), time.perf_counter(), time.process_time()
    result = work()
    # Wall time first: reading the other counters takes a system call each.
    cost = time.perf_counter() - wall, time.process_time() - cpu, count_bytes_read() - before
    then(result)
    return cost


def combine_ranks(mine: list[OperationCost]) -> Samples:
    """Combine the costs of all ranks: wall time of the slowest, CPU time and bytes of all. mine: of every round."""
    ranks = gather_values_of_ranks(mine)
    return np.stack([ranks[..., 0].max(axis=0), *ranks[..., 1:].sum(axis=0).T], axis=1)


def count_bytes_read() -> int:
    """Return the bytes that this process has read with any system call (proc_pid_io(5), rchar)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def gather_values_of_ranks(mine: Any) -> Samples:
    """Gather the value of every rank, in rank order."""
    values = all_gather_values(mine) if dist.is_initialized() else [mine]
    return np.array(values, dtype=np.float64)


def wait_for_all() -> None:
    """Wait for all ranks, if there are several."""
    if dist.is_initialized():
        dist.barrier()


def drop_page_cache(folder: Path) -> None:
    """Drop all files below a folder from the page cache."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open_descriptor(path, os.O_RDONLY) as file:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
