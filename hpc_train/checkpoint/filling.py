"""The image of a shard that is filled as it is written, for a caller who waits for the save and keeps the pieces still.

Copying, looking for NaN, hashing and writing then go hand in hand, a piece of memory at a time: the disk works from the
first moment on, and each byte is still in the processor's cache when it is needed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.looking import Looking
from hpc_train.checkpoint.slots import Bytes, Slots, bytes_of, copy, copy_part


class Filling:
    """What `looking` takes."""

    def __init__(self, slots: Slots, tensors: Sequence[Tensor]) -> None:
        """tensors: of the pieces, all in the processor's memory and contiguous."""
        slots.write_structure()
        self.looking = Looking(slots, self._fill)
        self._slots, self._sources, self._whole = slots, slots.sources(tensors), slots.whole
        self._bytes: dict[int, Bytes] = {}
        self._given_up = False

    def give_up(self) -> None:
        """The caller waits no longer, and the pieces may change: what is not yet written must not be."""
        self._given_up = True

    def confirm(self) -> None:
        """Return when it is certain that all pieces were still. Raises CheckpointError if they may not have been."""
        if self._given_up:
            raise CheckpointError("it took too long, and nobody waits for it any more")

    def _fill(self, low: int, high: int) -> None:
        self.confirm()
        here = self._slots.within(low, high)
        if here and self._slots.slots[here[0]].begin < low:
            self._fill_part(here[0], low, high)
            here = here[1:]
        if here and self._slots.slots[here[-1]].end > high:
            self._fill_part(here[-1], low, high)
            here = here[:-1]
        copy(self._slots, here, self._sources, self._whole)

    def _fill_part(self, number: int, low: int, high: int) -> None:
        slot = self._slots.slots[number]
        if slot.end <= low:
            return
        if number not in self._bytes:
            self._bytes[number] = bytes_of(self._sources[number])
        copy_part(slot, self._bytes[number], self._whole, low, high)


def can_fill(tensors: Sequence[Tensor]) -> bool:
    """Whether parts of them can be taken as bytes."""
    return all(map(attrgetter("is_cpu"), tensors)) and all(map(Tensor.is_contiguous, tensors))
