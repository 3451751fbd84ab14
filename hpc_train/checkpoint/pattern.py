"""Rows of integers as nested loops: what thousands of ranks hold follows a rule, and the manifest keeps the rule."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
LARGEST = 1 << 62
"""Largest number in a manifest; with larger ones, the sum of two could overflow."""
_DEPTH = 64
"""Maximum nesting of loops: each that really loops at least doubles the row."""


def encode(values: Sequence[int]) -> Any:
    """What JSON can hold and `decode` gives back: `{"from": v, "loops": [[count, stride], ...]}`, outermost first.

    That where the values are a sum of counters times strides; else the values themselves.
    """
    row = np.asarray(values, dtype=np.int64)
    loops = _loops(row)
    if loops is None:
        return row.tolist()
    return {"from": int(row[0]), "loops": [list(loop) for loop in loops]}


def decode(code: Any, most: int) -> Integers:
    """Return the values. That there are at most `most` is checked before memory is allocated for them.

    Raises TypeError, KeyError, ValueError or OverflowError for what `encode` did not make.
    """
    number = length(code)
    if number > most:
        raise ValueError(f"{number} numbers where there can be {most}")
    if type(code) is list:
        check_integers(code)
        return np.frombuffer(array("q", code), dtype=np.int64)  # several times as fast as asarray
    row = np.asarray([code["from"]], dtype=np.int64)
    for count, stride in code["loops"]:
        row = (row[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
    return row


def check_integers(values: Sequence[Any]) -> None:
    """Raise TypeError unless all values are integers; true and 1.0 are not."""
    if not set(map(type, values)) <= {int}:
        raise TypeError("a number that is no integer")


def length(code: Any) -> int:
    """Return how many values `decode` would return, without decoding them. Raises as `decode`."""
    if type(code) is list:
        return len(code)
    if type(code) is not dict or code.keys() != {"from", "loops"}:
        raise TypeError("a column that is neither a list nor loops")
    first, loops = code["from"], code["loops"]
    check_integers([first])
    if type(loops) is not list or len(loops) > _DEPTH:
        raise TypeError("loops that are none")
    total, low, high = 1, first, first
    for loop in loops:
        if type(loop) is not list or len(loop) != 2:
            raise TypeError("a loop that is no pair")
        check_integers(loop)
        count, stride = loop
        if not 1 <= count <= LARGEST:
            raise ValueError(f"a loop of {count} rounds")
        total, low, high = total * count, low + min(0, (count - 1) * stride), high + max(0, (count - 1) * stride)
    if low < -LARGEST or high > LARGEST:
        raise OverflowError("a number that is too large")
    return total


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
