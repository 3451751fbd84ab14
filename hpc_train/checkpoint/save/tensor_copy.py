"""Copy the tensors of a save into the staging buffer.

TensorCopy    copy at once, or beside the training as long as it does not change the tensors
FusedStaging  copy while the file is written, for a caller who waits for the save
"""

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

from hpc_train._torch.tensors import tensor_version
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.save.staging import (
    ByteArray,
    CopyShare,
    StagingLayout,
    StreamingCheck,
    TensorSlot,
    copy_slot_part,
    copy_to_slots,
    split_copies,
    view_bytes,
)
from hpc_train.interfaces import TensorShard


class _PlacedTensor(NamedTuple):
    """A tensor and its place."""

    name: str
    tensor: Tensor
    slot: TensorSlot
    version: int
    """Its version counter (torch counts in-place changes) when the copy began."""


def start_copy(slots: StagingLayout, shards: Sequence[TensorShard], threads: int, overlap: bool) -> TensorCopy:
    """Copy the HDF5 structure and the tensors to their places; with `overlap`, `still` shards are copied later.

    Copies from a GPU are queued without waiting: those of still shards on a side stream, the others on the training's
    stream, so that its next kernels run after them.
    """
    slots.write_structure()
    sources = slots.sources([shard.local for shard in shards])
    later = [_place_tensor(slot, shards) for slot in slots.slots if overlap and shards[slot.shard].still]
    if not later and all(map(attrgetter("is_cpu"), sources)):
        _copy_on_host(slots, slots.all_shares, sources, threads)
        return TensorCopy(slots.bytes, [], [], None)
    # Everything else is copied now: the training's next step will change it.
    still = {placed.slot.shard for placed in later}
    now = [number for number, slot in enumerate(slots.slots) if slot.shard not in still]
    on_host = [number for number in now if sources[number].is_cpu]
    _copy_on_host(slots, list(split_copies(slots, on_host)), sources, threads)
    from_gpu = [_place_tensor(slots.slots[number], shards) for number in now if not sources[number].is_cpu]
    return TensorCopy(slots.bytes, later, later, _queue_gpu_copies(slots.bytes, from_gpu, later))


@dataclass
class TensorCopy:
    """A copy in progress: the save's thread completes it, the training's thread waits for it."""

    _whole: ByteArray | None
    _later: list[_PlacedTensor]
    """Tensors that are not copied yet."""
    _watched: list[_PlacedTensor]
    """Tensors that must not change before the training has waited; checked then by their versions."""
    _queued: _GpuCopies | None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while `_waiting_since` and `_copied` change together: a wait that begins as the copy ends counts once."""
    _copied: threading.Event = field(default_factory=threading.Event)
    _released: threading.Event = field(default_factory=threading.Event)
    """Set when the training has waited and may change the shards."""
    _waiting_since: float | None = None
    changed: str | None = None
    """Name of a shard that was changed too early; set when the training has waited."""
    stall: float = 0.0
    """Seconds for which the training waited for the copy after it was started."""

    def __post_init__(self) -> None:
        if not self._later:
            self._end()
            self._released.set()

    def complete(self) -> None:
        """Copy what is left, in the save's thread. May be called again."""
        try:
            # Copies of `later` tensors on a GPU were queued when the copy started; those on the host are made here.
            if not self._copied.is_set() and self._whole is not None:
                _copy_later(self._whole, [placed for placed in self._later if placed.tensor.is_cpu])
        finally:
            self._end()
        if self._queued is not None:
            self._queued.event.synchronize()
        self._whole, self._later = None, []  # releases the view of the staging buffer

    def _end(self) -> None:
        with self._lock:
            if self._waiting_since is not None:
                self.stall += time.monotonic() - self._waiting_since
            self._waiting_since = None
            self._copied.set()

    def wait(self) -> float:
        """Wait until the shards may change; returns the seconds waited. The current CUDA stream waits for GPU copies.

        Call it in the training's thread, on the stream that will change the shards.
        """
        if self._released.is_set():
            return 0.0
        started = time.monotonic()
        with self._lock:
            self._waiting_since = None if self._copied.is_set() else started
        self._copied.wait()
        # The stream waits for the GPU's copies, not this thread: kernels queued from now on run after them.
        if self._queued is not None:
            self._queued.event.wait(torch.cuda.current_stream(self._queued.device))
        self.changed = next(
            (placed.name for placed in self._watched if tensor_version(placed.tensor) != placed.version), None
        )
        self._watched = []
        self._released.set()
        return time.monotonic() - started

    def confirm(self) -> None:
        """Wait until it is certain that no shard changed during the copy; in the save's thread, before the commit.

        Raises CheckpointError if the version of a tensor changed.
        """
        self._released.wait()
        if self.changed is not None:
            raise CheckpointError(f"tensor {self.changed!r} was changed by a forward or a backward while it was copied")


