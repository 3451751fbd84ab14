"""What every file of a step holds: layouts that many files share, and for each file where its rectangles lie.

Ten thousand ranks with a thousand tensors each are ten million rectangles, but a few layouts: the shapes of a rank's
shards and their bytes in its file are those of its neighbours, and where a shard begins in its tensor follows a rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.dtypes import dtype_name, itemsize_of
from hpc_train.checkpoint.image import Image, Row
from hpc_train.checkpoint.rectangle import Rectangle
from hpc_train.checkpoint.seal import seal_of_rows

T = TypeVar("T")
Integers = NDArray[np.int64]
_FEW = 8
"""Members that are faster looked at one by one."""


class Tensor(NamedTuple):
    """A logical tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return itemsize_of(self.dtype)

    @property
    def rectangle(self) -> Rectangle:
        """All of it."""
        return Rectangle((0,) * len(self.shape), self.shape)


class Within(NamedTuple):
    """The dataset of a file that a rectangle is a part of."""

    number: int
    """Its tensor's first dataset in that file is 0 (see image.dataset_name)."""
    shape: tuple[int, ...]
    start: tuple[int, ...]
    """Where the rectangle begins in it."""


@dataclass(frozen=True)
class Held:
    """What one file holds."""

    rows: tuple[Row, ...]
    places: tuple[int, ...]
    """Byte of the file at which each row's data begins."""
    within: tuple[Within, ...] | None = None
    """[rows], where the rows are not all the datasets of the file, whole and in order."""

    @cached_property
    def seal(self) -> bytes:
        """Seal of the file (see seal); computed once, as most saves are like the one before."""
        return seal_of_rows(self.rows, self.places)


@dataclass(frozen=True)
class Part:
    """One saved rectangle of a logical tensor."""

    file: int
    """Index among the step's files."""
    place: int
    """Byte of the file at which it begins."""
    rectangle: Rectangle


class Kind(NamedTuple):
    """What a logical tensor has in common with many others."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """How rows of a layout are cut out of their tensors."""

    shape: tuple[int, ...]
    """Of the rectangle."""
    offsets: Integers
    """[members, dimensions]: where in the logical tensor."""


@dataclass(frozen=True)
class Layout:
    """Rows that several files hold at the same bytes, though of different parts of the tensors."""

    files: Integers
    """[members]: indices among the step's files."""
    tensors: Integers
    """[rows]: indices among the step's tensors."""
    places: Integers
    """[rows]"""
    cuts: tuple[Cut, ...]
    cut: Integers
    """[rows]: indices among the cuts."""
    within: tuple[Within, ...] | None = None
    """[rows]; see Held."""

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """[rows]: of the rectangle."""
        return [self.cuts[it].shape for it in self.cut.tolist()]

    @cached_property
    def offsets(self) -> list[Integers]:
        """[rows][members, dimensions]: where in the logical tensor."""
        return [self.cuts[it].offsets for it in self.cut.tolist()]

    def touching(self, row: int, wanted: Rectangle) -> list[Part]:
        """The parts of one row that have an element of a rectangle."""
        shape, offsets = self.shapes[row], self.offsets[row]
        if 0 in shape or 0 in wanted.shape:
            return []
        members: Any = range(len(self.files))
        if len(self.files) > _FEW:
            begin = np.asarray(wanted.offset, dtype=np.int64)
            end = begin + np.asarray(wanted.shape, dtype=np.int64)
            members = np.flatnonzero(((offsets < end) & (offsets + shape > begin)).all(axis=1))
        place = int(self.places[row])
        parts = (Part(int(self.files[it]), place, Rectangle(tuple(offsets[it].tolist()), shape)) for it in members)
        return [part for part in parts if part.rectangle == wanted or part.rectangle.overlap(wanted)]


