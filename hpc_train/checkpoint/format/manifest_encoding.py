"""Encode the layout of a step as columns of a manifest; decode and check the columns of a manifest from elsewhere.

Rows of integers become nested loops: the offsets and indices of thousands of ranks follow a rule, and the manifest
stores the rule. A few bytes of text can thus expand to many numbers, so decoding has a budget (`DecodeBudget`).
`check_layout_bounds` checks all rows of a layout at once, before any of them is used.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.shard_layout import (
    EnclosingDataset,
    Integers,
    RowCut,
    SharedLayout,
    StepLayout,
    TensorKind,
)

if TYPE_CHECKING:
    from hpc_train.checkpoint.format.manifest import ShardFile

IntegerArray = NDArray[np.int64]
LARGEST_INTEGER = 1 << 62
"""Largest number in a manifest; with larger ones, the sum of two could overflow."""
_MAX_LOOP_DEPTH = 64
"""Maximum nesting of loops; each of two or more rounds doubles the row, so no row needs more."""


def encode_integers(values: Sequence[int]) -> Any:
    """Encode a row of integers as JSON: `{"from": v, "loops": [[count, stride], ...]}`, outermost loop first.

    A row that is no nest of loops stays a plain list.
    """
    row = np.asarray(values, dtype=np.int64)
    loops = _find_loops(row)
    if loops is None:
        return row.tolist()
    return {"from": int(row[0]), "loops": [list(loop) for loop in loops]}


def decode_integers(code: Any, most: int) -> IntegerArray:
    """Decode a row of at most `most` integers; the number is checked before memory is allocated.

    Raises TypeError, KeyError, ValueError or OverflowError for anything that `encode_integers` does not make.
    """
    number = count_encoded(code)
    if number > most:
        raise ValueError(f"{number} numbers where there can be {most}")
    if type(code) is list:
        check_integers(code)
        return np.frombuffer(array("q", code), dtype=np.int64)  # several times as fast as asarray
    row = np.asarray([code["from"]], dtype=np.int64)
    for count, stride in code["loops"]:
        row = (row[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return row


def check_integers(values: Sequence[Any]) -> None:
    """Raise TypeError unless all values are integers; true and 1.0 are not."""
    if not set(map(type, values)) <= {int}:
        raise TypeError("a number that is not an integer")


def count_encoded(code: Any) -> int:
    """Return the number of values of an encoded row without decoding it. Raises as decode_integers."""
    if type(code) is list:
        return len(code)
    if type(code) is not dict or code.keys() != {"from", "loops"}:
        raise TypeError("a column that is neither a list nor loops")
    first, loops = code["from"], code["loops"]
    check_integers([first])
    if type(loops) is not list or len(loops) > _MAX_LOOP_DEPTH:
        raise TypeError("invalid loops")
    total, low, high = 1, first, first
    for loop in loops:
        if type(loop) is not list or len(loop) != 2:
            raise TypeError("a loop that is not a pair")
        check_integers(loop)
        count, stride = loop
        if not 1 <= count <= LARGEST_INTEGER:
            raise ValueError(f"a loop of {count} rounds")
        total, low, high = total * count, low + min(0, (count - 1) * stride), high + max(0, (count - 1) * stride)
    if low < -LARGEST_INTEGER or high > LARGEST_INTEGER:
        raise OverflowError("a number that is too large")
    return total


def _find_loops(row: IntegerArray) -> list[tuple[int, int]] | None:
    """Return (count, stride) of every loop, outermost first; None if the row is no nest of loops."""
    if len(row) < 2:
        return [] if len(row) else None
    stride = int(row[1] - row[0])
    jumps = np.flatnonzero(np.diff(row) != stride)
    count = int(jumps[0]) + 1 if len(jumps) else len(row)
    if count == 1 or len(row) % count:
        return None
    rounds = row.reshape(-1, count)
    if not (rounds == rounds[:, :1] + np.arange(count) * stride).all():
        return None
    outer = _find_loops(rounds[:, 0])
    return None if outer is None else [*outer, (count, stride)]


MAX_NAME_LENGTH = 65_535
"""Maximum characters of a tensor's name; HDF5 allows no more."""
MAX_DIMENSIONS = 32
"""Maximum dimensions of a tensor; HDF5 allows no more."""
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FREE = 1 << 21
"""Numbers to which loops may expand in every manifest, however short its text is."""


