"""Check that a decoded layout can be: every rectangle lies in its tensor, and no two rows share bytes of a file.

All rows are checked at once, before any of them is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.integer_columns import LARGEST_INTEGER
from hpc_train.checkpoint.format.manifest_encoding import MAX_DIMENSIONS
from hpc_train.checkpoint.format.shard_layout import Integers, SharedLayout, StepLayout

if TYPE_CHECKING:
    from hpc_train.checkpoint.format.manifest import ShardFile

_PAIRS = 4096
"""Pairs of a kind and a cut that are checked at a time, to bound the memory."""
_DATASET = 64
"""Minimum bytes of a dataset in a file, without its data."""
_ITEM = {"bool": 1, "complex64": 8, "complex128": 16, "bfloat16": 2} | {
    f"{kind}{bits}": bits // 8 for kind in ("float", "int", "uint") for bits in (8, 16, 32, 64)
}
"""Bytes of an element by dtype."""


def choose_minimum_itemsize(dtype: str) -> int:
    """Return bytes per element; 1, the minimum, for a dtype that this release does not know."""
    return _ITEM.get(dtype, 1)


def check_layout_bounds(step_layout: StepLayout, files: Sequence[ShardFile]) -> None:
    """Raise CheckpointError unless every rectangle lies in its tensor, and no two rows share bytes of a file.

    The rectangles of a tensor must also add up to its number of elements. That they do not overlap is checked by
    `find_incomplete_tensor`, tensor by tensor.
    """
    twice = find_duplicate_name(step_layout.names)
    if twice is not None:
        raise CheckpointError(f"tensor {twice!r} is listed twice")
    _check_one_layout_per_file(step_layout, files)
    # Volumes come first: with those of the tensors checked, no product of a rectangle inside one can overflow.
    items = [choose_minimum_itemsize(kind.dtype) for kind in step_layout.kinds]
    volumes = [_check_volume(kind.shape, item) for kind, item in zip(step_layout.kinds, items, strict=True)]
    item_of, volume_of = np.array(items, dtype=np.int64), np.array(volumes, dtype=np.int64)
    images = np.array([file.image for file in files], dtype=np.int64)
    count = len(step_layout.names)
    elements, about = np.zeros(count, dtype=np.int64), np.zeros(count)
    for layout in step_layout.layouts:
        _check_rectangles(step_layout, layout)
        _check_within(layout)
        volume = np.array([_check_volume(cut.shape, 1) for cut in layout.cuts], dtype=np.int64)[layout.cut]
        np.add.at(elements, layout.tensors, volume * len(layout.files))
        about += np.bincount(layout.tensors, volume.astype(np.float64), count) * len(layout.files)
        if len(layout.files):
            _check_number_of_datasets(layout, files)
            sizes = volume * item_of[step_layout.kind[layout.tensors]]
            _check_places(step_layout, layout, sizes, int(images[layout.files].min()), files)
    _check_element_counts(step_layout, elements, about, volume_of[step_layout.kind])


def _check_one_layout_per_file(step_layout: StepLayout, files: Sequence[ShardFile]) -> None:
    of_files = [layout.files for layout in step_layout.layouts]
    if of_files and len(np.unique(np.concatenate(of_files))) < sum(map(len, of_files)):
        raise CheckpointError("a file has two layouts")
    if sum(map(len, of_files)) < len(files):
        raise CheckpointError("a file has no layout")


def _check_number_of_datasets(layout: SharedLayout, files: Sequence[ShardFile]) -> None:
    """Raise CheckpointError for more datasets than the smallest file can have: a reader would make a row for each."""
    if layout.within is None and len(layout.tensors) * _DATASET > min(files[file].bytes for file in layout.files):
        raise CheckpointError(f"{files[layout.files[0]].name} would have {len(layout.tensors)} datasets")


def _check_element_counts(
    step_layout: StepLayout, elements: Integers, about: NDArray[np.float64], expected: Integers
) -> None:
    """Raise CheckpointError unless the rectangles of each tensor have as many elements together as the tensor.

    elements: their sums, which overflow where a manifest lists a rectangle very often. about: the same sums as floats,
    which do not: whatever overflows is far from the number of the tensor in at least one of the two.
    """
    wrong = (elements != expected) | (np.abs(about - expected) > 0.001 * expected)
    if wrong.any():
        tensor = int(wrong.argmax())
        name, limited = step_layout.names[tensor], min(int(expected[tensor]), LARGEST_INTEGER)
        raise CheckpointError(
            f"tensor {name!r}: its pieces have {about[tensor]:.0f} elements together, it has {limited}"
        )


def find_duplicate_name(names: Sequence[str]) -> str | None:
    """Return a name that occurs more than once, if any."""
    return None if len(set(names)) == len(names) else Counter(names).most_common(1)[0][0]


def _check_volume(shape: tuple[int, ...], item: int) -> int:
    """Return the number of elements. Raises CheckpointError for more than memory can have."""
    volume = prod(shape)
    if volume * item > LARGEST_INTEGER:
        raise CheckpointError(f"a tensor of shape {shape}")
    return volume


def _check_rectangles(step_layout: StepLayout, layout: SharedLayout) -> None:
    """Raise CheckpointError unless each rectangle is within its tensor, in every file."""
    global_shapes, dimensions = _pad([kind.shape for kind in step_layout.kinds])
    shape, of_cut = _pad([cut.shape for cut in layout.cuts])
    least, greatest = np.zeros_like(shape), np.zeros_like(shape)
    for index, cut in enumerate(layout.cuts):
        if cut.offsets.size:
            least[index, : len(cut.shape)] = cut.offsets.min(axis=0)
            greatest[index, : len(cut.shape)] = cut.offsets.max(axis=0)
    pairs = np.array(list_kind_cut_pairs(step_layout, layout), dtype=np.int64).reshape(-1, 2)
    for first in range(0, len(pairs), _PAIRS):
        kind, cut = pairs[first : first + _PAIRS].T
        fits = (dimensions[kind] == of_cut[cut]) & (least[cut] >= 0).all(axis=1)
        fits &= (greatest[cut] <= global_shapes[kind] - shape[cut]).all(axis=1)
        if not fits.all():
            bad = int(fits.argmin())
            piece, tensor = layout.cuts[cut[bad]].shape, step_layout.kinds[kind[bad]].shape
            raise CheckpointError(f"a piece of shape {piece} reaches outside of a tensor of shape {tensor}")


def _pad(shapes: Sequence[tuple[int, ...]]) -> tuple[Integers, Integers]:
    """Return the shapes as [shapes, 32], padded with zeros, and the number of dimensions of each."""
    padded = np.zeros((len(shapes), MAX_DIMENSIONS), dtype=np.int64)
    for index, shape in enumerate(shapes):
        padded[index, : len(shape)] = shape
    return padded, np.array([len(shape) for shape in shapes], dtype=np.int64)


def list_kind_cut_pairs(step_layout: StepLayout, layout: SharedLayout) -> list[tuple[int, int]]:
    """Return the (kind, cut) pairs of a layout, ascending: which kinds of tensors are cut in which ways."""
    if not len(layout.tensors):
        return []
    both = step_layout.kind[layout.tensors] * len(layout.cuts) + layout.cut
    number = len(step_layout.kinds) * len(layout.cuts)
    if number <= 4 * len(both):  # a table of flags is faster than the sort in np.unique
        is_used = np.zeros(number, dtype=np.bool_)
        is_used[both] = True
        pairs = np.flatnonzero(is_used)
    else:
        pairs = np.unique(both)
    return [divmod(pair, len(layout.cuts)) for pair in pairs.tolist()]


def _check_within(layout: SharedLayout) -> None:
    """Raise CheckpointError unless each row is within the dataset that it is a part of."""
    if layout.within is None:
        return
    for within, shape in zip(layout.within, layout.shapes, strict=True):
        fits = len(within.shape) == len(within.start) == len(shape)
        if not fits or any(at + size > of for at, size, of in zip(within.start, shape, within.shape, strict=True)):
            raise CheckpointError(f"a piece of shape {shape} reaches outside of a dataset of shape {within.shape}")


def _check_places(
    step_layout: StepLayout, layout: SharedLayout, sizes: Integers, image: int, files: Sequence[ShardFile]
) -> None:
    """Raise CheckpointError if a row lies outside the smallest file or two share a byte; empty rows lie nowhere."""
    rows = np.flatnonzero(sizes)
    begin, size = layout.places[rows], sizes[rows]
    outside = (begin < 0) | (begin > image) | (size > image - begin)
    if outside.any():
        row = int(rows[outside.argmax()])
        raise CheckpointError(
            f"tensor {step_layout.names[layout.tensors[row]]!r} would be at byte {layout.places[row]} of"
            f" {files[layout.files[0]].name}, {sizes[row]} bytes of {image}"
        )
    if (begin[1:] - begin[:-1] < size[:-1]).any():
        order = np.argsort(begin, kind="stable")
        shared = begin[order][1:] - begin[order][:-1] < size[order][:-1]
        if shared.any():
            at = int(shared.argmax())
            first, second = (step_layout.names[layout.tensors[rows[order[index]]]] for index in (at, at + 1))
            raise CheckpointError(
                f"tensors {first!r} and {second!r} have bytes of {files[layout.files[0]].name} in common"
            )
