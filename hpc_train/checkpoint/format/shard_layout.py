"""Describe which file of a step holds which rectangles, in layouts that many files share.

Ten thousand ranks with a thousand tensors each are ten million rectangles, but a few layouts: the shapes of a rank's
shards and their bytes in its file are those of its neighbours, and where a shard begins in its tensor follows a rule.

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
    forms = [(dtype_name(it.dtype), it.shape, it.offset, it.local_shape) for it in rows]
    column = [codes[it] if it in codes else codes.setdefault(it, hash_row_form(it)) for it in forms]
    return compute_seal([it.name for it in rows], np.array(column, dtype=np.uint64), np.array(places, dtype=np.int64))


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
_FEW = 8
"""Up to so many members, a loop is faster than numpy."""


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
    """Where the rectangle begins in it."""


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
    """Dtype and shape, which many tensors have in common."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RowCut:
    """Shape and offsets of rectangles, which many rows of a layout have in common."""

    shape: tuple[int, ...]
    """Of the rectangle."""
    offsets: Integers
    """[members, dimensions]: where in the logical tensor."""


@dataclass(frozen=True)
class SharedLayout:
    """Rows that several files have at the same bytes, each of other parts of the tensors."""

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
        """[rows]: of the rectangle."""
        return [self.cuts[it].shape for it in self.cut.tolist()]

    @cached_property
    def offsets(self) -> list[Integers]:
        """[rows][members, dimensions]: where in the logical tensor."""
        return [self.cuts[it].offsets for it in self.cut.tolist()]

    def touching(self, row: int, wanted: Rectangle) -> list[SavedPart]:
        """Return the parts of one row that overlap a rectangle."""
        shape, offsets = self.shapes[row], self.offsets[row]
        if 0 in shape or 0 in wanted.shape:
            return []
        members: Any = range(len(self.files))
        if len(self.files) > _FEW:
            begin = np.asarray(wanted.offset, dtype=np.int64)
            end = begin + np.asarray(wanted.shape, dtype=np.int64)
            members = np.flatnonzero(((offsets < end) & (offsets + shape > begin)).all(axis=1))
        place = int(self.places[row])
        parts = (SavedPart(int(self.files[it]), place, Rectangle(tuple(offsets[it].tolist()), shape)) for it in members)
        return [part for part in parts if part.rectangle == wanted or part.rectangle.overlap(wanted)]


