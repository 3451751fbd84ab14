"""The memory that holds a shard file's image from the moment of the save until it is on the disk."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.api import Piece
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.image import ALIGNMENT, Image

_SLICE = 16 << 20
"""Bytes of one copy: small enough to be shared out evenly over threads."""
_Bytes = NDArray[np.uint8]


class Arena:
    """Page-aligned memory, kept from save to save; page-locked where there are GPUs, so that their copies are fast."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def reserve(self, size: int) -> memoryview:
        """At least `size` bytes, whole pages. Raises CheckpointError where there is no memory for it."""
        if self._memory is None or len(self._memory) < size:
            self.release()
            try:
                self._memory = _pages(max(1, -(-size // ALIGNMENT)) * ALIGNMENT)
            except OSError as error:
                raise CheckpointError(f"no memory for a copy of {size} bytes ({error.strerror})") from error
        return memoryview(self._memory)

    def spare(self) -> None:
        """What is in it is no longer needed: the kernel may take the memory, and does where memory is short.

        What it does not take is as fast as ever the next time, while new memory would cost several times the copy.
        Page-locked memory cannot be taken: that is given back at once. No view of it may be in use.
        """
        if torch.cuda.is_available() or self._memory is None:
            self.release()
            return
        try:
            self._memory.madvise(mmap.MADV_FREE)
        except OSError:
            self.release()

    def release(self) -> None:
        """Give the memory back. No view of it may be in use."""
        if self._memory is not None:
            if torch.cuda.is_available():
                torch.cuda.cudart().cudaHostUnregister(_address(self._memory))  # type: ignore[no-untyped-call]
            self._memory.close()
            self._memory = None


def fill(memory: memoryview, image: Image, pieces: Sequence[Piece], threads: int) -> None:
    """Copy the structure and every tensor to its place. When this returns the tensors may change."""
    for begin, content in image.structure:
        memory[begin : begin + len(content)] = content
    whole = np.frombuffer(memory, dtype=np.uint8)
    placed = list(zip((piece.local.detach() for piece in pieces), image.places, strict=True))
    slices = [it for tensor, place in placed if not tensor.is_cuda for it in _slices(whole, place, _bytes(tensor))]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_copy_all, _shares(slices)))
    on_gpu = [(tensor, place) for tensor, place in placed if tensor.is_cuda]
    for tensor, place in on_gpu:
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(whole[place : place + source.numel()]).copy_(source, non_blocking=True)
    if on_gpu:
        torch.cuda.synchronize()


def _slices(whole: _Bytes, place: int, source: _Bytes) -> Iterator[tuple[_Bytes, _Bytes]]:
    """(target, source) of at most _SLICE bytes each."""
    for at in range(0, len(source), _SLICE):
        part = source[at : at + _SLICE]
        yield whole[place + at : place + at + len(part)], part


def _shares(slices: list[tuple[_Bytes, _Bytes]]) -> list[list[tuple[_Bytes, _Bytes]]]:
    """Slices that a thread copies in one go: about _SLICE bytes, be it of one tensor or of thousands."""
    shares: list[list[tuple[_Bytes, _Bytes]]] = []
    room = 0
    for it in slices:
        if room < len(it[0]):
            shares.append([])
            room = _SLICE
        shares[-1].append(it)
        room -= len(it[0])
    return shares


def _copy_all(slices: list[tuple[_Bytes, _Bytes]]) -> None:
    for target, source in slices:
        np.copyto(target, source)


def _bytes(tensor: Tensor) -> _Bytes:
    """A tensor's memory as one row of bytes."""
    row: _Bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return row


def _pages(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: small pages then
        memory.madvise(mmap.MADV_HUGEPAGE)
    if torch.cuda.is_available():  # page-locked: without it copies still work, at a part of the speed
        torch.cuda.cudart().cudaHostRegister(_address(memory), size, 0)  # type: ignore[no-untyped-call]
    return memory


def _address(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data
