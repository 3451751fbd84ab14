"""The image of a shard that is filled as it is written, for a caller who waits for the save and keeps the pieces still.

Copying, looking for NaN, hashing and writing then go hand in hand, a piece of memory at a time: the disk works from the
first moment on, and each byte is still in the processor's cache when it is needed again.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_train.api import Piece
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.looking import Looking
from hpc_train.checkpoint.slots import Bytes, Slots, bytes_of, copy, copy_part


class Filling:
    """What `looking` takes."""

    def __init__(self, slots: Slots, pieces: Sequence[Piece]) -> None:
        """pieces: all in the processor's memory and contiguous."""
        slots.write_structure()
        self.looking = Looking(slots, self._fill)
        self._slots, self._pieces, self._whole = slots, pieces, slots.whole
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
        whole = [slot for slot in here if low <= slot.begin and slot.begin + slot.size <= high]
        copy(whole, self._pieces, self._whole)
        for slot in here if len(whole) < len(here) else ():
            if slot.begin < low < slot.begin + slot.size or slot.begin < high < slot.begin + slot.size:
                copy_part(slot, self._bytes_of(slot.piece), self._whole, low, high)

    def _bytes_of(self, piece: int) -> Bytes:
        if piece not in self._bytes:
            self._bytes[piece] = bytes_of(self._pieces[piece].local)
        return self._bytes[piece]


def can_fill(pieces: Sequence[Piece]) -> bool:
    """Whether parts of them can be taken as bytes."""
    return all(piece.local.is_cpu and piece.local.is_contiguous() for piece in pieces)
