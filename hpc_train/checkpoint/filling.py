"""The image of a shard that is filled as it is written, for a caller who waits for the save and keeps the pieces still.

Copying, looking for NaN, hashing and writing then go hand in hand, a piece of memory at a time: the disk works from the
first moment on, and each byte is still in the processor's cache when it is needed again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from hpc_train.api import Piece
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.holdings import Held
from hpc_train.checkpoint.image import ALIGNMENT, Image
from hpc_train.checkpoint.poison import Span, elements, is_harmless, spans

THREADS = 3
"""That fill and write: while one copies, the disk has work of the two others."""
_HOT = 1 << 20
"""Bytes that are copied and looked at in one go."""


class Filling:
    """A source for `stream.write_stream`."""

    def __init__(self, memory: memoryview, image: Image, pieces: Sequence[Piece], held: Held) -> None:
        """memory: whole pages. pieces: all in the processor's memory and contiguous."""
        for at, content in image.structure:
            memory[at : at + len(content)] = content
        memory[image.size : -(-image.size // ALIGNMENT) * ALIGNMENT] = bytes(-image.size % ALIGNMENT)
        self._memory, self._whole, self._held = memory, np.frombuffer(memory, dtype=np.uint8), held
        placed = [(place, _bytes(piece)) for piece, place in zip(pieces, image.places, strict=True)]
        self._tensors = sorted((it for it in placed if len(it[1])), key=lambda it: it[0])
        self._places = [place for place, _ in self._tensors]
        self._spans = list(spans(memory, held))
        self._starts = [span.begin for span in self._spans]
        self.in_doubt = any(span.begin % span.dtype.itemsize for span in self._spans)
        """There may be NaN or infinity in what was filled; certain when all of it is."""
        self._given_up = False

    def give_up(self) -> None:
        """The caller waits no longer, and the pieces may change: what is not yet written must not be."""
        self._given_up = True

    def confirm(self) -> None:
        """Return when it is certain that all pieces were still. Raises CheckpointError if they may not have been."""
        if self._given_up:
            raise CheckpointError("it took too long, and nobody waits for it any more")

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the image, which one thread fills and asks for."""
        self.confirm()
        for low in range(begin, end, _HOT):
            self._fill(low, min(low + _HOT, end))
        return self._memory[begin:end]

    def _fill(self, low: int, high: int) -> None:
        first = max(0, bisect_right(self._places, low) - 1)
        for place, source in self._tensors[first : bisect_left(self._places, high)]:
            start, stop = max(place, low), min(place + len(source), high)
            if start < stop:
                self._whole[start:stop] = source[start - place : stop - place]
        if not self.in_doubt and not self._is_finite(low, high):
            self.in_doubt = True

    def _is_finite(self, low: int, high: int) -> bool:
        first = max(0, bisect_right(self._starts, low) - 1)
        return all(self._part(span, low, high) for span in self._spans[first : bisect_left(self._starts, high)])

    def _part(self, span: Span, low: int, high: int) -> bool:
        start, count = max(span.begin, low), min(span.end, high) - max(span.begin, low)
        return count <= 0 or is_harmless(elements(self._memory, span.dtype, start, count // span.dtype.itemsize), False)


def can_fill(pieces: Sequence[Piece]) -> bool:
    """Whether parts of them can be taken as bytes."""
    return all(piece.local.device.type == "cpu" and piece.local.is_contiguous() for piece in pieces)


def _bytes(piece: Piece) -> NDArray[np.uint8]:
    row: NDArray[np.uint8] = piece.local.detach().reshape(-1).view(torch.uint8).numpy()
    return row
