"""The places of a shard's tensors in memory, made once for all saves of the same tensors: the next is then mere copies.

Thousands of small tensors are copied by a few calls, without a look at each; large ones a slice at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpc_train.api import Piece
from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.image import ALIGNMENT, Image
from hpc_train.checkpoint.poison import Span, spans
from hpc_train.compat import copy_all

SMALL = 1 << 20
"""Bytes of a tensor up to which it is copied whole, along with others."""
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

    @property
    def whole(self) -> Bytes:
        """The memory."""
        return np.frombuffer(self.memory, np.uint8)

    def within(self, low: int, high: int) -> list[Slot]:
        """Those that have bytes [low, high) of the image."""
        first = max(0, bisect_right(self.begins, low) - 1)
        return self.slots[first : bisect_left(self.begins, high)]

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
    made = Slots(memory, image, held, slots, [place for place, _ in placed], [])
    made.write_structure()
    made.spans.extend(spans(memory, held))
    return made


def copy(slots: Sequence[Slot], pieces: Sequence[Piece], whole: Bytes) -> None:
    """All of these; the pieces are in the processor's memory."""
    aligned = [(slot.target, pieces[slot.piece].local) for slot in slots if slot.target is not None]
    if aligned:
        copy_all([target for target, _ in aligned], [source for _, source in aligned])
    for slot in slots if len(aligned) < len(slots) else ():
        if slot.target is None:
            whole[slot.begin : slot.begin + slot.size] = bytes_of(pieces[slot.piece].local)


def copy_part(slot: Slot, source: Bytes, whole: Bytes, low: int, high: int) -> None:
    """Of one tensor what lies within bytes [low, high) of the image. source: bytes_of its piece."""
    start, stop = max(slot.begin, low), min(slot.begin + slot.size, high)
    np.copyto(whole[start:stop], source[start - slot.begin : stop - slot.begin])


def shares(slots: Sequence[Slot], most: int) -> Iterator[tuple[list[Slot], int, int]]:
    """(slots, low, high): what is to be copied in one go, about `most` bytes: many small ones, or a part of a large."""
    few: list[Slot] = []
    room = most
    for slot in slots:
        if slot.size > SMALL:
            for low in range(slot.begin, slot.begin + slot.size, most):
                yield [slot], low, min(low + most, slot.begin + slot.size)
            continue
        if few and room < slot.size:
            yield few, 0, 0
            few, room = [], most
        few.append(slot)
        room -= slot.size
    if few:
        yield few, 0, 0


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
