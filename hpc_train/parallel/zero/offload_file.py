"""Tensors whose memory is a file on the node's disk (ZeRO-Infinity: Rajbhandari et al. 2021, arXiv:2104.07857)."""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpc_train.errors import UserError

log = logging.getLogger(__name__)


_LINE = 64
"""Tensors begin at multiples of this many bytes."""
_LEAST, _MOST = 2**20, 2**30
"""Size of a file in bytes, where one tensor does not need more: each is as large as all before it."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    mapped: mmap.mmap
    offset: int
    size: int


class FileMemory:
    """Gives out tensors that lie in files mapped into memory: the kernel reads pages when they are used.

    What is not in use costs no memory that could not be taken back at once. The files have no name, so that they are
    gone with the process, however it ends.
    """

    def __init__(self, folder: str | None) -> None:
        """folder: on a disk of the node; None: the temporary directory. Raises UserError if it is not there."""
        self.folder = Path(folder or tempfile.gettempdir())
        self._places: dict[int, _Place] = {}
        """By the address of a tensor's storage."""
        self._mapped: mmap.mmap | None = None
        self._used = self._total = 0
        if not self.folder.is_dir():
            raise UserError(f"parallel.offload.dir={self.folder}: no such folder on this node")
        if is_in_memory(self.folder):
            log.warning("parallel.offload.dir=%s: is kept in memory itself; offload to it saves nothing", self.folder)

    def take(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in a file, contiguous. Raises UserError if the disk is full."""
        if tensor.numel() == 0:
            return tensor.contiguous()
        place = self._room(tensor.nbytes)
        copy = torch.frombuffer(place.mapped, dtype=tensor.dtype, count=tensor.numel(), offset=place.offset)
        self._places[copy.data_ptr()] = place
        copy.copy_(tensor.flatten())
        self.drop(copy)
        return copy.view(tensor.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these."""
        return tensor.untyped_storage().data_ptr() in self._places

    def drop(self, tensor: Tensor) -> None:
        """Take the pages of a tensor, if it is one of these, out of this process; they come back when they are used."""
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is not None:
            begin = place.offset - place.offset % mmap.PAGESIZE
            place.mapped.madvise(mmap.MADV_DONTNEED, begin, place.offset + place.size - begin)

    def _room(self, size: int) -> _Place:
        if self._mapped is None or self._used + size > len(self._mapped):
            self._mapped = self._map(max(size, min(self._total, _MOST), _LEAST))
            self._used, self._total = 0, self._total + len(self._mapped)
        place = _Place(self._mapped, self._used, size)
        self._used += math.ceil(size / _LINE) * _LINE
        return place

    def _map(self, size: int) -> mmap.mmap:
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="hpc_train-offload-") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk shows here and not as a signal in a step
                return mmap.mmap(file.fileno(), size)
        except OSError as error:
            why = os.strerror(error.errno or 0)
            raise UserError(
                f"parallel.offload.dir={self.folder}: {why}, for {size / 2**20:.3g} MiB more; give a folder on a disk "
                "that has room, or leave it out"
            ) from error


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a folder lies on a file system without a disk."""
    best, kind = "", ""
    place = str(folder.resolve())
    for line in mounts.read_text().splitlines() if mounts.exists() else []:
        _, point, name, *_ = line.split(" ")
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind in ("tmpfs", "ramfs")
