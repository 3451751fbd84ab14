"""Count every allocation and release of tensor memory during a rehearsal, and find the peak by kind of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_train._torch.rehearsal import is_in_backward, is_wrapper, storage_address, tensors_in

MEMORY_KINDS = ("parameters", "optimizer", "gradients", "gathered", "host", "forward", "backward", "other")
"""What memory is used for.

gradients: whole gradients, and their shards once they are reduced. gathered: whole parameters that fully_shard has
gathered. host: what a real rank offloads to host memory, which does not count as the device's. forward, backward:
anything else that is allocated in forward (activations) or in backward.
"""
_FORWARD, _BACKWARD, _OTHER = (MEMORY_KINDS.index(kind) for kind in MEMORY_KINDS[-3:])
_ON_DEVICE = np.array([kind != "host" for kind in MEMORY_KINDS])
_OFTEN = 16
"""Allocations between two searches for whole gradients, which live longer than that."""


@dataclass(frozen=True)
class MemoryMoment:
    """Bytes by kind at one moment."""

    bytes: dict[str, int]
    """Bytes by kind (MEMORY_KINDS)."""

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return sum(size for kind, size in self.bytes.items() if kind != "host")


class MemoryLedger:
    """Records every change of memory. Scratch memory inside kernels and rounding by the allocator are not seen."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """Number of each living allocation, by its address."""
        self._sizes: list[int] = []
        self._kinds: list[int] = []
        self._changes: list[tuple[int, int]] = []
        """Every change, as (number of the allocation, its bytes from now on)."""
        self._whole_gradients: Callable[[], Iterable[Tensor]] | None = None
        """Returns the whole gradients; set while a step runs."""

    def begin_step(self, whole_gradients: Callable[[], Iterable[Tensor]]) -> int:
        """Count new tensors as made in a forward or a backward from here on; return the moment, for `worst` and `most`.

        whole_gradients: called now and then during the step, because whole gradients are freed before it ends.
        """
        self._whole_gradients = whole_gradients
        return len(self._changes)

    def record(self, out: Any, given: Sequence[Tensor]) -> None:
        """Record the memory of an operator's result, unless it is that of one of its arguments (a view or in-place)."""
        for tensor in tensors_in(out):
            if is_wrapper(tensor) or tensor.device.type == "meta":
                continue  # what a DTensor or a tensor in 8 bits holds has an entry of its own
            storage = tensor.untyped_storage()
            key = storage_address(storage)
            if key not in self._memory and all(key != storage_address(tensor.untyped_storage()) for tensor in given):
                self._add(storage, key)
                if self._whole_gradients is not None and len(self._sizes) % _OFTEN == 0:
                    self.label(self._whole_gradients(), "gradients")

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage has changed its size."""
        entry = self._memory.get(storage_address(storage))
        if entry is not None:
            self._change(entry[0], storage.nbytes())

    def label(self, tensors: Iterable[Tensor], kind: str) -> int:
        """Set the kind of some tensors' memory, from their allocation on; returns the bytes they have now."""
        numbers = {self._number(tensor.untyped_storage()) for tensor in tensors}
        for number in numbers:
            self._kinds[number] = MEMORY_KINDS.index(kind)
        return sum(self._sizes[number] for number in numbers)

    def worst(self, since: int = 0) -> MemoryMoment:
        """Return the moment with the most bytes on the device, from moment `since` until now."""
        totals = self._over_time()[since:]
        return self._moment(totals[int(totals[:, _ON_DEVICE].sum(1).argmax())])

    def most(self, kind: str, since: int = 0) -> int:
        """Return the peak of one kind of memory, in bytes."""
        return int(self._over_time()[since:, MEMORY_KINDS.index(kind)].max())

    def _over_time(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the bytes of each kind after each change, [changes, kinds]."""
        if not self._changes:
            return np.zeros((1, len(MEMORY_KINDS)), np.int64)
        numbers, deltas = np.array(self._changes, np.int64).T
        table = np.zeros((len(deltas), len(MEMORY_KINDS)), np.int64)
        table[np.arange(len(deltas)), np.array(self._kinds)[numbers]] = deltas
        return table.cumsum(0)

    def _moment(self, row: np.ndarray[Any, np.dtype[np.int64]]) -> MemoryMoment:
        return MemoryMoment({kind: int(size) for kind, size in zip(MEMORY_KINDS, row, strict=True)})

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage_address(storage) not in self._memory:
            self._add(storage, storage_address(storage))
        return self._memory[storage_address(storage)][0]

    def _add(self, storage: torch.UntypedStorage, key: int) -> None:
        number = len(self._sizes)
        self._sizes.append(0)
        self._kinds.append(_OTHER if self._whole_gradients is None else _BACKWARD if is_in_backward() else _FORWARD)
        self._change(number, storage.nbytes())
        self._memory[key] = number, weakref.ref(storage, lambda _: self._gone(key, number))

    def _gone(self, key: int, number: int) -> None:
        self._change(number, 0)
        if self._memory.get(key, (None,))[0] == number:
            del self._memory[key]

    def _change(self, number: int, size: int) -> None:
        self._changes.append((number, size - self._sizes[number]))
        self._sizes[number] = size
