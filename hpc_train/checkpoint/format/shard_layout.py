"""Describe which file of a step holds which rectangles, in layouts that many files share.

Ten thousand ranks with a thousand tensors each are ten million rectangles, but a few layouts: the shapes of a rank's
shards and their bytes in its file are those of its neighbours, and the offset of a shard in its tensor follows a rule.

A seal is the digest of what a file holds, made by the rank that writes it and stored beside it: a manifest that says
anything else does not belong to the file. `find_single_shard_tensors` is the fast path for tensors stored whole in
one shard file: loading one just as it was saved costs a few look-ups.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpc_train.checkpoint.format.hdf5_layout import DatasetRow, ShardImage, dtype_itemsize, dtype_name, parse_dtype
from hpc_train.checkpoint.format.rectangle import Rectangle
from hpc_train.interfaces import TensorShard

if TYPE_CHECKING:
    import torch

RowForm = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(dtype, shape of the tensor, offset and shape of the rectangle)"""


def seal_rows(rows: Sequence[DatasetRow], places: Sequence[int]) -> bytes:
    """Return the 16-byte seal of a file as its writer knows it, from all its datasets in order."""
    codes: dict[RowForm, int] = {}
    forms = [(dtype_name(row.dtype), row.shape, row.offset, row.local_shape) for row in rows]
    column = [codes[form] if form in codes else codes.setdefault(form, hash_row_form(form)) for form in forms]
    return compute_seal([row.name for row in rows], np.array(column, dtype=np.uint64), np.array(places, dtype=np.int64))


def seal_table(of_rows: bytes, parts: NDArray[Any] | None) -> bytes:
    """Return the seal that the table stores; for a compressed file it covers its parts too."""
    return of_rows if parts is None else xxhash.xxh3_128_digest(of_rows + parts.tobytes())


def hash_row_form(form: RowForm) -> int:
    """Return a 64-bit hash of a form."""
    return xxhash.xxh3_64_intdigest(json.dumps(form).encode())


def compute_seal(names: Sequence[str], codes: NDArray[np.uint64], places: NDArray[np.int64]) -> bytes:
    """Return the 16-byte seal. names, codes, places: of every row; codes are of hash_row_form."""
    text = "\0".join(names)
    if text.count("\0") != max(0, len(names) - 1):  # a name contains NUL
        text = json.dumps(list(names))
    state = xxhash.xxh3_128(codes.astype("<u8").tobytes())
    state.update(places.astype("<i8").tobytes())
    state.update(text.encode())
    return state.digest()


T = TypeVar("T")
Integers = NDArray[np.int64]
_MAX_LOOPED_FILES = 8
"""Number of files of a tensor up to which a loop over them is faster than numpy."""


class SavedTensor(NamedTuple):
    """Name, dtype and shape of a logical tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtype_itemsize(self.dtype)

    @property
    def rectangle(self) -> Rectangle:
        """The whole tensor as a rectangle."""
        return Rectangle((0,) * len(self.shape), self.shape)


class EnclosingDataset(NamedTuple):
    """The dataset of a file that a rectangle is a part of."""

    number: int
    """Number of the dataset among those of its tensor in the file, from 0 (see dataset_name)."""
    shape: tuple[int, ...]
    start: tuple[int, ...]
    """Index at which the rectangle begins in the dataset."""


@dataclass(frozen=True)
class FileLayout:
    """The rectangles in one file, and where they are."""

    rows: tuple[DatasetRow, ...]
    places: tuple[int, ...]
    """Byte of the file at which each row's data begins."""
    within: tuple[EnclosingDataset, ...] | None = None
    """[rows]; None if the rows are all the datasets of the file, whole and in order."""

    @cached_property
    def seal(self) -> bytes:
        """Seal of the file (see seal_rows); computed once, as most saves have the layout of the one before."""
        return seal_rows(self.rows, self.places)


