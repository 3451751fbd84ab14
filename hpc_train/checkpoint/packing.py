"""The image of a file whose tensors lie here and there in memory, put together a piece at a time as it is written."""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_train.checkpoint.image import ALIGNMENT, Image


@dataclass(frozen=True)
class Extent:
    """Bytes of a file, and where they come from."""

    begin: int
    data: memoryview
    aligned: bool = False
    """The memory begins at a page where the file does, and so direct I/O takes it."""

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


class Buffers:
    """Pages for the threads of one packing after the other: new ones cost several times what is done with them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._of: dict[int, mmap.mmap] = {}

    def free(self) -> None:
        """The threads that had them have ended."""
        self._free += self._of.values()
        self._of = {}

    def mine(self, size: int) -> memoryview:
        """At least so many bytes, of this thread until `free`."""
        with self._lock:
            thread = threading.get_ident()
            if thread not in self._of or len(self._of[thread]) < size:
                self._of[thread] = self._take(size)
            return memoryview(self._of[thread])

    def _take(self, size: int) -> mmap.mmap:
        self._free = [it for it in self._free if len(it) >= size]
        return self._free.pop() if self._free else mmap.mmap(-1, -(-size // ALIGNMENT) * ALIGNMENT)


class Packing:
    """A source for `stream.write_stream`."""

    def __init__(self, rows: Sequence[Extent], image: Image, buffers: Buffers) -> None:
        """rows: the data of the image. buffers: no other packing's now."""
        structure = [Extent(begin, memoryview(content)) for begin, content in image.structure]
        self._extents = sorted([*rows, *structure], key=lambda it: it.begin)
        self._begins = [it.begin for it in self._extents]
        self._buffers = buffers
        buffers.free()

    def read(self, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of the file, valid until this thread asks again; what is past its end is undefined."""
        first = max(0, bisect_right(self._begins, begin) - 1)
        extent = self._extents[first]
        if extent.aligned and extent.end >= end:
            return extent.data[begin - extent.begin : end - extent.begin]
        buffer = self._buffers.mine(end - begin)[: end - begin]
        for extent in self._extents[first : bisect_left(self._begins, end)]:
            low, high = max(begin, extent.begin), min(end, extent.end)
            buffer[low - begin : high - begin] = extent.data[low - extent.begin : high - extent.begin]
        return buffer


def lying_in(memory: memoryview, image: Image, spans: Sequence[tuple[int, int]]) -> list[Extent]:
    """The data of an image. spans: (begin, size) in `memory`, which begins at a page, of each of its rows."""
    return [
        Extent(place, memory[begin : begin + size], (begin - place) % ALIGNMENT == 0)
        for place, (begin, size) in zip(image.places, spans, strict=True)
        if size
    ]