@dataclass(frozen=True)
class StepLayout:
    """All tensors of a step, and which file has which part of them.

    Stored in columns: of thousands of tensors many are alike, and most readers need few of them.
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
            SavedTensor(name, *self.kinds[it]) for name, it in zip(self.names, self.kind.tolist(), strict=True)
        )

    def touching(self, name: str, wanted: Rectangle) -> list[SavedPart]:
        """Return the parts of a tensor that overlap a rectangle of it, without looking at other tensors."""
        return [part for layout, row in self._rows.get(name, ()) for part in layout.touching(row, wanted)]

    @cached_property
    def _rows(self) -> dict[str, list[tuple[SharedLayout, int]]]:
        """Layouts and rows of the parts of each tensor."""
        found: dict[str, list[tuple[SharedLayout, int]]] = {}
        for layout in self.layouts:
            for row, tensor in enumerate(layout.tensors.tolist()):
                found.setdefault(self.names[tensor], []).append((layout, row))
        return found

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
        rows = [(it.offsets[row], it.shapes[row]) for it, row in self._rows.get(tensor.name, ())]
        rows = [(of_row, shape) for of_row, shape in rows if 0 not in shape]
        if rows:
            offsets = np.concatenate([of_row for of_row, _ in rows])
            counts = [len(of_row) for of_row, _ in rows]
            shapes = np.repeat(np.asarray([shape for _, shape in rows], dtype=np.int64), counts, axis=0)
        return offsets, shapes

    def parts(self) -> dict[str, list[SavedPart]]:
        """Return the parts of every tensor; parts without elements are left out."""
        found: dict[str, list[SavedPart]] = {tensor.name: [] for tensor in self.tensors}
        for layout in self.layouts:
            files = layout.files.tolist()
            rows = zip(layout.tensors.tolist(), layout.shapes, layout.places.tolist(), layout.offsets, strict=True)
            for tensor, shape, place, offsets in rows:
                if 0 not in shape:
                    found[self.tensors[tensor].name] += [
                        SavedPart(file, place, Rectangle(tuple(offset), shape))
                        for file, offset in zip(files, offsets.tolist(), strict=True)
                    ]
        return found


def gather_layouts(held: Sequence[FileLayout]) -> StepLayout:
    """Gather the layouts of all files, in their order, into one of the step."""
    tensors: dict[SavedTensor, int] = {}
    members: dict[Any, list[int]] = {}
    for index, file in enumerate(held):
        numbered = tuple(tensors.setdefault(_tensor_of_row(row), len(tensors)) for row in file.rows)
        key = (numbered, tuple(row.local_shape for row in file.rows), file.places, file.within)
        members.setdefault(key, []).append(index)
    layouts = tuple(_share_layout(key, files, held) for key, files in members.items())
    kinds, kind = find_distinct(TensorKind(it.dtype, it.shape) for it in tensors)
    return StepLayout(tuple(it.name for it in tensors), tuple(kinds), kind, layouts)


def find_distinct(values: Iterable[T]) -> tuple[list[T], Integers]:
    """Return the distinct values, and for each value its index among them."""
    known: dict[T, int] = {}
    numbers = [known.setdefault(it, len(known)) for it in values]
    return list(known), np.asarray(numbers, dtype=np.int64)


def _share_layout(key: Any, files: list[int], held: Sequence[FileLayout]) -> SharedLayout:
    numbered, shapes, places, within = key
    columns = zip(*(map(attrgetter("offset"), held[file].rows) for file in files), strict=True)
    found, cut = find_distinct(zip(shapes, columns, strict=True))
    cuts = tuple(
        RowCut(shape, np.asarray(offsets, dtype=np.int64).reshape(len(files), len(shape))) for shape, offsets in found
    )
    of_files, of_rows, at = (np.asarray(it, dtype=np.int64) for it in (files, numbered, places))
    return SharedLayout(of_files, of_rows, at, cuts, cut, within)


def _tensor_of_row(row: DatasetRow) -> SavedTensor:
    return SavedTensor(row.name, dtype_name(row.dtype), row.shape)


def make_file_layout(rows: Sequence[DatasetRow], image: ShardImage) -> FileLayout:
    """Return the layout of a file with this image."""
    return FileLayout(tuple(rows), image.places)


_NAME: Any = attrgetter("name")
_PIECE_FORM: Any = attrgetter("shape", "dtype", "offset", "local.shape")
"""A Form is such a tuple."""
_NONE, _UNKNOWN = -1, -2


class PieceForm(NamedTuple):
    """What must be equal for a tensor shard to be just what was saved."""

    of: tuple[int, ...]
    """Shape of the logical tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the rectangle."""


@dataclass(frozen=True)
class SingleShardTensors:
    """Tensors stored whole in one shard file, in columns; tensors without elements are left out."""

    rows: dict[str, int]
    """Row of each tensor in the columns, by name."""
    forms: dict[PieceForm, int]
    form: Integers
    files: Integers
    places: Integers

    @cached_property
    def sizes(self) -> Integers:
        """[forms]: bytes of the rectangle."""
        return np.array([prod(it.shape) * it.dtype.itemsize for it in self.forms], dtype=np.int64)

    def equal(self, pieces: Sequence[TensorShard]) -> Integers:
        """Return [pieces]: the row of each shard that is just what was saved; -1 for the others."""
        rows = np.array([self.rows.get(it, _NONE) for it in map(_NAME, pieces)], dtype=np.int64)
        form = np.array([self.forms.get(it, _UNKNOWN) for it in map(_PIECE_FORM, pieces)], dtype=np.int64)
        some = np.flatnonzero(rows != _NONE)
        rows[some[self.form[rows[some]] != form[some]]] = _NONE
        return rows


def find_single_shard_tensors(holdings: StepLayout) -> SingleShardTensors:
    """Find the tensors stored whole in one shard file. Names must be distinct (see check_layout_bounds)."""
    names, none = holdings.names, np.zeros(0, dtype=np.int64)
    forms: dict[PieceForm, int] = {}
    times, found = np.zeros(len(names), dtype=np.int64), [(none, none, none, none)]
    for it in holdings.layouts:
        np.add.at(times, it.tensors, len(it.files))
        if len(it.files) == 1:
            found.append(
                (it.tensors, _number_forms(holdings, it, forms), np.repeat(it.files, len(it.tensors)), it.places)
            )
    tensors, form, files, places = (np.concatenate(column) for column in zip(*found, strict=True))
    alone = np.flatnonzero((times[tensors] == 1) & (form != _NONE))
    of_rows = map(names.__getitem__, tensors[alone].tolist())
    rows = {name: row for row, name in enumerate(of_rows)}
    return SingleShardTensors(rows, forms, form[alone], files[alone], places[alone])


def _number_forms(holdings: StepLayout, layout: SharedLayout, forms: dict[PieceForm, int]) -> Integers:
    """Return [rows]: the number of each form; -1 if it has no elements, or a dtype that this torch does not have."""
    both = holdings.kind[layout.tensors] * len(layout.cuts) + layout.cut
    different, which = np.unique(both, return_inverse=True)
    numbers = []
    for kind, cut in (divmod(it, len(layout.cuts)) for it in different.tolist()):
        numbers.append(_number_form(holdings.kinds[kind], layout.cuts[cut], forms))
    return np.array(numbers, dtype=np.int64)[which]


def _number_form(kind: TensorKind, cut: RowCut, forms: dict[PieceForm, int]) -> int:
    if 0 in cut.shape:
        return _NONE
    try:
        dtype = parse_dtype(kind.dtype)
    except ValueError:
        return _NONE
    return forms.setdefault(PieceForm(kind.shape, dtype, tuple(cut.offsets[0].tolist()), cut.shape), len(forms))
