"""Rectangles of a logical tensor: overlap, split, join, and check that they cover it exactly once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rectangle:
    """The elements with offset[d] <= index[d] < offset[d] + shape[d] in every dimension d.

    Without dimensions it is the one element of a scalar.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """Return the common part; None if it has no element."""
        begin = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = (min(a, b) for a, b in zip(self._end, other._end, strict=True))
        common = Rectangle(begin, tuple(e - b for b, e in zip(begin, end, strict=True)))
        return common if all(size > 0 for size in common.shape) else None

    def start_in(self, outer: Rectangle) -> tuple[int, ...]:
        """Return the offset of this rectangle within `outer`."""
        return tuple(begin - outer_begin for begin, outer_begin in zip(self.offset, outer.offset, strict=True))

    def contains(self, other: Rectangle) -> bool:
        """Return whether all of `other` is inside."""
        return all(
            begin <= other_begin and other_begin + size <= end
            for begin, other_begin, size, end in zip(self.offset, other.offset, other.shape, self._end, strict=True)
        )

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))


def make_slices(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that cut a rectangle out of an array."""
    return tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def split_slabs(rectangle: Rectangle, max_elements: int) -> Iterator[Rectangle]:
    """Split a rectangle into parts of at most `max_elements`, in row-major order; each is contiguous in memory."""
    dim = next((d for d, size in enumerate(rectangle.shape) if size > 1), None)
    if rectangle.volume <= max_elements or dim is None:
        yield rectangle
        return
    rows = max(1, max_elements // (rectangle.volume // rectangle.shape[dim]))
    for start in range(0, rectangle.shape[dim], rows):
        offset, shape = list(rectangle.offset), list(rectangle.shape)
        offset[dim] += start
        shape[dim] = min(rows, shape[dim] - start)
        yield from split_slabs(Rectangle(tuple(offset), tuple(shape)), max_elements)


def join_rectangles(first: Rectangle, second: Rectangle) -> Rectangle | None:
    """Join two rectangles, `second` right after `first` in memory; None if their union is no rectangle."""
    differs = [d for d, (a, b) in enumerate(zip(first.offset, second.offset, strict=True)) if a != b]
    if len(differs) != 1:
        return None
    dim = differs[0]
    rows = first.shape[dim] + second.shape[dim]
    shape = (*first.shape[:dim], rows, *first.shape[dim + 1 :])
    shapes_match = shape == (*second.shape[:dim], rows, *second.shape[dim + 1 :])
    follows = first.offset[dim] + first.shape[dim] == second.offset[dim] and prod(shape[:dim]) == 1
    return Rectangle(first.offset, shape) if shapes_match and follows else None


def forms_grid(full_shape: tuple[int, ...], offsets: NDArray[np.int64], shapes: NDArray[np.int64]) -> bool:
    """Return whether the rectangles are the cells of a grid over the whole tensor, and so cover it exactly once.

    offsets, shapes: [rectangles, dimensions], none empty. Takes n log n without a Python loop; `explain_coverage`
    checks all other coverings.
    """
    if len(offsets) == 1:
        return tuple(shapes[0].tolist()) == full_shape and not offsets.any()
    cell = np.zeros(len(offsets), dtype=np.int64)
    cells = 1
    for dim, size in enumerate(full_shape):
        begins, index = np.unique(offsets[:, dim], return_inverse=True)
        lengths = np.diff([*begins, size])
        if not len(begins) or begins[0] != 0 or (lengths[index] != shapes[:, dim]).any():
            return False
        cell, cells = cell * len(begins) + index.reshape(-1), cells * len(begins)
    return len(cell) == cells and (np.bincount(cell, minlength=cells) == 1).all().item()


def explain_coverage(full: Rectangle, parts: Sequence[Rectangle]) -> str | None:
    """Explain, for an error message, why `parts` do not cover `full` exactly once; None if they do."""
    filled = [part for part in parts if part.volume]
    outside = next((part for part in filled if not full.contains(part)), None)
    if outside is not None:
        return f"a piece of shape {outside.shape} at {outside.offset} reaches outside of it"
    twice = _find_overlap(filled)
    if twice is not None:
        return f"the pieces at {twice[0].offset} and at {twice[1].offset} overlap"
    missing = full.volume - sum(part.volume for part in filled)
    return f"{missing} of its {full.volume} elements are in no piece" if missing else None


def _find_overlap(parts: list[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Return two parts that share an element, if any.

    Sweeps the dimension with the most cuts, so that rows or columns take n log n.
    """
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
