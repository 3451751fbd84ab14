"""The part of a manifest that says what every file holds: columns, in which most tensors are a name and a place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hpc_train.checkpoint.holdings import Cut, Holdings, Integers, Kind, Layout, Within
from hpc_train.checkpoint.pattern import decode, encode


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


def from_json(body: dict[str, Any]) -> Holdings:
    """Raises KeyError, TypeError or ValueError for what `to_json` did not make."""
    names = tuple(body["tensors"])
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a name that is no text")
    kinds = tuple(Kind(str(dtype), tuple(shape)) for dtype, shape in body["kinds"]["are"])
    kind = _indices(body["kinds"]["of"], len(kinds), len(names))
    return Holdings(names, kinds, kind, tuple(_layout(it, len(names)) for it in body["layouts"]))


def texts(holdings: Holdings) -> dict[str, bytes]:
    """What `to_json` gives, each value as the text of a manifest."""
    how: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}
    return {key: json.dumps(value, **how).encode() for key, value in to_json(holdings).items()}


def _layout(body: dict[str, Any], tensors: int) -> Layout:
    files, places = decode(body["files"]), decode(body["places"])
    cuts = tuple(_cut(it, len(files)) for it in body["cuts"]["are"])
    of_tensor = _indices(body["tensors"], tensors, len(places))
    within = tuple(Within(int(n), tuple(of), tuple(at)) for n, of, at in body["within"]) if "within" in body else None
    if within is not None and len(within) != len(places):
        raise ValueError("a layout whose columns differ in length")
    return Layout(files, of_tensor, places, cuts, _indices(body["cuts"]["of"], len(cuts), len(places)), within)


def _indices(code: Any, among: int, number: int) -> Integers:
    """So many."""
    found = decode(code)
    if len(found) != number or (number and not 0 <= found.min() <= found.max() < among):
        raise ValueError("columns that do not fit each other")
    return found


def _cut_to_json(cut: Cut) -> Any:
    return [cut.shape, [encode(column.tolist()) for column in cut.offsets.T]]


def _cut(body: Any, members: int) -> Cut:
    shape, codes = body
    columns = [decode(code) for code in codes]
    if len(columns) != len(shape) or any(len(column) != members for column in columns):
        raise ValueError("offsets of another number of files")
    return Cut(tuple(shape), np.stack(columns, axis=1) if columns else np.empty((members, 0), dtype=np.int64))