@dataclass(frozen=True)
class SavedPart:
    """One saved rectangle of a logical tensor."""

    file: int
    """Index among the step's files."""
    place: int
    """Byte of the file at which it begins."""
    rectangle: Rectangle


class TensorKind(NamedTuple):
    """Dtype and shape of a logical tensor; many tensors share one kind."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RowCut:
    """How files cut a tensor: shape and offset of the rectangle in each file; many rows of a layout share one cut."""

    shape: tuple[int, ...]
    """Shape of the rectangle."""
    offsets: Integers
    """[members, dimensions]: where each rectangle begins in the logical tensor."""


@dataclass(frozen=True)
class SharedLayout:
    """A layout that several files share: the same rows at the same bytes, each file with other parts of the tensors."""

    files: Integers
    """[members]: indices among the step's files."""
    tensors: Integers
    """[rows]: indices among the step's tensors."""
    places: Integers
    """[rows]"""
    cuts: tuple[RowCut, ...]
    cut: Integers
    """[rows]: indices among the cuts."""
    within: tuple[EnclosingDataset, ...] | None = None
    """[rows]; see FileLayout."""

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """[rows]: shape of the rectangle of each row."""
        return [self.cuts[index].shape for index in self.cut.tolist()]

    @cached_property
    def offsets(self) -> list[Integers]:
        """[rows][members, dimensions]: where each rectangle begins in the logical tensor."""
        return [self.cuts[index].offsets for index in self.cut.tolist()]

    def find_overlapping_parts(self, row: int, wanted: Rectangle) -> list[SavedPart]:
        """Return the parts of one row that overlap a rectangle."""
        shape, offsets = self.shapes[row], self.offsets[row]
        # A rectangle without elements overlaps nothing, wherever it lies.
        if 0 in shape or 0 in wanted.shape:
            return []
        members: Any = range(len(self.files))
        if len(self.files) > _MAX_LOOPED_FILES:
            begin = np.asarray(wanted.offset, dtype=np.int64)
            end = begin + np.asarray(wanted.shape, dtype=np.int64)
            members = np.flatnonzero(((offsets < end) & (offsets + shape > begin)).all(axis=1))
        place = int(self.places[row])
        parts = (
            SavedPart(int(self.files[member]), place, Rectangle(tuple(offsets[member].tolist()), shape))
            for member in members
        )
        return [part for part in parts if part.rectangle == wanted or part.rectangle.overlap(wanted)]


