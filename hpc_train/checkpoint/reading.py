"""Reads of shard files, verified block by block, into the tensors that they are for."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.checkpoint.digests import BLOCK, Digests, first_wrong
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.image import ALIGNMENT
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.rectangle import Rectangle
from hpc_train.checkpoint.transfer import Copy, Read

THREADS = 2
_BITS = {size: np.dtype(kind) for size, kind in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "V16"))}
"""Elements of so many bytes, whatever they mean."""


class Reader:
    """Open shard files of one step, and a buffer a thread."""

    def __init__(self, directory: Path, files: Sequence[ShardFile], tables: Mapping[int, Digests]) -> None:
        self._directory, self._files, self._tables = directory, files, tables
        self._descriptors: dict[int, tuple[int, bool]] = {}
        self._lock, self._local = threading.Lock(), threading.local()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor, _ in self._descriptors.values():
            os.close(descriptor)

    def run(self, reads: Sequence[Read]) -> None:
        """Read, verify and copy. Raises CheckpointError or OSError; what was copied until then stays."""
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in pool.map(self._one, reads):
                pass

    def _one(self, read: Read) -> None:
        data = self._bytes(read)
        begin = read.begin // BLOCK
        wrong = first_wrong(data, self._tables[read.file][begin : begin + -(-len(data) // BLOCK)])
        if wrong is not None:
            raise self._damaged(read, (begin + wrong) * BLOCK)
        for copy in read.copies:
            _scatter(data, read.begin, copy)

    def _bytes(self, read: Read) -> memoryview:
        """The bytes of a read, in this thread's buffer."""
        descriptor, direct = self._open(read.file)
        size = read.end - read.begin
        buffer = self._buffer(size)
        at = 0
        while at < size:
            # Direct I/O wants whole pages, also at the end of the file, where it then reads less.
            count = os.preadv(descriptor, [buffer[at : -(-size // ALIGNMENT) * ALIGNMENT]], read.begin + at)
            if count == 0:
                name = self._files[read.file].name
                raise CheckpointError(f"{name}: it ends at byte {read.begin + at}, before what was committed")
            at += count
            if direct and at < size and at % ALIGNMENT:
                at = at // ALIGNMENT * ALIGNMENT
        return buffer[:size]

    def _buffer(self, size: int) -> memoryview:
        have: mmap.mmap | None = getattr(self._local, "memory", None)
        if have is None or len(have) < size:
            have = self._local.memory = mmap.mmap(-1, -(-size // ALIGNMENT) * ALIGNMENT)
        return memoryview(have)

    def _open(self, file: int) -> tuple[int, bool]:
        with self._lock:
            if file not in self._descriptors:
                known = self._files[file]
                try:
                    self._descriptors[file] = _opened(self._directory / known.name)
                except OSError as error:
                    raise CheckpointError(f"{known.name}: it cannot be read: {error.strerror}") from error
                size = os.fstat(self._descriptors[file][0]).st_size
                if size != known.bytes:
                    raise CheckpointError(f"{known.name}: it has {size} bytes, {known.bytes} were committed")
            return self._descriptors[file]

    def _damaged(self, read: Read, at: int) -> CheckpointError:
        name = self._files[read.file].name
        tensor = next((it.piece.name for it in read.copies if it.begin < at + BLOCK and it.end > at), None)
        where = f": tensor {tensor!r}" if tensor else ""
        return CheckpointError(f"{name}{where}: its content is not what was committed (block at byte {at})")


def _opened(path: Path) -> tuple[int, bool]:
    """(descriptor, whether it passes the page cache by): it does where little of the file is in there."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    plain = os.open(path, flags)
    if _is_cached(plain):
        return plain, False
    try:
        direct = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            os.close(plain)
            raise
        return plain, False
    os.close(plain)
    return direct, True


def _is_cached(descriptor: int) -> bool:
    """Whether a look at some pages finds them in memory (preadv2(2), RWF_NOWAIT)."""
    size = os.fstat(descriptor).st_size
    page = bytearray(1)
    spots = [size * k // 8 for k in range(8)]
    return sum(_is_there(descriptor, page, at) for at in spots) > len(spots) // 2


def _is_there(descriptor: int, page: bytearray, at: int) -> bool:
    try:
        return os.preadv(descriptor, [page], at, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _scatter(data: memoryview, begin: int, copy: Copy) -> None:
    """Copy one rectangle out of the bytes of a file that begin at `begin`."""
    item = copy.piece.dtype.itemsize
    strides, stride = [], item
    for size in reversed(copy.part.rectangle.shape):
        strides.append(stride)
        stride *= size
    raw = np.frombuffer(data, dtype=np.uint8, count=copy.end - copy.begin, offset=copy.begin - begin)
    wanted = copy.wanted
    kind = _BITS[item]
    if len(raw) == wanted.volume * item:
        source = raw.view(kind).reshape(wanted.shape)
    else:
        source = np.lib.stride_tricks.as_strided(raw[:item].view(kind), wanted.shape, strides[::-1])
    start = wanted.start_in(Rectangle(tuple(copy.piece.offset), tuple(copy.piece.local.shape)))
    where = tuple(slice(at, at + size) for at, size in zip(start, wanted.shape, strict=True))
    _store(copy.piece.local, where, source)


def _store(local: Tensor, where: tuple[slice, ...], source: NDArray[Any]) -> None:
    """Bit for bit, whatever the dtype."""
    kind = source.dtype
    if local.device.type == "cpu" and local.is_contiguous():
        target = local.detach().reshape(-1).view(torch.uint8).numpy().view(kind).reshape(local.shape)
        target[where] = source
        return
    copied = torch.from_numpy(np.ascontiguousarray(source).view(np.uint8).reshape(-1))
    with torch.no_grad():
        local[where].copy_(copied.view(local.dtype).reshape(source.shape))
