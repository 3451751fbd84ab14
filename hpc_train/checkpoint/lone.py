"""Tensors of which one file has one rectangle and no other has any, as mostly all are, without a look at each.

A piece that is just what was saved, and most are, then costs a few look-ups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc_train.api import Piece
from hpc_train.checkpoint.dtypes import dtype_of
from hpc_train.checkpoint.holdings import Cut, Holdings, Integers, Kind, Layout

if TYPE_CHECKING:
    import torch

_NAME: Any = attrgetter("name")
_FORM: Any = attrgetter("shape", "dtype", "offset", "local.shape")
"""A Form is such a tuple."""
_NONE, _UNKNOWN = -1, -2


class Form(NamedTuple):
    """What decides whether a piece is what was saved."""

    of: tuple[int, ...]
    """Shape of the logical tensor."""
    dtype: torch.dtype
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the rectangle."""


@dataclass(frozen=True)
class Lone:
    """Such tensors, those without elements left out."""

    rows: dict[str, int]
    """Of each by name, in the columns."""
    forms: dict[Form, int]
    form: Integers
    files: Integers
    places: Integers

    @cached_property
    def sizes(self) -> Integers:
        """[forms]: bytes of the rectangle."""
        return np.array([prod(it.shape) * it.dtype.itemsize for it in self.forms], dtype=np.int64)

    def equal(self, pieces: Sequence[Piece]) -> Integers:
        """[pieces]: the row of each that is just what was saved; -1 for others."""
        rows = np.array([self.rows.get(it, _NONE) for it in map(_NAME, pieces)], dtype=np.int64)
        form = np.array([self.forms.get(it, _UNKNOWN) for it in map(_FORM, pieces)], dtype=np.int64)
        some = np.flatnonzero(rows != _NONE)
        rows[some[self.form[rows[some]] != form[some]]] = _NONE
        return rows


def lone(holdings: Holdings) -> Lone:
    """Return the lone tensors of a step in which no two tensors have the same name (see bounds.check_holdings)."""
    names, none = holdings.names, np.zeros(0, dtype=np.int64)
    forms: dict[Form, int] = {}
    times, found = np.zeros(len(names), dtype=np.int64), [(none, none, none, none)]
    for it in holdings.layouts:
        np.add.at(times, it.tensors, len(it.files))
        if len(it.files) == 1:
            found.append((it.tensors, _forms(holdings, it, forms), np.repeat(it.files, len(it.tensors)), it.places))
    tensors, form, files, places = (np.concatenate(column) for column in zip(*found, strict=True))
    alone = np.flatnonzero((times[tensors] == 1) & (form != _NONE))
    of_rows = map(names.__getitem__, tensors[alone].tolist())
    rows = {name: row for row, name in enumerate(of_rows)}
    return Lone(rows, forms, form[alone], files[alone], places[alone])


def _forms(holdings: Holdings, layout: Layout, forms: dict[Form, int]) -> Integers:
    """[rows]: the number of each; -1 for one without elements, or of a dtype that this torch does not have."""
    both = holdings.kind[layout.tensors] * len(layout.cuts) + layout.cut
    different, which = np.unique(both, return_inverse=True)
    numbers = []
    for kind, cut in (divmod(it, len(layout.cuts)) for it in different.tolist()):
        numbers.append(_number(holdings.kinds[kind], layout.cuts[cut], forms))
    return np.array(numbers, dtype=np.int64)[which]


def _number(kind: Kind, cut: Cut, forms: dict[Form, int]) -> int:
    if 0 in cut.shape:
        return _NONE
    try:
        dtype = dtype_of(kind.dtype)
    except ValueError:
        return _NONE
    return forms.setdefault(Form(kind.shape, dtype, tuple(cut.offsets[0].tolist()), cut.shape), len(forms))
