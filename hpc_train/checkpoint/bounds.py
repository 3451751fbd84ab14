"""Check that what a manifest says of tensors and bytes is possible: all rows of a layout at once, before any use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.holdings import Holdings, Integers, Layout
from hpc_train.checkpoint.pattern import LARGEST

if TYPE_CHECKING:
    from hpc_train.checkpoint.manifest import ShardFile

_PAIRS, _DIMENSIONS = 4096, 32
_DATASET = 64
"""Minimum bytes that a dataset takes in a file, without its data."""
_ITEM = {"bool": 1, "complex64": 8, "complex128": 16, "bfloat16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)
}


def itemsize_of(dtype: str) -> int:
    """Return bytes per element; 1, the minimum, for a dtype that this release does not know."""
    return _ITEM.get(dtype, 1)


def check_holdings(holdings: Holdings, files: Sequence[ShardFile]) -> None:
    """Raise CheckpointError unless every rectangle is in its tensor, and every row has bytes of its files to itself.

    The rectangles of a tensor must also have as many elements together as the tensor. Whether they are the same
    elements is checked by `manifest.incomplete`, which looks at tensors one by one.
    """
    twice = named_twice(holdings.names)
    if twice is not None:
        raise CheckpointError(f"tensor {twice!r} is listed twice")
    of_files = [it.files for it in holdings.layouts]
    if of_files and len(np.unique(np.concatenate(of_files))) < sum(map(len, of_files)):
        raise CheckpointError("a file has two layouts")
    if sum(map(len, of_files)) < len(files):
        raise CheckpointError("a file has no layout")
    images = np.array([file.image for file in files], dtype=np.int64)
    elements, about = np.zeros((2, len(holdings.names)), dtype=np.int64), np.zeros(len(holdings.names))
    volumes = np.array([_volume(it.shape, itemsize_of(it.dtype)) for it in holdings.kinds], dtype=np.int64)
    items = np.array([itemsize_of(it.dtype) for it in holdings.kinds], dtype=np.int64)
    for layout in holdings.layouts:
        _check_rectangles(holdings, layout)
        _check_within(layout)
        volume = np.array([_volume(it.shape, 1) for it in layout.cuts], dtype=np.int64)[layout.cut]
        np.add.at(elements[0], layout.tensors, volume * len(layout.files))
        about += np.bincount(layout.tensors, volume.astype(np.float64), len(about)) * len(layout.files)
        if len(layout.files):
            if layout.within is None and len(layout.tensors) * _DATASET > min(files[it].bytes for it in layout.files):
                raise CheckpointError(f"{files[layout.files[0]].name} would have {len(layout.tensors)} datasets")
            sizes = volume * items[holdings.kind[layout.tensors]]  # no overflow: a rectangle is within its tensor
            _check_places(holdings, layout, sizes, int(images[layout.files].min()), files)
    elements[1] = volumes[holdings.kind]
    # the first sum may overflow: then it differs from the second, or the float sum is far from both
    wrong = (elements[0] != elements[1]) | (np.abs(about - elements[1]) > 0.001 * elements[1])
    if wrong.any():
        tensor = int(wrong.argmax())
        least = min(int(elements[1, tensor]), LARGEST)
        raise CheckpointError(
            f"tensor {holdings.names[tensor]!r}: its pieces have {about[tensor]:.0f} elements together, it has {least}"
        )


def named_twice(names: Sequence[str]) -> str | None:
    """Return a name that occurs more than once, if any."""
    return None if len(set(names)) == len(names) else Counter(names).most_common(1)[0][0]


def _volume(shape: tuple[int, ...], item: int) -> int:
    """Return the number of elements. Raises CheckpointError for more than memory can have."""
    volume = prod(shape)
    if volume * item > LARGEST:
        raise CheckpointError(f"a tensor of shape {shape}")
    return volume


def _check_rectangles(holdings: Holdings, layout: Layout) -> None:
    """Raise CheckpointError unless each rectangle is within its tensor, in every file."""
    whole, dimensions = _padded([it.shape for it in holdings.kinds])
    shape, of_cut = _padded([it.shape for it in layout.cuts])
    least, greatest = np.zeros_like(shape), np.zeros_like(shape)
    for at, cut in enumerate(layout.cuts):
        if cut.offsets.size:
            least[at, : len(cut.shape)] = cut.offsets.min(axis=0)
            greatest[at, : len(cut.shape)] = cut.offsets.max(axis=0)
    pairs = np.array(pairs_of(holdings, layout), dtype=np.int64).reshape(-1, 2)
    for first in range(0, len(pairs), _PAIRS):
        kind, cut = pairs[first : first + _PAIRS].T
        fits = (dimensions[kind] == of_cut[cut]) & (least[cut] >= 0).all(axis=1)
        fits &= (greatest[cut] <= whole[kind] - shape[cut]).all(axis=1)
        if not fits.all():
            bad = int(fits.argmin())
            piece, tensor = layout.cuts[cut[bad]].shape, holdings.kinds[kind[bad]].shape
            raise CheckpointError(f"a piece of shape {piece} reaches outside of a tensor of shape {tensor}")


def _padded(shapes: Sequence[tuple[int, ...]]) -> tuple[Integers, Integers]:
    """Return the shapes as [shapes, 32], padded with zeros, and the number of dimensions of each."""
    found = np.zeros((len(shapes), _DIMENSIONS), dtype=np.int64)
    for at, shape in enumerate(shapes):
        found[at, : len(shape)] = shape
    return found, np.array([len(it) for it in shapes], dtype=np.int64)


def pairs_of(holdings: Holdings, layout: Layout) -> list[tuple[int, int]]:
    """Return the (kind, cut) pairs of a layout, in ascending order: which kinds of tensors are cut in which ways."""
    if not len(layout.tensors):
        return []
    both = holdings.kind[layout.tensors] * len(layout.cuts) + layout.cut
    number = len(holdings.kinds) * len(layout.cuts)
    if number <= 4 * len(both):  # without sorting them
        there = np.zeros(number, dtype=np.bool_)
        there[both] = True
        found = np.flatnonzero(there)
    else:
        found = np.unique(both)
    return [divmod(it, len(layout.cuts)) for it in found.tolist()]


def _check_within(layout: Layout) -> None:
    """Raise CheckpointError unless each row is within the dataset that it is a part of."""
    if layout.within is None:
        return
    for within, shape in zip(layout.within, layout.shapes, strict=True):
        fits = len(within.shape) == len(within.start) == len(shape)
        if not fits or any(at + size > of for at, size, of in zip(within.start, shape, within.shape, strict=True)):
            raise CheckpointError(f"a piece of shape {shape} reaches outside of a dataset of shape {within.shape}")


def _check_places(holdings: Holdings, layout: Layout, sizes: Integers, image: int, files: Sequence[ShardFile]) -> None:
    """Raise CheckpointError if a row lies outside the smallest file or two share a byte; empty rows lie nowhere."""
    rows = np.flatnonzero(sizes)
    begin, size = layout.places[rows], sizes[rows]
    outside = (begin < 0) | (begin > image) | (size > image - begin)
    if outside.any():
        row = int(rows[outside.argmax()])
        raise CheckpointError(
            f"tensor {holdings.names[layout.tensors[row]]!r} would be at byte {layout.places[row]} of"
            f" {files[layout.files[0]].name}, {sizes[row]} bytes of {image}"
        )
    if (begin[1:] - begin[:-1] < size[:-1]).any():
        order = np.argsort(begin, kind="stable")
        shared = begin[order][1:] - begin[order][:-1] < size[order][:-1]
        if shared.any():
            at = int(shared.argmax())
            first, second = (holdings.names[layout.tensors[rows[order[it]]]] for it in (at, at + 1))
            raise CheckpointError(
                f"tensors {first!r} and {second!r} have bytes of {files[layout.files[0]].name} in common"
            )
