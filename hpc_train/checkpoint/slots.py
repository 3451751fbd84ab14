"""The places of a shard's tensors in memory, made once for all saves of the same tensors: the next is then mere copies.

Thousands of small tensors are copied by a few calls, without a look at each; large ones a slice at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.image import ALIGNMENT, Image
from hpc_train.checkpoint.poison import Span, spans
from hpc_train.compat import copy_all

SMALL = 1 << 20
"""Bytes of a tensor up to which it is copied whole, along with others."""
_SHARE = 16 << 20
"""Bytes of one copy, about: small enough to be shared out evenly over threads."""
Bytes = NDArray[np.uint8]


class Slot(NamedTuple):
    """The place of one tensor that has elements."""

    piece: int
    """Index among the pieces."""
    begin: int
    """Byte of the image."""
    size: int
    target: Tensor | None
    """Its memory, in its own shape and type; None where the memory is not aligned for it."""

    @property
    def end(self) -> int:
        """One past its last byte."""
        return self.begin + self.size


class Share(NamedTuple):
    """Many small slots, or a part of a large one."""

    numbers: list[int]
    low: int = 0
    high: int = 0
    """The part is bytes [low, high) of the image; 0: all of them."""


@dataclass(frozen=True)
class Slots:
    """Of an image in memory."""

    memory: memoryview
    image: Image
    held: Held
    slots: list[Slot]
    """In the order of the image."""
    begins: list[int]
    """Of the slots."""
    spans: list[Span]
    """What can have a NaN."""
    all_aligned: bool = True
    """Every slot has a target."""

    @property
    def whole(self) -> Bytes:
        """The memory."""
        return np.frombuffer(self.memory, np.uint8)

    def sources(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What goes to each slot. tensors: of all pieces."""
        return [tensors[slot.piece] for slot in self.slots]

    def within(self, low: int, high: int) -> range:
        """The numbers of those that have bytes [low, high) of the image; the first may have none."""
        return range(max(0, bisect_right(self.begins, low) - 1), bisect_left(self.begins, high))

    @cached_property
    def all_shares(self) -> list[Share]:
        """Of all of them."""
        return list(shares(self, range(len(self.slots))))

    def write_structure(self) -> None:
        """All that is no tensor's data, and zeros to the end of the last page."""
        for at, content in self.image.structure:
            self.memory[at : at + len(content)] = content
        end = -(-self.image.size // ALIGNMENT) * ALIGNMENT
        self.memory[self.image.size : end] = bytes(end - self.image.size)


def make_slots(memory: memoryview, image: Image, held: Held) -> Slots:
    """The structure is in the memory then."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    placed = sorted((place, index) for index, place in enumerate(held.places) if held.rows[index].bytes)
    slots = [_slot(whole, held, index, place) for place, index in placed]
    all_aligned = all(slot.target is not None for slot in slots)
    made = Slots(memory, image, held, slots, [place for place, _ in placed], [], all_aligned)
    made.write_structure()
    made.spans.extend(spans(memory, held))
    return made


def copy(slots: Slots, numbers: Sequence[int], sources: Sequence[Tensor], whole: Bytes) -> None:
    """All of these; `sources`, of every slot, are in the processor's memory."""
    aligned = numbers if slots.all_aligned else [it for it in numbers if slots.slots[it].target is not None]
    if aligned:
        targets = [slots.slots[it].target for it in aligned]
        copy_all(cast(list[Tensor], targets), [sources[it] for it in aligned])
    for it in numbers if len(aligned) < len(numbers) else ():
        slot = slots.slots[it]
        if slot.target is None:
            whole[slot.begin : slot.begin + slot.size] = bytes_of(sources[it])


def copy_part(slot: Slot, source: Bytes, whole: Bytes, low: int, high: int) -> None:
    """Of one tensor what lies within bytes [low, high) of the image. source: bytes_of its piece."""
    start, stop = max(slot.begin, low), min(slot.begin + slot.size, high)
    np.copyto(whole[start:stop], source[start - slot.begin : stop - slot.begin])


def shares(slots: Slots, numbers: Iterable[int]) -> Iterator[Share]:
    """What is to be copied in one go, about _SHARE bytes."""
    few: list[int] = []
    room = _SHARE
    for number in numbers:
        slot = slots.slots[number]
        if slot.size > SMALL:
            for low in range(slot.begin, slot.begin + slot.size, _SHARE):
                yield Share([number], low, min(low + _SHARE, slot.begin + slot.size))
            continue
        if few and room < slot.size:
            yield Share(few)
            few, room = [], _SHARE
        few.append(number)
        room -= slot.size
    if few:
        yield Share(few)


def bytes_of(tensor: Tensor) -> Bytes:
    """A tensor's memory, or where that is not contiguous a copy of it, as one row of bytes."""
    row: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return row


def _slot(whole: Tensor, held: Held, index: int, place: int) -> Slot:
    row = held.rows[index]
    target = None
    if place % row.dtype.itemsize == 0:
        target = whole[place : place + row.bytes].view(row.dtype).view(row.local_shape)
    return Slot(index, place, row.bytes, target)
