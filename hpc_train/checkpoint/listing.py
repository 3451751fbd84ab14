"""The part of a manifest that says what every file holds: columns, in which most tensors are a name and a place."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from hpc_train.checkpoint.holdings import Cut, Holdings, Integers, Kind, Layout, Within
from hpc_train.checkpoint.pattern import LARGEST, check_integers, decode, encode, length

NAME = 65_535
"""Maximum characters of a tensor's name; HDF5 allows no more."""
DIMENSIONS = 32
"""Maximum dimensions of a tensor; HDF5 allows no more."""
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FREE = 1 << 21
"""Numbers that loops may expand to in any manifest, however few bytes it has."""


class Budget:
    """Limit on the numbers in the columns of a manifest, because a few bytes of text can ask for many.

    Loops say in a few bytes what takes millions of numbers, as they should for a job of thousands of ranks. But each
    number is of a dataset that takes some hundred bytes in a shard file, so more than `_FREE` are accepted only if the
    shard files are that large.
    """

    def __init__(self, text: int, stored: Callable[[], int]) -> None:
        """text: bytes of the manifest. stored: returns how many bytes the shard files have on the disk."""
        self._left, self._stored = _FREE + text, stored
        self._asked = False

    def take(self, number: int) -> None:
        """Take `number` numbers off the budget. Raises ValueError if that is more than there can be."""
        if number > self._left and not self._asked:
            self._left, self._asked = self._left + self._stored() // 64, True
        if number > self._left:
            raise ValueError("columns of more numbers than there can be in files of that size")
        self._left -= number

    def column(self, code: Any, most: int) -> Integers:
        """Decode a column of at most `most` numbers."""
        if type(code) is not list:  # a list is as long in the text
            self.take(min(length(code), most))
        return decode(code, most)


def to_json(holdings: Holdings) -> dict[str, Any]:
    """Lists and numbers only."""
    return {
        "tensors": holdings.names,
        "kinds": {"of": encode(holdings.kind.tolist()), "are": holdings.kinds},
        "layouts": [
            {
                "files": encode(it.files.tolist()),
                "tensors": encode(it.tensors.tolist()),
                "places": encode(it.places.tolist()),
                "cuts": {"of": encode(it.cut.tolist()), "are": [_cut_to_json(cut) for cut in it.cuts]},
                **({"within": it.within} if it.within is not None else {}),
            }
            for it in holdings.layouts
        ],
    }


def from_json(body: dict[str, Any], files: int, budget: Budget) -> Holdings:
    """Read holdings of `files` files; KeyError, TypeError, ValueError or OverflowError if not made by `to_json`."""
    names = _names(body["tensors"])
    kinds = tuple(_kind(it) for it in _list(body["kinds"]["are"]))
    kind = _indices(body["kinds"]["of"], len(kinds), len(names), budget)
    layouts = tuple(_layout(it, len(names), files, budget) for it in _list(body["layouts"]))
    return Holdings(names, kinds, kind, layouts)


def texts(holdings: Holdings) -> dict[str, bytes]:
    """What `to_json` gives, each value as the text of a manifest."""
    how: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}
    return {key: json.dumps(value, **how).encode() for key, value in to_json(holdings).items()}


def _names(names: Any) -> tuple[str, ...]:
    if not set(map(type, _list(names))) <= {str}:
        raise TypeError("a name that is no text")
    "".join(names).encode()  # raises ValueError for invalid text, such as half of a surrogate pair
    if max(map(len, names), default=0) > NAME:
        raise ValueError(f"a name of more than {NAME} characters")
    return tuple(names)


def _kind(body: Any) -> Kind:
    dtype, shape = _list(body)
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
        raise ValueError("a dtype that has no name")
    return Kind(dtype, sizes(shape))


def sizes(values: Any) -> tuple[int, ...]:
    """Return a shape or an offset; raises if a number is negative, or so large that a volume would overflow."""
    check_integers(_list(values))
    if len(values) > DIMENSIONS or any(not 0 <= it <= LARGEST for it in values):
        raise ValueError("a shape that no tensor has")
    return tuple(values)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError(f"{type(value).__name__} in place of a list")
    return value


def _layout(body: dict[str, Any], tensors: int, number: int, budget: Budget) -> Layout:
    files = _indices(body["files"], number, None, budget)
    places = budget.column(body["places"], LARGEST)
    cuts = tuple(_cut(it, len(files), budget) for it in _list(body["cuts"]["are"]))
    of_tensor = _indices(body["tensors"], tensors, len(places), budget)
    of_cut = _indices(body["cuts"]["of"], len(cuts), len(places), budget)
    within = tuple(map(_within, _list(body["within"]))) if "within" in body else None
    if within is not None and len(within) != len(places):
        raise ValueError("a layout whose columns differ in length")
    return Layout(files, of_tensor, places, cuts, of_cut, within)


def _within(body: Any) -> Within:
    number, shape, start = _list(body)
    return Within(sizes([number])[0], sizes(shape), sizes(start))


def _indices(code: Any, among: int, number: int | None, budget: Budget) -> Integers:
    """Decode indices of `among` things. number: how many; None: as many as there are, each once."""
    found = budget.column(code, among if number is None else number)
    if number is not None and len(found) != number:
        raise ValueError("columns that do not fit each other")
    if len(found) and not 0 <= found.min() <= found.max() < among:
        raise ValueError("a column that counts what is not there")
    if number is None and len(np.unique(found)) < len(found):
        raise ValueError("the same file twice in a layout")
    return found


def _cut_to_json(cut: Cut) -> Any:
    return [cut.shape, [encode(column.tolist()) for column in cut.offsets.T]]


def _cut(body: Any, members: int, budget: Budget) -> Cut:
    shape, codes = _list(body)
    columns = [budget.column(code, members) for code in _list(codes)]
    if len(columns) != len(_list(shape)) or any(len(column) != members for column in columns):
        raise ValueError("offsets of another number of files")
    offsets = np.stack(columns, axis=1) if columns else np.empty((members, 0), dtype=np.int64)
    return Cut(sizes(shape), offsets)
