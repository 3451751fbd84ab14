"""Rows of integers as nested loops: what thousands of ranks hold follows a rule, and the manifest keeps the rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def encode(values: Sequence[int]) -> Any:
    """What JSON can hold and `decode` gives back: `{"from": v, "loops": [[count, stride], ...]}`, outermost first.

    That where the values are a sum of counters times strides; else the values themselves.
    """
    row = np.asarray(values, dtype=np.int64)
    loops = _loops(row)
    if loops is None:
        return row.tolist()
    return {"from": int(row[0]), "loops": [list(loop) for loop in loops]}


def decode(code: Any) -> Integers:
    """The values. Raises TypeError, KeyError or ValueError for what `encode` did not make."""
    if isinstance(code, list):
        return np.asarray(code, dtype=np.int64)
    row = np.asarray([code["from"]], dtype=np.int64)
    for count, stride in code["loops"]:
        row = (row[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return row


def _loops(row: Integers) -> list[tuple[int, int]] | None:
    """(count, stride) of every loop, outermost first; None if there are none that make the row."""
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
    outer = _loops(rounds[:, 0])
    return None if outer is None else [*outer, (count, stride)]
