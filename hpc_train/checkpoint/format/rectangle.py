"""Rectangles of a logical tensor: overlaps, splits, and whether some of them cover it exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rectangle:
    """The elements offset[d] <= index[d] < offset[d] + shape[d] in every dimension d (one element if there is none)."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """The common part; None if it has no element."""
        begin = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = (min(a, b) for a, b in zip(self._end, other._end, strict=True))
        common = Rectangle(begin, tuple(e - b for b, e in zip(begin, end, strict=True)))
        return common if all(size > 0 for size in common.shape) else None

    def start_in(self, outer: Rectangle) -> tuple[int, ...]:
        """Where this rectangle begins, counted from the beginning of `outer`."""
        return tuple(mine - its for mine, its in zip(self.offset, outer.offset, strict=True))

    def contains(self, other: Rectangle) -> bool:
        """Whether no element of `other` is outside."""
        return all(
            mine <= its and its + size <= end
            for mine, its, size, end in zip(self.offset, other.offset, other.shape, self._end, strict=True)
        )

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))


def split_slabs(rectangle: Rectangle, most: int) -> Iterator[Rectangle]:
    """The same in parts of at most `most` elements, in the order of memory; each is contiguous in the rectangle."""
    dim = next((d for d, size in enumerate(rectangle.shape) if size > 1), None)
    if rectangle.volume <= most or dim is None:
        yield rectangle
        return
    rows = max(1, most // (rectangle.volume // rectangle.shape[dim]))
    for at in range(0, rectangle.shape[dim], rows):
        offset, shape = list(rectangle.offset), list(rectangle.shape)
        offset[dim] += at
        shape[dim] = min(rows, shape[dim] - at)
        yield from split_slabs(Rectangle(tuple(offset), tuple(shape)), most)


def join_rectangles(first: Rectangle, second: Rectangle) -> Rectangle | None:
    """The one rectangle that two are, `second` right after `first` in the order of memory; None if they are none."""
    differs = [d for d, (a, b) in enumerate(zip(first.offset, second.offset, strict=True)) if a != b]
    if len(differs) != 1:
        return None
    dim = differs[0]
    rows = first.shape[dim] + second.shape[dim]
    shape = (*first.shape[:dim], rows, *first.shape[dim + 1 :])
    alike = shape == (*second.shape[:dim], rows, *second.shape[dim + 1 :])
    follows = first.offset[dim] + first.shape[dim] == second.offset[dim] and prod(shape[:dim]) == 1
    return Rectangle(first.offset, shape) if alike and follows else None


def forms_grid(whole: tuple[int, ...], offsets: NDArray[np.int64], shapes: NDArray[np.int64]) -> bool:
    """Whether rectangles are the cells of a grid over all of a tensor, so that they cover it exactly once.

    offsets, shapes: [rectangles, dimensions], none of them empty. It takes n log n, and no loop; that of other
    coverings is for `uncovered` to find out.
    """
    if len(offsets) == 1:
        return tuple(shapes[0].tolist()) == whole and not offsets.any()
    cell = np.zeros(len(offsets), dtype=np.int64)
    cells = 1
    for dim, size in enumerate(whole):
        begins, index = np.unique(offsets[:, dim], return_inverse=True)
        lengths = np.diff([*begins, size])
        if not len(begins) or begins[0] != 0 or (lengths[index] != shapes[:, dim]).any():
            return False
        cell, cells = cell * len(begins) + index.reshape(-1), cells * len(begins)
    return len(cell) == cells and (np.bincount(cell, minlength=cells) == 1).all().item()


def explain_coverage(whole: Rectangle, parts: Sequence[Rectangle]) -> str | None:
    """Why `parts` do not cover `whole` exactly once, in the words of an error message; None if they do."""
    filled = [part for part in parts if part.volume]
    outside = next((part for part in filled if not whole.contains(part)), None)
    if outside is not None:
        return f"a piece of shape {outside.shape} at {outside.offset} reaches outside of it"
    twice = _overlapping(filled)
    if twice is not None:
        return f"the pieces at {twice[0].offset} and at {twice[1].offset} overlap"
    missing = whole.volume - sum(part.volume for part in filled)
    return f"{missing} of its {whole.volume} elements are in no piece" if missing else None


def _overlapping(parts: list[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Two parts that share an element. Sweeps the dimension with the most cuts: rows or columns take n log n."""
    if len(parts) < 2:
        return None
    dims = range(len(parts[0].shape))
    if not dims:
        return parts[0], parts[1]
    axis = max(dims, key=lambda d: len({part.offset[d] for part in parts}))
    ordered = sorted(parts, key=lambda p: p.offset[axis])
    begins = np.array([part.offset for part in ordered], dtype=np.int64).T.copy()
    ends = begins + np.array([part.shape for part in ordered], dtype=np.int64).T
    still_open = np.zeros(0, dtype=np.int64)
    for index, part in enumerate(ordered):
        still_open = still_open[ends[axis][still_open] > part.offset[axis]]
        others = still_open
        for dim in dims:
            others = others[begins[dim][others] < ends[dim, index]]
            others = others[ends[dim][others] > begins[dim, index]]
        if len(others):
            return ordered[int(others[0])], part
        still_open = np.append(still_open, index)
    return None
