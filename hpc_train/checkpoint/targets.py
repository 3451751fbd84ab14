"""The memory of the pieces that are loaded, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.api import Piece

Buffer = memoryview | NDArray[np.uint8]
_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Runs of so few bytes are copied as numbers, whatever they mean."""


class Targets:
    """Of all pieces. Thousands of small ones are looked at together, as most are filled by their addresses alone."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._locals = [piece.local for piece in pieces]
        assert not any(map(Tensor.is_conj, self._locals)), "its memory is not its values"
        assert not any(map(Tensor.is_neg, self._locals)), "its memory is not its values"
        whole = list(map(Tensor.is_contiguous, self._locals))
        self._made = {index: Target(self._locals[index]) for index, it in enumerate(whole) if not it}
        self.addresses = np.array(list(map(Tensor.data_ptr, self._locals)), dtype=np.int64)
        """[pieces]: of their memory; 0 for those on a GPU."""
        for index in self._made:
            self.addresses[index] = self._made[index].address
        self.addresses[~np.array([it.is_cpu for it in self._locals], dtype=np.bool_)] = 0
        self.sizes = np.array(list(map(attrgetter("nbytes"), self._locals)), dtype=np.int64)
        """[pieces]: their bytes."""

    def __getitem__(self, piece: int) -> Target:
        if piece not in self._made:
            self._made[piece] = Target(self._locals[piece])
        return self._made[piece]

    def finish(self) -> None:
        """When every byte has come."""
        for it in self._made.values():
            it.finish()


class Target:
    """Where the bytes of a piece go: its own memory, or, where that is not contiguous, a copy until `finish`."""

    def __init__(self, local: Tensor) -> None:
        self._local = self._whole = local
        if not local.is_contiguous():
            self._whole = torch.empty_like(local, memory_format=torch.contiguous_format)

    @cached_property
    def memory(self) -> NDArray[np.uint8] | None:
        """None on a GPU."""
        return self._bytes.numpy() if self._whole.is_cpu else None

    @property
    def address(self) -> int:
        """Of the memory."""
        return self._whole.data_ptr()

    @cached_property
    def _bytes(self) -> Tensor:
        return self._whole.detach().reshape(-1).view(torch.uint8)

    def put(self, at: int, step: int, runs: NDArray[Any]) -> None:
        """Copy runs, as `view` gives them, to bytes `at`, `at + step`, ... of the piece."""
        count, run = len(runs), runs[:1].nbytes
        if self.memory is not None:
            view(self.memory, at, count, step, run)[...] = runs
            return
        to = self._bytes.as_strided((count, run), (step, 1), self._bytes.storage_offset() + at)
        to.copy_(torch.from_numpy(np.ascontiguousarray(runs).view(np.uint8).reshape(count, run)))

    def finish(self) -> None:
        """When every byte has come."""
        if self._whole is not self._local:
            self._local.detach().copy_(self._whole)


def view(buffer: Buffer, first: int, count: int, stride: int, run: int) -> NDArray[Any]:
    """Evenly spaced runs of a buffer: [count, run] bytes, or [count] numbers where a run is as long as one."""
    if count == 1 or run not in _BITS:
        return np.ndarray((count, run), np.uint8, buffer, first, (stride, 1))
    return np.ndarray((count,), _BITS[run], buffer, first, (stride,))
