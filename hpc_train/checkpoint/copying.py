"""The copy of a rank's pieces into the image of its shard: at once, or beside the training while they cannot change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.api import Piece
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.image import Image
from hpc_train.compat import version

_SLICE = 16 << 20
"""Bytes of one copy: small enough to be shared out evenly over threads."""
_Bytes = NDArray[np.uint8]


class _Placed(NamedTuple):
    """A tensor that is to be copied."""

    name: str
    tensor: Tensor
    place: int
    """Byte of the image at which it begins."""
    version: int
    """As it is now."""


def begin(memory: memoryview, image: Image, pieces: Sequence[Piece], threads: int, overlap: bool = False) -> Copying:
    """Copy the structure and every tensor to its place, but what is still if they are to overlap: that comes later.

    Copies from a GPU are queued, here and now, and nobody waits: of what is still on a stream beside that of the
    training, of the rest in the training's own, so that what it does next comes after them.
    """
    for at, content in image.structure:
        memory[at : at + len(content)] = content
    whole = np.frombuffer(memory, dtype=np.uint8)
    now: list[_Placed] = []
    later: list[_Placed] = []
    for piece, place in zip(pieces, image.places, strict=True):
        tensor = piece.local.detach()
        wanted = later if overlap and piece.still else now
        wanted.append(_Placed(piece.name, tensor, place, version(tensor)))
    _copy(whole, now, threads)
    return Copying(whole, later, later, _queue(whole, now, later))


@dataclass
class Copying:
    """A copy that was begun. The thread of the save completes it, that of the training waits for it."""

    _whole: _Bytes | None
    _later: list[_Placed]
    """Not copied yet."""
    _seen: list[_Placed]
    """That may not change before the training has waited."""
    _queued: _Queued | None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _copied: threading.Event = field(default_factory=threading.Event)
    _left: threading.Event = field(default_factory=threading.Event)
    """The training has been here since, and may have changed the pieces."""
    _waiting_since: float | None = None
    changed: str | None = None
    """A piece that was not still, once the training has waited."""
    stall: float = 0.0
    """Seconds for which the training waited for the copy after it was begun."""

    def __post_init__(self) -> None:
        if not self._later:
            self._end()
            self._left.set()

    def complete(self) -> None:
        """Copy what is left; then all is in the image. In the thread of the save, any number of times."""
        try:
            if not self._copied.is_set() and self._whole is not None:
                _copy(self._whole, self._later, threads=1)
        finally:
            self._end()
        if self._queued is not None:
            self._queued.event.synchronize()
        self._whole, self._later = None, []  # the memory of the image is the arena's again

    def _end(self) -> None:
        with self._lock:
            if self._waiting_since is not None:
                self.stall += time.monotonic() - self._waiting_since
            self._waiting_since = None
            self._copied.set()

    def wait(self) -> float:
        """Return when the pieces may change, after so many seconds; what a GPU copies, its stream will wait for.

        In the thread of the training, on the stream that will change them.
        """
        if self._left.is_set():
            return 0.0
        started = time.monotonic()
        with self._lock:
            self._waiting_since = None if self._copied.is_set() else started
        self._copied.wait()
        if self._queued is not None:
            self._queued.event.wait(torch.cuda.current_stream(self._queued.device))
        self.changed = next((it.name for it in self._seen if version(it.tensor) != it.version), None)
        self._seen = []
        self._left.set()
        return time.monotonic() - started

    def confirm(self) -> None:
        """Return when it is certain that all pieces were still. In the thread of the save, before it commits.

        Raises CheckpointError if one was changed by an operation that torch knows of.
        """
        self._left.wait()
        if self.changed is not None:
            raise CheckpointError(f"tensor {self.changed!r} was changed by a forward or a backward while it was copied")


class _Queued(NamedTuple):
    """Copies from a GPU."""

    device: torch.device
    event: torch.cuda.Event
    """Behind the last of them."""


def _queue(whole: _Bytes, now: Sequence[_Placed], later: Sequence[_Placed]) -> _Queued | None:
    """Start them. None: there are none."""
    device = next((tensor.device for _, tensor, *_ in (*now, *later) if tensor.is_cuda), None)
    if device is None:
        return None
    with torch.cuda.device(device):
        _from_gpu(whole, now)
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            _from_gpu(whole, later)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            return _Queued(device, event)


def _from_gpu(whole: _Bytes, placed: Sequence[_Placed]) -> None:
    """Onto the current stream. It also has the memory of what had to be made contiguous."""
    for _, tensor, place, _ in placed:
        if tensor.is_cuda:
            source = tensor.contiguous().reshape(-1).view(torch.uint8)
            torch.from_numpy(whole[place : place + source.numel()]).copy_(source, non_blocking=True)


def _copy(whole: _Bytes, placed: Sequence[_Placed], threads: int) -> None:
    """What is in the processor's memory."""
    on_cpu = ((it.place, it.tensor) for it in placed if not it.tensor.is_cuda)
    slices = (it for place, tensor in on_cpu for it in _slices(whole, place, _bytes(tensor)))
    shares = _shares(slices)
    if threads == 1 or len(shares) == 1:
        for share in shares:
            _copy_all(share)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_copy_all, shares))


def _slices(whole: _Bytes, place: int, source: _Bytes) -> Iterator[tuple[_Bytes, _Bytes]]:
    """(target, source) of at most _SLICE bytes each."""
    for at in range(0, len(source), _SLICE):
        part = source[at : at + _SLICE]
        yield whole[place + at : place + at + len(part)], part


def _shares(slices: Iterator[tuple[_Bytes, _Bytes]]) -> list[list[tuple[_Bytes, _Bytes]]]:
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
