"""What every file of a step holds: layouts that many files share, and for each file where its rectangles lie.

Ten thousand ranks with a thousand tensors each are ten million rectangles, but a few layouts: the shapes of a rank's
shards and their bytes in its file are those of its neighbours, and where a shard begins in its tensor follows a rule.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.dtypes import dtype_name, dtype_of
from hpc_train.checkpoint.image import Image, Row
from hpc_train.checkpoint.pattern import decode, encode
from hpc_train.checkpoint.rectangle import Rectangle

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
        return dtype_of(self.dtype).itemsize

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


@dataclass(frozen=True)
class Part:
    """One saved rectangle of a logical tensor."""

    file: int
    """Index among the step's files."""
    place: int
    """Byte of the file at which it begins."""
    rectangle: Rectangle


Kind = tuple[tuple[int, ...], str, tuple[int, ...], tuple[int, ...]]
"""Of a tensor its shape and dtype, of a rectangle of it the offset and the shape."""


@dataclass
class Lone:
    """The tensors of which one file has one rectangle, with elements, and no other has any."""

    rows: dict[str, int]
    """Of each by name, in the columns."""
    kinds: list[Kind]
    files: Integers
    places: Integers


@dataclass(frozen=True)
class Layout:
    """Rows that several files hold at the same bytes, though of different parts of the tensors."""

    files: Integers
    """[members]: indices among the step's files."""
    tensors: Integers
    """[rows]: indices among the step's tensors."""
    shapes: tuple[tuple[int, ...], ...]
    """[rows]: of the rectangle."""
    places: Integers
    """[rows]"""
    offsets: tuple[Integers, ...]
    """[rows][members, dimensions]: where in the logical tensor."""
    within: tuple[Within, ...] | None = None
    """[rows]; see Held."""

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
    """All tensors of a step, and which file has which part of them."""

    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]

    def touching(self, name: str, wanted: Rectangle) -> list[Part]:
        """The parts of a tensor that have an element of a rectangle of it, without a look at other tensors."""
        return [part for layout, row in self._rows.get(name, ()) for part in layout.touching(row, wanted)]

    @cached_property
    def _rows(self) -> dict[str, list[tuple[Layout, int]]]:
        """Of every tensor the rows that are parts of it."""
        names = [tensor.name for tensor in self.tensors]
        found: dict[str, list[tuple[Layout, int]]] = {}
        for layout in self.layouts:
            for row, tensor in enumerate(layout.tensors.tolist()):
                found.setdefault(names[tensor], []).append((layout, row))
        return found

    @cached_property
    def lone(self) -> Lone:
        """Found once, as mostly all of thousands of tensors are such."""
        counted = Counter(self.tensors[index].name for it in self.layouts for index in it.tensors.tolist())
        layouts = [it for it in self.layouts if len(it.files) == 1]
        tensors = [self.tensors[index] for it in layouts for index in it.tensors.tolist()]
        starts = {id(of): tuple(of[0].tolist()) for it in layouts for of in it.offsets}
        parts = (part for it in layouts for part in zip(it.offsets, it.shapes, strict=True))
        kinds = [(it.shape, it.dtype, starts[id(of)], shape) for it, (of, shape) in zip(tensors, parts, strict=True)]
        none = np.zeros(0, dtype=np.int64)
        return Lone(
            {it.name: row for row, it in enumerate(tensors) if counted[it.name] == 1 and 0 not in kinds[row][3]},
            kinds,
            np.concatenate([none, *(np.full(len(it.shapes), it.files[0]) for it in layouts)]),
            np.concatenate([none, *(it.places for it in layouts)]),
        )

    @cached_property
    def texts(self) -> dict[str, bytes]:
        """What `to_json` gives, each value as the text of a manifest."""
        how: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}
        return {key: json.dumps(value, **how).encode() for key, value in to_json(self).items()}

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
    return Holdings(tuple(tensors), layouts)


def to_json(holdings: Holdings) -> dict[str, Any]:
    """Lists and numbers only."""
    return {
        "tensors": [[it.name, it.dtype, list(it.shape)] for it in holdings.tensors],
        "layouts": [
            {
                "files": encode(it.files.tolist()),
                "tensors": encode(it.tensors.tolist()),
                "shapes": [list(shape) for shape in it.shapes],
                "places": it.places.tolist(),
                "offsets": [[encode(column.tolist()) for column in of_row.T] for of_row in it.offsets],
                **({"within": it.within} if it.within is not None else {}),
            }
            for it in holdings.layouts
        ],
    }


def from_json(body: dict[str, Any]) -> Holdings:
    """Raises KeyError, TypeError or ValueError for what `to_json` did not make."""
    tensors = tuple(Tensor(str(name), str(dtype), tuple(shape)) for name, dtype, shape in body["tensors"])
    known: dict[tuple[int, str], Integers] = {}
    return Holdings(tensors, tuple(_layout_from(it, len(tensors), known) for it in body["layouts"]))


def _layout_from(body: dict[str, Any], tensors: int, known: dict[tuple[int, str], Integers]) -> Layout:
    """known: what was decoded before; rows that are cut alike have equal offsets, and then one array."""
    files = decode(body["files"])
    shapes = tuple(tuple(shape) for shape in body["shapes"])
    offsets = tuple(_offsets(body["offsets"], len(files), known))
    within = tuple(Within(int(n), tuple(of), tuple(at)) for n, of, at in body["within"]) if "within" in body else None
    layout = Layout(files, decode(body["tensors"]), shapes, decode(body["places"]), offsets, within)
    rows = len(layout.tensors)
    columns = (shapes, layout.places, offsets, layout.tensors if within is None else within)
    if any(len(it) != rows for it in columns) or (rows and layout.tensors.max() >= tensors):
        raise ValueError("a layout whose columns differ in length")
    return layout


def _offsets(codes: list[Any], members: int, known: dict[tuple[int, str], Integers]) -> Iterator[Integers]:
    """Of every row. Most are as the row before, which is cheap to see."""
    last, made = None, None
    for of_row in codes:
        if made is None or of_row != last:
            key = (members, str(of_row))
            if key not in known:
                known[key] = _columns(of_row, members)
            last, made = of_row, known[key]
        yield made


def _columns(codes: list[Any], members: int) -> Integers:
    if not codes:
        return np.empty((members, 0), dtype=np.int64)
    columns = np.stack([decode(code) for code in codes], axis=1)
    if len(columns) != members:
        raise ValueError("offsets of another number of files")
    return columns


def _layout(key: Any, files: list[int], held: Sequence[Held]) -> Layout:
    numbered, shapes, places, within = key
    offsets = tuple(
        np.asarray([held[file].rows[row].offset for file in files], dtype=np.int64).reshape(len(files), len(shape))
        for row, shape in enumerate(shapes)
    )
    of_files, of_rows, at = (np.asarray(it, dtype=np.int64) for it in (files, numbered, places))
    return Layout(of_files, of_rows, shapes, at, offsets, within)


def _tensor(row: Row) -> Tensor:
    return Tensor(row.name, dtype_name(row.dtype), row.shape)


def held_by(rows: Sequence[Row], image: Image) -> Held:
    """Of a file with this image."""
    return Held(tuple(rows), image.places)
