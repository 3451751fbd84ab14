"""A shard's image on its way to the disk: hashed, and looked at for NaN, while it is in the processor's cache."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable

from hpc_train.checkpoint.digests import digest_blocks
from hpc_train.checkpoint.poison import Span, elements, is_harmless
from hpc_train.checkpoint.slots import Slots

HOT = 1 << 20
"""Bytes that are looked at in one go: whole blocks."""
Fill = Callable[[int, int], object]


class Looking:
    """A source for `stream.write_stream`, and its digests."""

    def __init__(self, slots: Slots, fill: Fill = lambda low, high: None) -> None:
        """slots: in whole pages. fill: puts bytes [low, high) of the image into the memory, if they are not there."""
        self._slots, self._fill = slots, fill
        self._starts = [span.begin for span in slots.spans]
        self._digests: dict[int, list[int]] = {}
        self._looked: dict[int, int] = {}
        self._in_doubt = any(span.begin % span.dtype.itemsize for span in slots.spans)

    @property
    def is_finite(self) -> bool:
        """There was neither NaN nor infinity in all of the image; false: nobody knows."""
        return not self._in_doubt and sum(self._looked.values()) >= self._slots.image.size

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the image, whole blocks, which one thread looks at and asks for."""
        found: list[int] = []
        memory, size = self._slots.memory, self._slots.image.size
        for low in range(begin, end, HOT):
            high = min(low + HOT, end)
            self._fill(low, high)
            found += digest_blocks(memory[low : min(high, size)])
            if not self._in_doubt and not self._is_finite(low, high):
                self._in_doubt = True
        self._digests[begin], self._looked[begin] = found, end - begin
        return memory[begin:end]

    def digests(self, begin: int, data: memoryview) -> list[int]:
        """Of the blocks of what was read from `begin` on; for once."""
        return self._digests.pop(begin)

    def _is_finite(self, low: int, high: int) -> bool:
        first = max(0, bisect_right(self._starts, low) - 1)
        return all(self._part(span, low, high) for span in self._slots.spans[first : bisect_left(self._starts, high)])

    def _part(self, span: Span, low: int, high: int) -> bool:
        start, size = max(span.begin, low), min(span.end, high) - max(span.begin, low)
        values = elements(self._slots.memory, span.dtype, start, size // span.dtype.itemsize) if size > 0 else None
        return values is None or is_harmless(values, False)
