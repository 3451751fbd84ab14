"""Tensors as views of a mapped file: nothing is read until it is used."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.formats.pickle_values import PickleError
from hpc_train.checkpoint.formats.torch_pickle import StridedTensor


@dataclass(frozen=True)
class FilePart:
    """A byte range of an open file that holds one object of torch.save."""

    file: BinaryIO
    begin: int
    size: int

    def read(self, begin: int, size: int) -> bytes:
        """Read exactly `size` bytes. Raises PickleError if there are not so many."""
        if not 0 <= begin <= begin + size <= self.size:
            raise PickleError("a place past the end of the file")
        data = os.pread(self.file.fileno(), size, self.begin + begin)
        if len(data) != size:
            raise PickleError("the end of the file came too early")
        return data


class MappedFile:
    """A private memory mapping of a file: a write to a tensor does not reach the file."""

    def __init__(self, path: Path, size: int) -> None:
        self._storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)

    def view(self, tensor: StridedTensor, begin: int = 0) -> torch.Tensor:
        """Return a tensor in the file. begin: byte of the file that the tensor's place is relative to."""
        start = begin + tensor.begin
        stop = start + tensor.extent
        if not 0 <= start <= stop <= self._storage.nbytes():
            raise CheckpointError("a tensor past the end of the file")
        span = self._storage[start:stop]
        if start % tensor.dtype.itemsize:
            span = span.clone()  # processors and kernels expect elements aligned to their size
        found = torch.empty(0, dtype=tensor.dtype)
        try:
            return found.set_(span, 0, tensor.shape, tensor.stride)
        except RuntimeError as error:
            raise CheckpointError(f"a tensor of shape {tensor.shape} cannot be made ({error})") from None