@dataclass(frozen=True)
class StepLayout:
    """All tensors of a step, and which file has which part of each.

    Stored in columns: many of thousands of tensors are alike, and most readers need only a few of them.
    """

    names: tuple[str, ...]
    """[tensors]"""
    kinds: tuple[TensorKind, ...]
    kind: Integers
    """[tensors]: indices among the kinds."""
    layouts: tuple[SharedLayout, ...]

    @cached_property
    def tensors(self) -> tuple[SavedTensor, ...]:
        """The logical tensors."""
        return tuple(
            SavedTensor(name, *self.kinds[kind]) for name, kind in zip(self.names, self.kind.tolist(), strict=True)
        )

    def find_overlapping_parts(self, name: str, wanted: Rectangle) -> list[SavedPart]:
        """Return the parts of a tensor that overlap a rectangle of it, without looking at other tensors."""
        return [part for layout, row in self._rows.get(name, ()) for part in layout.find_overlapping_parts(row, wanted)]

    @cached_property
    def _rows(self) -> dict[str, list[tuple[SharedLayout, int]]]:
        """Layouts and rows of the parts of each tensor."""
        rows: dict[str, list[tuple[SharedLayout, int]]] = {}
        for layout in self.layouts:
            for row, tensor in enumerate(layout.tensors.tolist()):
                rows.setdefault(self.names[tensor], []).append((layout, row))
        return rows

    def is_in_one_part(self, tensor: SavedTensor) -> bool:
        """Return whether one file has all of a tensor in one rectangle, and no other file has any of it."""
        rows = self._rows.get(tensor.name, ())
        if len(rows) != 1 or len(rows[0][0].files) != 1:
            return False
        layout, row = rows[0]
        return layout.shapes[row] == tensor.shape and not layout.offsets[row].any()

    def rectangles(self, tensor: SavedTensor) -> tuple[Integers, Integers]:
        """Return offsets and shapes of all parts of a tensor with elements, [parts, dimensions] each."""
        offsets = shapes = np.empty((0, len(tensor.shape)), dtype=np.int64)
        rows = [(layout.offsets[row], layout.shapes[row]) for layout, row in self._rows.get(tensor.name, ())]
        rows = [(row_offsets, shape) for row_offsets, shape in rows if 0 not in shape]
        if rows:
            offsets = np.concatenate([row_offsets for row_offsets, _ in rows])
            counts = [len(row_offsets) for row_offsets, _ in rows]
            shapes = np.repeat(np.asarray([shape for _, shape in rows], dtype=np.int64), counts, axis=0)
        return offsets, shapes

    def parts(self) -> dict[str, list[SavedPart]]:
        """Return the parts of every tensor; parts without elements are left out."""
        parts_by_name: dict[str, list[SavedPart]] = {tensor.name: [] for tensor in self.tensors}
        for layout in self.layouts:
            files = layout.files.tolist()
            rows = zip(layout.tensors.tolist(), layout.shapes, layout.places.tolist(), layout.offsets, strict=True)
            for tensor, shape, place, offsets in rows:
                if 0 not in shape:
                    parts_by_name[self.tensors[tensor].name] += [
                        SavedPart(file, place, Rectangle(tuple(offset), shape))
                        for file, offset in zip(files, offsets.tolist(), strict=True)
                    ]
        return parts_by_name


def gather_layouts(file_layouts: Sequence[FileLayout]) -> StepLayout:
    """Gather the layouts of all files, in file order, into the layout of the step.

    Files with equal rows at equal bytes share one SharedLayout.
    """
    tensors: dict[SavedTensor, int] = {}
    members: dict[Any, list[int]] = {}
    for index, file in enumerate(file_layouts):
        # Offsets are not in the key: they are what the members of a layout differ in.
        numbered = tuple(tensors.setdefault(_find_tensor_of_row(row), len(tensors)) for row in file.rows)
        key = (numbered, tuple(row.local_shape for row in file.rows), file.places, file.within)
        members.setdefault(key, []).append(index)
    layouts = tuple(_share_layout(key, files, file_layouts) for key, files in members.items())
    kinds, kind = find_distinct(TensorKind(tensor.dtype, tensor.shape) for tensor in tensors)
    return StepLayout(tuple(tensor.name for tensor in tensors), tuple(kinds), kind, layouts)


def find_distinct(values: Iterable[T]) -> tuple[list[T], Integers]:
    """Return the distinct values, and for each value its index among them."""
    numbers: dict[T, int] = {}
    indices = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.asarray(indices, dtype=np.int64)


def _share_layout(key: Any, files: list[int], file_layouts: Sequence[FileLayout]) -> SharedLayout:
    numbered, shapes, places, within = key
    # One column per row of the layout: its offset in each file. Rows with equal columns share one cut.
    columns = zip(*(map(attrgetter("offset"), file_layouts[file].rows) for file in files), strict=True)
    distinct, cut = find_distinct(zip(shapes, columns, strict=True))
    cuts = tuple(
        RowCut(shape, np.asarray(offsets, dtype=np.int64).reshape(len(files), len(shape)))
        for shape, offsets in distinct
    )
    members, tensors, begins = (np.asarray(column, dtype=np.int64) for column in (files, numbered, places))
    return SharedLayout(members, tensors, begins, cuts, cut, within)


def _find_tensor_of_row(row: DatasetRow) -> SavedTensor:
    return SavedTensor(row.name, dtype_name(row.dtype), row.shape)


def make_file_layout(rows: Sequence[DatasetRow], image: ShardImage) -> FileLayout:
    """Return the layout of a file with this image."""
    return FileLayout(tuple(rows), image.places)


