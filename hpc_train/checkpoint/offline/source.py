"""Tensors that can be read a rectangle at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from hpc_train.api import Piece
from hpc_train.checkpoint.dtypes import dtype_name, dtype_of
from hpc_train.checkpoint.holdings import Tensor
from hpc_train.checkpoint.loading import check_reads, plan_reads, undamaged
from hpc_train.checkpoint.manifest import Manifest
from hpc_train.checkpoint.reading import Reader
from hpc_train.checkpoint.rectangle import Rectangle
from hpc_train.checkpoint.source import Source
from hpc_train.checkpoint.targets import Targets

_OPEN_FILES = 1000


class Tensors(Protocol):
    """Logical tensors, and a way to read parts of them."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """In the order in which reading them is cheapest."""

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Read into `local` of every piece. Raises CheckpointError or OSError."""


class Saved:
    """Of a committed step, verified block by block as they are read."""

    def __init__(self, path: Path, manifest: Manifest, where: str) -> None:
        self._path, self._manifest, self._where = path, manifest, where
        self._source = Source(path, manifest)
        self._open: set[int] = set()

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.__exit__()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All of the step."""
        return self._manifest.holdings.tensors

    def fill(self, pieces: Sequence[Piece]) -> None:
        """As loading does, in one process."""
        plan = plan_reads(pieces, self._manifest, self._where)
        self._make_room(set(plan["file"].tolist()))
        targets = Targets(pieces)
        undamaged(self._where, lambda: check_reads(plan, self._source, targets))
        undamaged(self._where, lambda: Reader(self._source, pieces, targets).run(plan))
        targets.finish()

    def _make_room(self, files: set[int]) -> None:
        """A process may not have as many open files as a step has."""
        if len(self._open | files) > _OPEN_FILES:
            self._source.__exit__()
            self._source, self._open = Source(self._path, self._manifest), set()
        self._open |= files


@dataclass(frozen=True)
class Held:
    """Of a state dict, whose tensors may be views of mapped files."""

    state: Mapping[str, torch.Tensor]
    dtypes: Mapping[str, torch.dtype]
    """That they are to have."""

    @property
    def tensors(self) -> Sequence[Tensor]:
        """In the order of the state dict."""
        return [Tensor(name, dtype_name(self.dtypes[name]), tuple(it.shape)) for name, it in self.state.items()]

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Copied, and converted where the type differs."""
        for piece in pieces:
            spans = zip(piece.offset, piece.local.shape, strict=True)
            where = tuple(slice(begin, begin + size) for begin, size in spans)
            piece.local.copy_(self.state[piece.name][where])


def blank(tensor: Tensor, rectangle: Rectangle) -> Piece:
    """A piece to be filled."""
    dtype = dtype_of(tensor.dtype)
    return Piece(tensor.name, tensor.shape, dtype, rectangle.offset, torch.empty(rectangle.shape, dtype=dtype))


def whole(source: Tensors, tensors: Sequence[Tensor]) -> dict[str, torch.Tensor]:
    """These tensors, whole, in memory."""
    pieces = [blank(tensor, tensor.rectangle) for tensor in tensors]
    source.fill([piece for piece in pieces if piece.local.numel()])
    return {piece.name: piece.local for piece in pieces}