class _GpuCopies(NamedTuple):
    """Queued copies from a GPU."""

    device: torch.device
    event: torch.cuda.Event
    """Recorded after the last copy."""


def _queue_gpu_copies(
    buffer: ByteArray, now: Sequence[_PlacedTensor], later: Sequence[_PlacedTensor]
) -> _GpuCopies | None:
    """Queue copies from the GPU; None if there are none."""
    device = next((tensor.device for _, tensor, *_ in (*now, *later) if tensor.is_cuda), None)
    if device is None:
        return None
    with torch.cuda.device(device):
        _queue_copies_from_gpu(buffer, now)
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())  # kernels that still compute the shards must end first
        with torch.cuda.stream(side_stream):
            _queue_copies_from_gpu(buffer, later)
            # blocking: a thread that waits for the event sleeps instead of polling.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            return _GpuCopies(device, event)


def _queue_copies_from_gpu(buffer: ByteArray, placed: Sequence[_PlacedTensor]) -> None:
    """Queue copies on the current stream, which also owns the memory of contiguous copies made here."""
    for _, tensor, slot, _ in placed:
        if tensor.is_cuda:
            source = tensor.contiguous().reshape(-1).view(torch.uint8)
            torch.from_numpy(buffer[slot.begin : slot.begin + slot.size]).copy_(source, non_blocking=True)


def _copy_on_host(slots: StagingLayout, work: list[CopyShare], sources: Sequence[Tensor], threads: int) -> None:
    """Copy host tensors, in several threads."""
    buffer = slots.bytes
    large = {number: view_bytes(sources[number]) for number in {share.numbers[0] for share in work if share.high}}

    def copy_share(share: CopyShare) -> None:
        numbers, low, high = share
        if high:
            copy_slot_part(slots.slots[numbers[0]], large[numbers[0]], buffer, low, high)
        else:
            copy_to_slots(slots, numbers, sources, buffer)

    if threads == 1 or len(work) == 1:
        for share in work:
            copy_share(share)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(copy_share, work))


def _copy_later(buffer: ByteArray, placed: Sequence[_PlacedTensor]) -> None:
    for _, tensor, slot, _ in placed:
        copy_slot_part(slot, view_bytes(tensor), buffer, slot.begin, slot.begin + slot.size)


def _place_tensor(slot: TensorSlot, shards: Sequence[TensorShard]) -> _PlacedTensor:
    shard = shards[slot.shard]
    return _PlacedTensor(shard.name, shard.local.detach(), slot, tensor_version(shard.local))


class FusedStaging:
    """Copies tensors into the image while the file is written, a cache-sized part at a time."""

    def __init__(self, slots: StagingLayout, tensors: Sequence[Tensor]) -> None:
        """tensors: local tensors of the shards, all on the host and contiguous."""
        slots.write_structure()
        self.check = StreamingCheck(slots, self._fill)
        self._slots, self._sources, self._whole = slots, slots.sources(tensors), slots.bytes
        self._bytes: dict[int, ByteArray] = {}
        self._given_up = False

    def give_up(self) -> None:
        """Stop copying: the caller no longer waits and may change the shards."""
        self._given_up = True

    def confirm(self) -> None:
        """Raise CheckpointError if the shards may have changed during the copy."""
        if self._given_up:
            raise CheckpointError("it took longer than the timeout of a save and was given up")

    def _fill(self, low: int, high: int) -> None:
        self.confirm()
        # The first and the last tensor may be only partly in [low, high); all between them are copied whole.
        here = self._slots.find_overlapping_slots(low, high)
        if here and self._slots.slots[here[0]].begin < low:
            self._fill_part(here[0], low, high)
            here = here[1:]
        if here and self._slots.slots[here[-1]].end > high:
            self._fill_part(here[-1], low, high)
            here = here[:-1]
        copy_to_slots(self._slots, here, self._sources, self._whole)

    def _fill_part(self, number: int, low: int, high: int) -> None:
        slot = self._slots.slots[number]
        if slot.end <= low:
            return
        if number not in self._bytes:
            self._bytes[number] = view_bytes(self._sources[number])
        copy_slot_part(slot, self._bytes[number], self._whole, low, high)


def can_fuse_staging(tensors: Sequence[Tensor]) -> bool:
    """Return whether FusedStaging can copy the tensors: all on the host and contiguous."""
    return all(map(attrgetter("is_cpu"), tensors)) and all(map(Tensor.is_contiguous, tensors))
