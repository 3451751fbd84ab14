"""What every file of a step holds: layouts that many files share, and for each file where its rectangles lie.

Ten thousand ranks with a thousand tensors each are ten million rectangles, but a few layouts: the shapes of a rank's
shards and their bytes in its file are those of its neighbours, and where a shard begins in its tensor follows a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_train.checkpoint.dtypes import dtype_name, dtype_of
from hpc_train.checkpoint.image import Image, Row
from hpc_train.checkpoint.pattern import decode, encode
from hpc_train.checkpoint.rectangle import Rectangle

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Tensor:
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


@dataclass(frozen=True)
class Held:
    """What one file holds."""

    rows: tuple[Row, ...]
    places: tuple[int, ...]
    """Byte of the file at which each row's data begins."""


@dataclass(frozen=True)
class Part:
    """One saved rectangle of a logical tensor."""

    file: int
    """Index among the step's files."""
    place: int
    """Byte of the file at which it begins."""
    rectangle: Rectangle


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


@dataclass(frozen=True)
class Holdings:
    """All tensors of a step, and which file has which part of them."""

    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]

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
        members.setdefault((numbered, tuple(row.local_shape for row in file.rows), file.places), []).append(index)
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
            }
            for it in holdings.layouts
        ],
    }


def from_json(body: dict[str, Any]) -> Holdings:
    """Raises KeyError, TypeError or ValueError for what `to_json` did not make."""
    tensors = tuple(Tensor(str(name), str(dtype), tuple(shape)) for name, dtype, shape in body["tensors"])
    return Holdings(tensors, tuple(_layout_from(it, len(tensors)) for it in body["layouts"]))


def _layout_from(body: dict[str, Any], tensors: int) -> Layout:
    files = decode(body["files"])
    shapes = tuple(tuple(shape) for shape in body["shapes"])
    offsets = tuple(_columns(it, len(files)) for it in body["offsets"])
    layout = Layout(files, decode(body["tensors"]), shapes, decode(body["places"]), offsets)
    rows = len(layout.tensors)
    if not len(shapes) == len(layout.places) == len(offsets) == rows or (rows and layout.tensors.max() >= tensors):
        raise ValueError("a layout whose columns differ in length")
    return layout


def _columns(codes: list[Any], members: int) -> Integers:
    if not codes:
        return np.empty((members, 0), dtype=np.int64)
    columns = np.stack([decode(code) for code in codes], axis=1)
    if len(columns) != members:
        raise ValueError("offsets of another number of files")
    return columns


def _layout(key: Any, files: list[int], held: Sequence[Held]) -> Layout:
    numbered, shapes, places = key
    offsets = tuple(
        np.asarray([held[file].rows[row].offset for file in files], dtype=np.int64).reshape(len(files), len(shape))
        for row, shape in enumerate(shapes)
    )
    of_files, of_rows, at = (np.asarray(it, dtype=np.int64) for it in (files, numbered, places))
    return Layout(of_files, of_rows, shapes, at, offsets)


def _tensor(row: Row) -> Tensor:
    return Tensor(row.name, dtype_name(row.dtype), row.shape)


def held_by(rows: Sequence[Row], image: Image) -> Held:
    """Of a file with this image."""
    return Held(tuple(rows), image.places)
