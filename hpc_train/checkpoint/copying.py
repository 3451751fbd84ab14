"""The copy of a rank's pieces into the image of its shard: at once, or beside the training while they cannot change."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from hpc_train.api import Piece
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.slots import Bytes, Share, Slot, Slots, bytes_of, copy, copy_part, shares
from hpc_train.compat import version


class _Placed(NamedTuple):
    """A tensor that is to be copied."""

    name: str
    tensor: Tensor
    slot: Slot
    version: int
    """As it is now."""


def begin(slots: Slots, pieces: Sequence[Piece], threads: int, overlap: bool = False) -> Copying:
    """Copy the structure and every tensor to its place, but what is still if they are to overlap: that comes later.

    Copies from a GPU are queued, here and now, and nobody waits: of what is still on a stream beside that of the
    training, of the rest in the training's own, so that what it does next comes after them.
    """
    slots.write_structure()
    sources = slots.sources([piece.local for piece in pieces])
    later = [_placed(slot, pieces) for slot in slots.slots if overlap and pieces[slot.piece].still]
    if not later and all(map(attrgetter("is_cpu"), sources)):
        _copy(slots, slots.all_shares, sources, threads)
        return Copying(slots.whole, [], [], None)
    still = {it.slot.piece for it in later}
    now = [number for number, slot in enumerate(slots.slots) if slot.piece not in still]
    _copy(slots, list(shares(slots, [it for it in now if sources[it].is_cpu])), sources, threads)
    from_gpu = [_placed(slots.slots[it], pieces) for it in now if not sources[it].is_cpu]
    return Copying(slots.whole, later, later, _queue(slots.whole, from_gpu, later))


@dataclass
class Copying:
    """A copy that was begun. The thread of the save completes it, that of the training waits for it."""

    _whole: Bytes | None
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
                _copy_later(self._whole, [it for it in self._later if it.tensor.is_cpu])
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


def _queue(whole: Bytes, now: Sequence[_Placed], later: Sequence[_Placed]) -> _Queued | None:
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


def _from_gpu(whole: Bytes, placed: Sequence[_Placed]) -> None:
    """Onto the current stream. It also has the memory of what had to be made contiguous."""
    for _, tensor, slot, _ in placed:
        if tensor.is_cuda:
            source = tensor.contiguous().reshape(-1).view(torch.uint8)
            torch.from_numpy(whole[slot.begin : slot.begin + slot.size]).copy_(source, non_blocking=True)


def _copy(slots: Slots, work: list[Share], sources: Sequence[Tensor], threads: int) -> None:
    """What is in the processor's memory."""
    whole = slots.whole
    large = {number: bytes_of(sources[number]) for number in {share.numbers[0] for share in work if share.high}}

    def copy_share(share: Share) -> None:
        numbers, low, high = share
        if high:
            copy_part(slots.slots[numbers[0]], large[numbers[0]], whole, low, high)
        else:
            copy(slots, numbers, sources, whole)

    if threads == 1 or len(work) == 1:
        for share in work:
            copy_share(share)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy_share, work))


def _copy_later(whole: Bytes, placed: Sequence[_Placed]) -> None:
    for _, tensor, slot, _ in placed:
        copy_part(slot, bytes_of(tensor), whole, slot.begin, slot.begin + slot.size)


def _placed(slot: Slot, pieces: Sequence[Piece]) -> _Placed:
    piece = pieces[slot.piece]
    return _Placed(piece.name, piece.local.detach(), slot, version(piece.local))