class DecodeBudget:
    """Limit on the numbers in the columns of a manifest, because a few bytes of text can expand to many.

    A job of thousands of ranks needs millions of numbers in a few loops. But each number belongs to a dataset, which
    takes some hundred bytes of a shard file, so more than `_FREE` are accepted only if the shard files are that large.
    """

    def __init__(self, text: int, stored: Callable[[], int]) -> None:
        """text: bytes of the manifest. stored: returns how many bytes the shard files have on the disk."""
        self._left, self._stored = _FREE + text, stored
        self._asked = False

    def take(self, number: int) -> None:
        """Take `number` numbers off the budget. Raises ValueError if fewer are left."""
        if number > self._left and not self._asked:
            self._left, self._asked = self._left + self._stored() // 64, True
        if number > self._left:
            raise ValueError("columns of more numbers than there can be in files of that size")
        self._left -= number

    def decode_column(self, code: Any, most: int) -> Integers:
        """Decode a column of at most `most` numbers."""
        if type(code) is not list:  # a list is as long in the text
            self.take(min(count_encoded(code), most))
        return decode_integers(code, most)


def encode_layout(step_layout: StepLayout) -> dict[str, Any]:
    """Encode a step layout as lists and numbers, by the keys of the manifest."""
    return {
        "tensors": step_layout.names,
        "kinds": {"of": encode_integers(step_layout.kind.tolist()), "are": step_layout.kinds},
        "layouts": [
            {
                "files": encode_integers(layout.files.tolist()),
                "tensors": encode_integers(layout.tensors.tolist()),
                "places": encode_integers(layout.places.tolist()),
                "cuts": {"of": encode_integers(layout.cut.tolist()), "are": [_encode_cut(cut) for cut in layout.cuts]},
                **({"within": layout.within} if layout.within is not None else {}),
            }
            for layout in step_layout.layouts
        ],
    }


def decode_layout(body: dict[str, Any], files: int, budget: DecodeBudget) -> StepLayout:
    """Decode the layout of a step with `files` files.

    Raises KeyError, TypeError, ValueError or OverflowError for anything that `encode_layout` does not make.
    """
    names = _parse_names(body["tensors"])
    kinds = tuple(_parse_kind(kind) for kind in _parse_list(body["kinds"]["are"]))
    kind = _parse_indices(body["kinds"]["of"], len(kinds), len(names), budget)
    layouts = tuple(_parse_layout(layout, len(names), files, budget) for layout in _parse_list(body["layouts"]))
    return StepLayout(names, kinds, kind, layouts)


def encode_columns(step_layout: StepLayout) -> dict[str, bytes]:
    """Encode a step layout with each value as JSON text, for Manifest.to_bytes."""
    how: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}
    return {key: json.dumps(value, **how).encode() for key, value in encode_layout(step_layout).items()}


def _parse_names(names: Any) -> tuple[str, ...]:
    if not set(map(type, _parse_list(names))) <= {str}:
        raise TypeError("a name that is not text")
    "".join(names).encode()  # raises ValueError for invalid text, such as half of a surrogate pair
    if max(map(len, names), default=0) > MAX_NAME_LENGTH:
        raise ValueError(f"a name of more than {MAX_NAME_LENGTH} characters")
    return tuple(names)


def _parse_kind(body: Any) -> TensorKind:
    dtype, shape = _parse_list(body)
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
        raise ValueError("a dtype that has no name")
    return TensorKind(dtype, parse_sizes(shape))


def parse_sizes(values: Any) -> tuple[int, ...]:
    """Return a shape or an offset; raises if a number is negative, or so large that a volume would overflow."""
    check_integers(_parse_list(values))
    if len(values) > MAX_DIMENSIONS or any(not 0 <= size <= LARGEST_INTEGER for size in values):
        raise ValueError("a shape that no tensor has")
    return tuple(values)


def _parse_list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{type(value).__name__} in place of a list")
    return value


def _parse_layout(body: dict[str, Any], tensors: int, number: int, budget: DecodeBudget) -> SharedLayout:
    files = _parse_indices(body["files"], number, None, budget)
    places = budget.decode_column(body["places"], LARGEST_INTEGER)
    cuts = tuple(_parse_cut(cut, len(files), budget) for cut in _parse_list(body["cuts"]["are"]))
    of_tensor = _parse_indices(body["tensors"], tensors, len(places), budget)
    of_cut = _parse_indices(body["cuts"]["of"], len(cuts), len(places), budget)
    within = tuple(map(_parse_enclosing, _parse_list(body["within"]))) if "within" in body else None
    if within is not None and len(within) != len(places):
        raise ValueError("a layout whose columns differ in length")
    return SharedLayout(files, of_tensor, places, cuts, of_cut, within)


