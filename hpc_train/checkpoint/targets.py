"""The memory of the pieces that are loaded, as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_train.api import Piece

Buffer = memoryview | NDArray[np.uint8]
_BITS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
"""Runs of so few bytes are copied as numbers, whatever they mean."""


class Target:
    """Where the bytes of a piece go: its own memory, or, where that is not contiguous, a copy until `finish`."""

    def __init__(self, piece: Piece) -> None:
        self._local = piece.local.detach()
        whole = self._local.is_contiguous()
        self._whole = self._local if whole else torch.empty_like(self._local, memory_format=torch.contiguous_format)
        self._bytes = self._whole.reshape(-1).view(torch.uint8)
        self.memory: NDArray[np.uint8] | None = self._bytes.numpy() if self._bytes.device.type == "cpu" else None
        """None on a GPU."""

    def put(self, at: int, step: int, runs: NDArray[Any]) -> None:
        """Copy runs, as `view` gives them, to bytes `at`, `at + step`, ... of the piece."""
        count, run = len(runs), runs[:1].nbytes
        if self.memory is not None:
            view(self.memory, at, count, step, run)[...] = runs
            return
        to = self._bytes.as_strided((count, run), (step, 1), self._bytes.storage_offset() + at)
        to.copy_(torch.from_numpy(np.ascontiguousarray(runs).view(np.uint8).reshape(count, run)))

    def put_run(self, at: int, run: NDArray[np.uint8]) -> None:
        """Copy one run to byte `at`: what thousands of small tensors need."""
        if self.memory is not None:
            self.memory[at : at + len(run)] = run
        else:
            self.put(at, len(run), run[None])

    def finish(self) -> None:
        """When every byte has come."""
        if self._whole is not self._local:
            self._local.copy_(self._whole)


def view(buffer: Buffer, first: int, count: int, stride: int, run: int) -> NDArray[Any]:
    """Evenly spaced runs of a buffer: [count, run] bytes, or [count] numbers where a run is as long as one."""
    if count == 1 or run not in _BITS:
        return np.ndarray((count, run), np.uint8, buffer, first, (stride, 1))
    return np.ndarray((count,), _BITS[run], buffer, first, (stride,))
