"""Who makes how much memory and when it is freed, counted, and from that what is held at the worst moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_train._torch_rehearsal import is_in_backward, storage_address, tensors_in

MEMORY_KINDS = ("parameters", "optimizer", "gradients", "gathered", "host", "forward", "backward", "other")
"""What memory is for. gradients: whole ones, and what is left of them when they are reduced. gathered: whole parameters
that fully_shard has put together. host: what a real rank offloads to its node, which is none of the device's. forward,
backward: made there and none of the others; activations, and what backward needs beside them."""
_FORWARD, _BACKWARD, _OTHER = (MEMORY_KINDS.index(kind) for kind in MEMORY_KINDS[-3:])
_ON_DEVICE = np.array([kind != "host" for kind in MEMORY_KINDS])
_OFTEN = 16
"""New memories between two looks for whole gradients, which live for longer."""


@dataclass(frozen=True)
class MemoryMoment:
    """Bytes by kind at one moment."""

    bytes: dict[str, int]
    """Bytes by kind (KINDS)."""

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return sum(size for kind, size in self.bytes.items() if kind != "host")


class MemoryLedger:
    """An entry for every change. Scratch memory inside of kernels is not seen, nor what an allocator rounds up."""

    def __init__(self) -> None:
        self._memory: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """By the address of what is alive: its number here."""
        self._sizes: list[int] = []
        self._kinds: list[int] = []
        self._changes: list[tuple[int, int]] = []
        """(number, bytes)"""
        self._whole_gradients: Callable[[], Iterable[Tensor]] | None = None
        """In a step."""

    def begin_step(self, whole_gradients: Callable[[], Iterable[Tensor]]) -> int:
        """Count new tensors as made in a forward or a backward from here on; return the moment, for `worst` and `most`.

        whole_gradients: asked now and then, because they are gone when the step has ended.
        """
        self._whole_gradients = whole_gradients
        return len(self._changes)

    def see(self, out: Any, given: Sequence[Tensor]) -> None:
        """The result of an operator, and the tensors that it was given: memory of these is not new."""
        for tensor in tensors_in(out):
            if isinstance(tensor, DTensor) or tensor.device.type == "meta":
                continue  # what a DTensor holds has an entry of its own
            storage = tensor.untyped_storage()
            key = storage_address(storage)
            if key not in self._memory and all(key != storage_address(tensor.untyped_storage()) for tensor in given):
                self._add(storage, key)
                if self._whole_gradients is not None and len(self._sizes) % _OFTEN == 0:
                    self.label(self._whole_gradients(), "gradients")

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A memory that has another size now."""
        entry = self._memory.get(storage_address(storage))
        if entry is not None:
            self._change(entry[0], storage.nbytes())

    def label(self, tensors: Iterable[Tensor], kind: str) -> int:
        """Say what the memory of some tensors is for, since it was made; returns its bytes as it is now."""
        numbers = {self._number(tensor.untyped_storage()) for tensor in tensors}
        for number in numbers:
            self._kinds[number] = MEMORY_KINDS.index(kind)
        return sum(self._sizes[number] for number in numbers)

    def worst(self, since: int = 0) -> MemoryMoment:
        """Return the moment with the most bytes on the device, from moment `since` until now."""
        totals = self._over_time()[since:]
        return self._moment(totals[int(totals[:, _ON_DEVICE].sum(1).argmax())])

    def most(self, kind: str, since: int = 0) -> int:
        """Bytes of one kind when most of it was held."""
        return int(self._over_time()[since:, MEMORY_KINDS.index(kind)].max())

    def _over_time(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(changes, kinds) bytes."""
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
