"""The memory that holds a shard file's image from the moment of the save until it is on the disk."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import torch

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.image import ALIGNMENT


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


def _pages(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: small pages then
        memory.madvise(mmap.MADV_HUGEPAGE)
    if torch.cuda.is_available():  # page-locked: without it copies still work, at a part of the speed
        torch.cuda.cudart().cudaHostRegister(_address(memory), size, 0)  # type: ignore[no-untyped-call]
    return memory


def _address(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data
