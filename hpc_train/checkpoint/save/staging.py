"""Stage the tensors of a save in host memory, as an image of the shard file that is reused from save to save.

StagingBuffer     the memory, page-locked if there are GPUs
StagingLayout     the place of every tensor in the memory, made once for all saves of the same tensors
find_float_spans  the floating-point tensors of an image, which can contain NaN
StreamingCheck    hash the image and look for NaN while it is written, a cache-sized part at a time

tensor_copy.py fills it.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite, prod
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train._torch.tensors import copy_tensor_lists
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.block_digests import digest_blocks
from hpc_train.checkpoint.format.hdf5_layout import ALIGNMENT, ShardImage
from hpc_train.checkpoint.format.shard_layout import FileLayout
from hpc_train.checkpoint.storage.file_system import allocate_pages


class StagingBuffer:
    """Page-aligned memory, reused from save to save; page-locked if there are GPUs, which makes their copies fast."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def reserve(self, size: int) -> memoryview:
        """Return at least `size` bytes, whole pages. Raises CheckpointError if memory is short."""
        if self._memory is None or len(self._memory) < size:
            self.release()
            try:
                self._memory = _allocate_pinned(size)
            except OSError as error:
                raise CheckpointError(f"no memory for a copy of {size} bytes ({error.strerror})") from error
        return memoryview(self._memory)

    def discard_contents(self) -> None:
        """Let the kernel reclaim the memory if it needs it (MADV_FREE); the content is lost.

        Pages that are not reclaimed are reused at no cost by the next save; faulting in new ones takes several times
        the copy. Page-locked memory is freed instead, as it cannot be reclaimed. No view of the buffer may be in use.
        """
        # Page-locked memory is never reclaimed, whatever madvise says.
        if torch.cuda.is_available() or self._memory is None:
            self.release()
            return
        try:
            self._memory.madvise(mmap.MADV_FREE)
        except OSError:
            self.release()

    def release(self) -> None:
        """Free the memory. No view of it may be in use."""
        if self._memory is not None:
            if torch.cuda.is_available():
                torch.cuda.cudart().cudaHostUnregister(_get_address(self._memory))  # type: ignore[no-untyped-call]
            self._memory.close()
            self._memory = None


def _allocate_pinned(size: int) -> mmap.mmap:
    memory = allocate_pages(size)
    if torch.cuda.is_available():  # page-lock it; if that fails, copies still work, but slower
        torch.cuda.cudart().cudaHostRegister(_get_address(memory), len(memory), 0)  # type: ignore[no-untyped-call]
    return memory


def _get_address(memory: mmap.mmap) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data


_PADDING = 4096
"""Maximum bytes between two tensors that are checked together."""


@dataclass(frozen=True)
class FloatSpan:
    """Adjacent floating-point tensors of one dtype; `rows` are (byte, elements) of each."""

    dtype: torch.dtype
    begin: int
    rows: list[tuple[int, int]]

    @property
    def end(self) -> int:
        at, count = self.rows[-1]
        return at + count * self.dtype.itemsize


def are_spans_finite(memory: memoryview, spans: Iterable[FloatSpan]) -> bool:
    """Return whether no tensor of a shard's image has a NaN or an infinity.

    An attention mask (-inf, and nothing above zero) counts as finite. This is one pass at memory speed: the sum, or the
    minimum and maximum, are not finite if any element is not, and adjacent tensors are checked together.
    """
    return all(_is_span_finite(memory, span) for span in spans)


def find_float_spans(memory: memoryview, file_layout: FileLayout) -> Iterator[FloatSpan]:
    """Yield the floating-point spans of an image, in file order. The bytes between tensors must be filled already."""
    span: FloatSpan | None = None
    for dtype, begin, count in _list_float_tensors(file_layout):
        if span is not None and span.dtype is dtype and _is_adjacent(memory, span, begin):
            span.rows.append((begin, count))
            continue
        if span is not None:
            yield span
        span = FloatSpan(dtype, begin, [(begin, count)])
    if span is not None:
        yield span


def _list_float_tensors(file_layout: FileLayout) -> list[tuple[torch.dtype, int, int]]:
    """Return (dtype, byte, elements) of every floating-point tensor with elements, in file order."""
    tensors = [
        (row.dtype, place, prod(row.local_shape))
        for row, place in zip(file_layout.rows, file_layout.places, strict=True)
        if row.dtype.is_floating_point or row.dtype.is_complex
    ]
    return sorted((tensor for tensor in tensors if tensor[2]), key=lambda tensor: tensor[1])


def _is_adjacent(memory: memoryview, span: FloatSpan, begin: int) -> bool:
    """Return whether only a little zero padding lies between a span and a tensor."""
    # Tensors in a file begin at aligned places, so most gaps are a few zeros, which are finite floats in every dtype.
    gap = begin - span.end
    # The elements of the second tensor must be elements of the span, counted from its begin.
    aligned = (begin - span.begin) % span.dtype.itemsize == 0
    return aligned and 0 <= gap < _PADDING and memory[span.end : begin] == bytes(gap)