_NAME: Any = attrgetter("name")
_SHARD_FORM: Any = attrgetter("shape", "dtype", "offset", "local.shape")
"""Gets the fields of a ShardForm from a TensorShard; equal tuples hash alike, so no ShardForm is made for each."""
_NONE, _UNKNOWN = -1, -2
"""In place of a number: the file has no such tensor or form, and no file has had this form."""


class ShardForm(NamedTuple):
    """The properties in which a tensor shard must equal a saved one to be loaded from it as is."""

    tensor_shape: tuple[int, ...]
    """Shape of the logical tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the rectangle."""


@dataclass(frozen=True)
class SingleShardTensors:
    """Tensors stored whole in one shard file, in columns; tensors without elements are left out."""

    rows: dict[str, int]
    """Row of each tensor in the columns, by name."""
    forms: dict[ShardForm, int]
    form: Integers
    files: Integers
    places: Integers

    @cached_property
    def sizes(self) -> Integers:
        """[forms]: bytes of the rectangle."""
        return np.array([prod(form.shape) * form.dtype.itemsize for form in self.forms], dtype=np.int64)

    def match_shards(self, shards: Sequence[TensorShard]) -> Integers:
        """Return [shards]: the row of each shard that is just what was saved; -1 for the others."""
        rows = np.array([self.rows.get(name, _NONE) for name in map(_NAME, shards)], dtype=np.int64)
        form = np.array([self.forms.get(key, _UNKNOWN) for key in map(_SHARD_FORM, shards)], dtype=np.int64)
        # Only where a row was found: -1 as an index would be the last row.
        some = np.flatnonzero(rows != _NONE)
        rows[some[self.form[rows[some]] != form[some]]] = _NONE
        return rows


def find_single_shard_tensors(step_layout: StepLayout) -> SingleShardTensors:
    """Find the tensors stored whole in one shard file. Names must be distinct (see check_layout_bounds)."""
    names, none = step_layout.names, np.zeros(0, dtype=np.int64)
    forms: dict[ShardForm, int] = {}
    parts = np.zeros(len(names), dtype=np.int64)  # of each tensor, in all files
    columns = [(none, none, none, none)]
    for layout in step_layout.layouts:
        np.add.at(parts, layout.tensors, len(layout.files))
        if len(layout.files) == 1:
            file = np.repeat(layout.files, len(layout.tensors))
            columns.append((layout.tensors, _number_forms(step_layout, layout, forms), file, layout.places))
    tensors, form, files, places = (np.concatenate(column) for column in zip(*columns, strict=True))
    single = np.flatnonzero((parts[tensors] == 1) & (form != _NONE))
    rows = {names[tensor]: row for row, tensor in enumerate(tensors[single].tolist())}
    return SingleShardTensors(rows, forms, form[single], files[single], places[single])


def _number_forms(step_layout: StepLayout, layout: SharedLayout, forms: dict[ShardForm, int]) -> Integers:
    """Return [rows]: the number of each form; -1 if it has no elements, or a dtype that this torch does not have."""
    # One number for each pair of kind and cut: most rows share a few pairs, and each pair is looked up once.
    pairs = step_layout.kind[layout.tensors] * len(layout.cuts) + layout.cut
    different, which = np.unique(pairs, return_inverse=True)
    numbers = []
    for kind, cut in (divmod(pair, len(layout.cuts)) for pair in different.tolist()):
        numbers.append(_number_form(step_layout.kinds[kind], layout.cuts[cut], forms))
    return np.array(numbers, dtype=np.int64)[which]


def _number_form(kind: TensorKind, cut: RowCut, forms: dict[ShardForm, int]) -> int:
    if 0 in cut.shape:
        return _NONE
    try:
        dtype = parse_dtype(kind.dtype)
    except ValueError:
        return _NONE
    return forms.setdefault(ShardForm(kind.shape, dtype, tuple(cut.offsets[0].tolist()), cut.shape), len(forms))