def _parse_enclosing(body: Any) -> EnclosingDataset:
    number, shape, start = _parse_list(body)
    return EnclosingDataset(parse_sizes([number])[0], parse_sizes(shape), parse_sizes(start))


def _parse_indices(code: Any, among: int, number: int | None, budget: DecodeBudget) -> Integers:
    """Decode a column of indices below `among`. number: their number; None: any number, but none twice."""
    found = budget.decode_column(code, among if number is None else number)
    if number is not None and len(found) != number:
        raise ValueError("columns that do not fit each other")
    if len(found) and not 0 <= found.min() <= found.max() < among:
        raise ValueError("a column that counts entries that do not exist")
    if number is None and len(np.unique(found)) < len(found):
        raise ValueError("the same file twice in a layout")
    return found


def _encode_cut(cut: RowCut) -> Any:
    return [cut.shape, [encode_integers(column.tolist()) for column in cut.offsets.T]]


def _parse_cut(body: Any, members: int, budget: DecodeBudget) -> RowCut:
    shape, codes = _parse_list(body)
    columns = [budget.decode_column(code, members) for code in _parse_list(codes)]
    if len(columns) != len(_parse_list(shape)) or any(len(column) != members for column in columns):
        raise ValueError("offsets of another number of files")
    offsets = np.stack(columns, axis=1) if columns else np.empty((members, 0), dtype=np.int64)
    return RowCut(parse_sizes(shape), offsets)


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
    of_files = [layout.files for layout in step_layout.layouts]
    if of_files and len(np.unique(np.concatenate(of_files))) < sum(map(len, of_files)):
        raise CheckpointError("a file has two layouts")
    if sum(map(len, of_files)) < len(files):
        raise CheckpointError("a file has no layout")
    images = np.array([file.image for file in files], dtype=np.int64)
    elements, about = np.zeros((2, len(step_layout.names)), dtype=np.int64), np.zeros(len(step_layout.names))
    volumes = np.array(
        [_check_volume(kind.shape, choose_minimum_itemsize(kind.dtype)) for kind in step_layout.kinds], dtype=np.int64
    )
    items = np.array([choose_minimum_itemsize(kind.dtype) for kind in step_layout.kinds], dtype=np.int64)
    for layout in step_layout.layouts:
        _check_rectangles(step_layout, layout)
        _check_within(layout)
        volume = np.array([_check_volume(cut.shape, 1) for cut in layout.cuts], dtype=np.int64)[layout.cut]
        np.add.at(elements[0], layout.tensors, volume * len(layout.files))
        about += np.bincount(layout.tensors, volume.astype(np.float64), len(about)) * len(layout.files)
        if len(layout.files):
            if layout.within is None and len(layout.tensors) * _DATASET > min(
                files[file].bytes for file in layout.files
            ):
                raise CheckpointError(f"{files[layout.files[0]].name} would have {len(layout.tensors)} datasets")
            sizes = volume * items[step_layout.kind[layout.tensors]]  # no overflow: a rectangle is within its tensor
            _check_places(step_layout, layout, sizes, int(images[layout.files].min()), files)
    elements[1] = volumes[step_layout.kind]
    # the first sum may overflow: then it differs from the second, or the float sum is far from both
    wrong = (elements[0] != elements[1]) | (np.abs(about - elements[1]) > 0.001 * elements[1])
    if wrong.any():
        tensor = int(wrong.argmax())
        name, expected = step_layout.names[tensor], min(int(elements[1, tensor]), LARGEST_INTEGER)
        raise CheckpointError(
            f"tensor {name!r}: its pieces have {about[tensor]:.0f} elements together, it has {expected}"
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
    found = np.zeros((len(shapes), MAX_DIMENSIONS), dtype=np.int64)
    for index, shape in enumerate(shapes):
        found[index, : len(shape)] = shape
    return found, np.array([len(shape) for shape in shapes], dtype=np.int64)


def list_kind_cut_pairs(step_layout: StepLayout, layout: SharedLayout) -> list[tuple[int, int]]:
    """Return the (kind, cut) pairs of a layout, ascending: which kinds of tensors are cut in which ways."""
    if not len(layout.tensors):
        return []
    both = step_layout.kind[layout.tensors] * len(layout.cuts) + layout.cut
    number = len(step_layout.kinds) * len(layout.cuts)
    if number <= 4 * len(both):  # a table of flags is faster than the sort in np.unique
        is_used = np.zeros(number, dtype=np.bool_)
        is_used[both] = True
        found = np.flatnonzero(is_used)
    else:
        found = np.unique(both)
    return [divmod(pair, len(layout.cuts)) for pair in found.tolist()]


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
