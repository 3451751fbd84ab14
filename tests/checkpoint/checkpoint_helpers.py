"""Worlds, pieces and states that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hpc_train.checkpoint import load_step, save_step
from hpc_train.interfaces import TensorShard, World

State = dict[str, Tensor]


def alone() -> World:
    """Return the world of one process without a process group; checkpoints never use the mesh."""
    return World(0, 1, 0, torch.device("cpu"), cast(Any, None), 0, 1)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a tensor of random bits, which include NaN payloads, subnormals and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def state(seed: int) -> State:
    """Return a small training state: a matrix, a vector and a scalar of several types, with dimensions that no number
    of ranks divides.
    """
    return {
        "blocks.0.weight": random_bits((7, 5), torch.float32, seed),
        "blocks.0.bias": random_bits((7,), torch.bfloat16, seed + 1),
        "optim.exp_avg.blocks.0.weight": random_bits((7, 5), torch.float64, seed + 2),
        "optim.step.blocks.0.weight": random_bits((), torch.int64, seed + 3),
    }


def cut(size: int, index: int, parts: int) -> slice:
    """Return the bounds of part `index` of a dimension that is cut as evenly as possible; the part may be empty."""
    return slice(size * index // parts, size * (index + 1) // parts)


def sharded(tensors: State, dim: int, index: int, parts: int) -> list[TensorShard]:
    """Return one rank's pieces: tensors that have dimension `dim` are cut along it, the others are replicated."""
    return [_shard(name, tensor, dim, index, parts) for name, tensor in tensors.items()]


def _shard(name: str, tensor: Tensor, dim: int, index: int, parts: int) -> TensorShard:
    if tensor.dim() <= dim:
        return TensorShard(name, tuple(tensor.shape), tensor.dtype, (0,) * tensor.dim(), tensor.clone(), replica=index)
    where = cut(tensor.shape[dim], index, parts)
    offset = tuple(where.start if d == dim else 0 for d in range(tensor.dim()))
    local = tensor.narrow(dim, where.start, where.stop - where.start).clone()
    return TensorShard(name, tuple(tensor.shape), tensor.dtype, offset, local)


def whole(tensors: State) -> list[TensorShard]:
    """Return the pieces of a rank that has every tensor whole."""
    return sharded(tensors, 0, 0, 1)


def blank(pieces: Iterable[TensorShard]) -> list[TensorShard]:
    """Return pieces with the same rectangles and empty tensors, to load into."""
    return [TensorShard(p.name, p.shape, p.dtype, p.offset, torch.zeros_like(p.local), p.replica) for p in pieces]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether shape, type and memory are equal: NaN equals itself here, and -0.0 differs from 0.0."""
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*as_bytes)


def same_pieces(a: Iterable[TensorShard], b: Iterable[TensorShard]) -> bool:
    """Return whether all pieces are equal bit for bit."""
    return all(p.name == q.name and same_bits(p.local, q.local) for p, q in zip(a, b, strict=True))


def save_alone(directory: Path, step: int, tensors: State, extra: dict[str, Any] | None = None) -> None:
    """Save and commit a step from one process."""
    save_step(directory, step, whole(tensors), extra or {}, alone()).wait()


def holds(directory: Path, step: int, tensors: State) -> bool:
    """Return whether a step loads with exactly these bits."""
    pieces = blank(whole(tensors))
    load_step(directory, step, pieces, alone())
    return same_pieces(pieces, whole(tensors))


def names(directory: Path) -> list[str]:
    """Return the names in a directory of checkpoints."""
    return sorted(path.name for path in directory.iterdir())
