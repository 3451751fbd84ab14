"""Encode the layout of a step as columns of a manifest, and decode the columns of a manifest from elsewhere."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from hpc_train.checkpoint.format.integer_columns import (
    LARGEST_INTEGER,
    DecodeBudget,
    check_integers,
    encode_integers,
)
from hpc_train.checkpoint.format.shard_layout import (
    EnclosingDataset,
    Integers,
    RowCut,
    SharedLayout,
    StepLayout,
    TensorKind,
)

MAX_NAME_LENGTH = 65_535
"""Maximum characters of a tensor's name; HDF5 allows no more."""
MAX_DIMENSIONS = 32
"""Maximum dimensions of a tensor; HDF5 allows no more."""
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,63}")


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
    canonical: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}
    return {key: json.dumps(value, **canonical).encode() for key, value in encode_layout(step_layout).items()}


def _parse_names(names: Any) -> tuple[str, ...]:
    # A set of types, not a loop: a manifest may have 100,000 names.
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


def _parse_layout(body: dict[str, Any], tensors: int, step_files: int, budget: DecodeBudget) -> SharedLayout:
    """Decode one layout of a step that has `tensors` tensors and `step_files` files."""
    files = _parse_indices(body["files"], step_files, None, budget)
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


def _parse_indices(code: Any, bound: int, count: int | None, budget: DecodeBudget) -> Integers:
    """Decode a column of `count` indices below `bound`. None: any count, but none of them twice."""
    indices = budget.decode_column(code, bound if count is None else count)
    if count is not None and len(indices) != count:
        raise ValueError("columns that do not fit each other")
    if len(indices) and not 0 <= indices.min() <= indices.max() < bound:
        raise ValueError("a column that counts entries that do not exist")
    if count is None and len(np.unique(indices)) < len(indices):
        raise ValueError("the same file twice in a layout")
    return indices


def _encode_cut(cut: RowCut) -> Any:
    return [cut.shape, [encode_integers(column.tolist()) for column in cut.offsets.T]]


def _parse_cut(body: Any, files: int, budget: DecodeBudget) -> RowCut:
    """Decode a cut into one part for each of `files` files: a shape, and a column of offsets for each dimension."""
    shape, codes = _parse_list(body)
    columns = [budget.decode_column(code, files) for code in _parse_list(codes)]
    if len(columns) != len(_parse_list(shape)) or any(len(column) != files for column in columns):
        raise ValueError("offsets of another number of files")
    offsets = np.stack(columns, axis=1) if columns else np.empty((files, 0), dtype=np.int64)
    return RowCut(parse_sizes(shape), offsets)