def _is_span_finite(memory: memoryview, span: FloatSpan) -> bool:
    # The whole span at once first. Only if that is not finite look at each tensor, since one may be a mask of -inf.
    if is_finite_or_mask(
        view_elements(memory, span.dtype, span.begin, (span.end - span.begin) // span.dtype.itemsize), False
    ):
        return True
    return all(is_finite_or_mask(view_elements(memory, span.dtype, at, count), True) for at, count in span.rows)


def is_finite_or_mask(values: Tensor, mask: bool) -> bool:
    """Return whether all values are finite. mask: also accept -inf if nothing is above zero."""
    if isfinite(float(values.sum())):  # half the work of aminmax; it can overflow, but never hides a NaN or an infinity
        return True
    least, greatest = (float(bound) for bound in values.aminmax())
    if mask and least == -inf and greatest <= 0:
        return True
    return abs(least) < inf and abs(greatest) < inf  # false for NaN


def view_elements(memory: memoryview, dtype: torch.dtype, begin: int, count: int) -> Tensor:
    """View `count` elements of an image from byte `begin` on, in a dtype that can be compared."""
    values = torch.frombuffer(memory, dtype=dtype, count=count, offset=begin)
    if dtype.is_complex:
        return torch.view_as_real(values)
    return values.float() if dtype.itemsize == 1 else values  # torch has no sum of 8-bit floats


SMALL_TENSOR_BYTES = 1 << 20
"""Tensors up to this size are copied whole, several at a time."""
_SHARE_BYTES = 16 << 20
"""Approximate bytes of one unit of copying; small enough to balance the threads."""
ByteArray = NDArray[np.uint8]


class TensorSlot(NamedTuple):
    """The place in the image of one tensor that has elements."""

    shard: int
    """Index among the shards."""
    begin: int
    """Byte of the image."""
    size: int
    target: Tensor | None
    """View of its place with its shape and dtype; None if the place is not aligned for the dtype."""

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.begin + self.size


class CopyShare(NamedTuple):
    """One unit of copying: many small slots, or a part of a large one."""

    numbers: list[int]
    low: int = 0
    high: int = 0
    """The part is bytes [low, high) of the image; 0: all of them."""


@dataclass(frozen=True)
class StagingLayout:
    """An image in memory and the place of every tensor in it."""

    memory: memoryview
    image: ShardImage
    file_layout: FileLayout
    slots: list[TensorSlot]
    """In the order of the image."""
    begins: list[int]
    """First bytes of the slots."""
    spans: list[FloatSpan]
    """Floating-point tensors."""
    all_aligned: bool = True
    """Whether every slot has a target."""

    @property
    def bytes(self) -> ByteArray:
        """The memory as an array of bytes."""
        return np.frombuffer(self.memory, np.uint8)

    def sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensor of each slot. tensors: of all shards."""
        return [tensors[slot.shard] for slot in self.slots]

    def find_overlapping_slots(self, low: int, high: int) -> range:
        """Return the numbers of the slots with bytes [low, high) of the image; the first may have none."""
        return range(max(0, bisect_right(self.begins, low) - 1), bisect_left(self.begins, high))

    @cached_property
    def all_shares(self) -> list[CopyShare]:
        """Units of copying for all slots."""
        return list(split_copies(self, range(len(self.slots))))

    def write_structure(self) -> None:
        """Write the bytes between tensors, and zeros to the end of the last page."""
        for at, content in self.image.structure:
            self.memory[at : at + len(content)] = content
        end = -(-self.image.size // ALIGNMENT) * ALIGNMENT
        self.memory[self.image.size : end] = bytes(end - self.image.size)


def make_staging_layout(memory: memoryview, image: ShardImage, file_layout: FileLayout) -> StagingLayout:
    """Make the layout of an image, and write its HDF5 structure into the memory."""
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    placed = sorted((place, index) for index, place in enumerate(file_layout.places) if file_layout.rows[index].bytes)
    slots = [_make_slot(buffer, file_layout, index, place) for place, index in placed]
    all_aligned = all(slot.target is not None for slot in slots)
    made = StagingLayout(
        memory=memory,
        image=image,
        file_layout=file_layout,
        slots=slots,
        begins=[place for place, _ in placed],
        spans=[],
        all_aligned=all_aligned,
    )
    made.write_structure()
    made.spans.extend(find_float_spans(memory, file_layout))
    return made


def copy_to_slots(slots: StagingLayout, numbers: Sequence[int], sources: Sequence[Tensor], buffer: ByteArray) -> None:
    """Copy whole tensors to the slots of these numbers. sources: a host tensor for every slot."""
    aligned = numbers if slots.all_aligned else [n for n in numbers if slots.slots[n].target is not None]
    # One call of torch copies a whole list of small tensors; a Python loop would take longer than the copies.
    if aligned:
        targets = [slots.slots[number].target for number in aligned]
        copy_tensor_lists(cast(list[Tensor], targets), [sources[number] for number in aligned])
    for number in numbers if len(aligned) < len(numbers) else ():
        slot = slots.slots[number]
        if slot.target is None:
            buffer[slot.begin : slot.begin + slot.size] = view_bytes(sources[number])


def copy_slot_part(slot: TensorSlot, source: ByteArray, buffer: ByteArray, low: int, high: int) -> None:
    """Copy the part of one tensor within bytes [low, high) of the image. source: bytes of the tensor."""
    start, stop = max(slot.begin, low), min(slot.begin + slot.size, high)
    np.copyto(buffer[start:stop], source[start - slot.begin : stop - slot.begin])


def split_copies(slots: StagingLayout, numbers: Iterable[int]) -> Iterator[CopyShare]:
    """Split slots into units of about _SHARE_BYTES."""
    few: list[int] = []
    room = _SHARE_BYTES
    for number in numbers:
        slot = slots.slots[number]
        if slot.size > SMALL_TENSOR_BYTES:
            # Several threads copy one large tensor; small ones go together, since each call has a cost of its own.
            for low in range(slot.begin, slot.begin + slot.size, _SHARE_BYTES):
                yield CopyShare([number], low, min(low + _SHARE_BYTES, slot.begin + slot.size))
            continue
        if few and room < slot.size:
            yield CopyShare(few)
            few, room = [], _SHARE_BYTES
        few.append(number)
        room -= slot.size
    if few:
        yield CopyShare(few)


def view_bytes(tensor: Tensor) -> ByteArray:
    """View a host tensor as a row of bytes; a tensor that is not contiguous is copied first."""
    row: ByteArray = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return row


def _make_slot(buffer: Tensor, file_layout: FileLayout, index: int, place: int) -> TensorSlot:
    row = file_layout.rows[index]
    target = None
    # torch views bytes in another dtype only at aligned addresses; the others are copied as bytes.
    if place % row.dtype.itemsize == 0:
        target = buffer[place : place + row.bytes].view(row.dtype).view(row.local_shape)
    return TensorSlot(index, place, row.bytes, target)


CACHE_BYTES = 1 << 20
"""Bytes that are hashed and checked at a time; whole blocks, few enough to stay in the processor's cache."""
FillImage = Callable[[int, int], object]
"""Copies the tensors to bytes [low, high) of the image."""


class StreamingCheck:
    """Hashes the image and looks for NaN and infinity while write_stream reads it."""

    def __init__(self, slots: StagingLayout, fill: FillImage = lambda low, high: None) -> None:
        """slots: in whole pages. fill: called before a part is hashed."""
        self._slots, self._fill = slots, fill
        self._starts = [span.begin for span in slots.spans]
        self._digests: dict[int, list[int]] = {}
        self._checked_bytes: dict[int, int] = {}
        """Bytes of each part that was read, by its begin."""
        # A span that is not aligned for its dtype has elements that lie across two parts: this check cannot see them.
        self._in_doubt = any(span.begin % span.dtype.itemsize for span in slots.spans)

    @property
    def is_finite(self) -> bool:
        """Whether the whole image was read and found finite; False may also mean that this check cannot tell."""
        return not self._in_doubt and sum(self._checked_bytes.values()) >= self._slots.image.size

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end) of the image, whole blocks, after hashing and checking them. For one thread."""
        digests: list[int] = []
        memory, size = self._slots.memory, self._slots.image.size
        for low in range(begin, end, CACHE_BYTES):
            high = min(low + CACHE_BYTES, end)
            # Fill, hash and check one part after the other, so that it is
            # read from memory once and then from the cache.
            self._fill(low, high)
            digests += digest_blocks(memory[low : min(high, size)])
            if not self._in_doubt and not self._is_finite(low, high):
                self._in_doubt = True
        self._digests[begin], self._checked_bytes[begin] = digests, end - begin
        return memory[begin:end]

    def digests(self, begin: int, data: memoryview) -> list[int]:
        """Return and forget the digests of the blocks that were read from `begin` on."""
        return self._digests.pop(begin)

    def _is_finite(self, low: int, high: int) -> bool:
        first = max(0, bisect_right(self._starts, low) - 1)
        return all(
            self._is_part_finite(span, low, high) for span in self._slots.spans[first : bisect_left(self._starts, high)]
        )

    def _is_part_finite(self, span: FloatSpan, low: int, high: int) -> bool:
        start, size = max(span.begin, low), min(span.end, high) - max(span.begin, low)
        values = view_elements(self._slots.memory, span.dtype, start, size // span.dtype.itemsize) if size > 0 else None
        return values is None or is_finite_or_mask(values, False)