@dataclass(frozen=True)
class Holdings:
    """All tensors of a step, and which file has which part of them.

    In columns: of thousands of tensors many are alike, and most readers want few of them.
    """

    names: tuple[str, ...]
    """[tensors]"""
    kinds: tuple[Kind, ...]
    kind: Integers
    """[tensors]: indices among the kinds."""
    layouts: tuple[Layout, ...]

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The logical tensors."""
        return tuple(Tensor(name, *self.kinds[it]) for name, it in zip(self.names, self.kind.tolist(), strict=True))

    def touching(self, name: str, wanted: Rectangle) -> list[Part]:
        """The parts of a tensor that have an element of a rectangle of it, without a look at other tensors."""
        return [part for layout, row in self._rows.get(name, ()) for part in layout.touching(row, wanted)]

    @cached_property
    def _rows(self) -> dict[str, list[tuple[Layout, int]]]:
        """Of every tensor the rows that are parts of it."""
        found: dict[str, list[tuple[Layout, int]]] = {}
        for layout in self.layouts:
            for row, tensor in enumerate(layout.tensors.tolist()):
                found.setdefault(self.names[tensor], []).append((layout, row))
        return found

    def is_in_one_part(self, tensor: Tensor) -> bool:
        """Whether one file has all of a tensor, in one rectangle, and no other has any of it."""
        rows = self._rows.get(tensor.name, ())
        if len(rows) != 1 or len(rows[0][0].files) != 1:
            return False
        layout, row = rows[0]
        return layout.shapes[row] == tensor.shape and not layout.offsets[row].any()

    def rectangles(self, tensor: Tensor) -> tuple[Integers, Integers]:
        """Of all parts of a tensor that have elements the offsets and the shapes, [parts, dimensions] each."""
        offsets = shapes = np.empty((0, len(tensor.shape)), dtype=np.int64)
        rows = [(it.offsets[row], it.shapes[row]) for it, row in self._rows.get(tensor.name, ())]
        rows = [(of_row, shape) for of_row, shape in rows if 0 not in shape]
        if rows:
            offsets = np.concatenate([of_row for of_row, _ in rows])
            counts = [len(of_row) for of_row, _ in rows]
            shapes = np.repeat(np.asarray([shape for _, shape in rows], dtype=np.int64), counts, axis=0)
        return offsets, shapes

    def parts(self) -> dict[str, list[Part]]:
        """The parts of every tensor, those without elements left out."""
        found: dict[str, list[Part]] = {tensor.name: [] for tensor in self.tensors}
        for layout in self.layouts:
            files = layout.files.tolist()
            rows = zip(layout.tensors.tolist(), layout.shapes, layout.places.tolist(), layout.offsets, strict=True)
            for tensor, shape, place, offsets in rows:
                if 0 not in shape:
                    found[self.tensors[tensor].name] += [
                        Part(file, place, Rectangle(tuple(offset), shape))
                        for file, offset in zip(files, offsets.tolist(), strict=True)
                    ]
        return found


def gather(held: Sequence[Held]) -> Holdings:
    """From what every file holds, in the order of the files."""
    tensors: dict[Tensor, int] = {}
    members: dict[Any, list[int]] = {}
    for index, file in enumerate(held):
        numbered = tuple(tensors.setdefault(_tensor(row), len(tensors)) for row in file.rows)
        key = (numbered, tuple(row.local_shape for row in file.rows), file.places, file.within)
        members.setdefault(key, []).append(index)
    layouts = tuple(_layout(key, files, held) for key, files in members.items())
    kinds, kind = distinct(Kind(it.dtype, it.shape) for it in tensors)
    return Holdings(tuple(it.name for it in tensors), tuple(kinds), kind, layouts)


def distinct(values: Iterable[T]) -> tuple[list[T], Integers]:
    """The different ones, and of each its index among them."""
    known: dict[T, int] = {}
    numbers = [known.setdefault(it, len(known)) for it in values]
    return list(known), np.asarray(numbers, dtype=np.int64)


def _layout(key: Any, files: list[int], held: Sequence[Held]) -> Layout:
    numbered, shapes, places, within = key
    columns = zip(*(map(attrgetter("offset"), held[file].rows) for file in files), strict=True)
    found, cut = distinct(zip(shapes, columns, strict=True))
    cuts = tuple(
        Cut(shape, np.asarray(offsets, dtype=np.int64).reshape(len(files), len(shape))) for shape, offsets in found
    )
    of_files, of_rows, at = (np.asarray(it, dtype=np.int64) for it in (files, numbered, places))
    return Layout(of_files, of_rows, at, cuts, cut, within)


def _tensor(row: Row) -> Tensor:
    return Tensor(row.name, dtype_name(row.dtype), row.shape)


def held_by(rows: Sequence[Row], image: Image) -> Held:
    """Of a file with this image."""
    return Held(tuple(rows), image.places)
