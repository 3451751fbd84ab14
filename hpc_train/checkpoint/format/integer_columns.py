"""Encode columns of integers as nested loops in the JSON of a manifest; decode those of a manifest from elsewhere.

The offsets and indices of thousands of ranks follow a rule, and the manifest stores the rule. A few bytes of text can
thus expand to many numbers, so decoding has a budget (`DecodeBudget`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpc_train.checkpoint.format.shard_layout import Integers

LARGEST_INTEGER = 1 << 62
"""Largest number in a manifest; with larger ones, the sum of two could overflow."""
_MAX_LOOP_DEPTH = 64
"""Maximum nesting of loops; each of two or more rounds doubles the row, so no row needs more."""
_FREE = 1 << 21
"""Numbers to which loops may expand in every manifest, however short its text is."""


def encode_integers(values: Sequence[int]) -> Any:
    """Encode a row of integers as JSON: `{"from": v, "loops": [[count, stride], ...]}`, outermost loop first.

    A row that is no nest of loops stays a plain list.
    """
    row = np.asarray(values, dtype=np.int64)
    loops = _find_loops(row)
    if loops is None:
        return row.tolist()
    return {"from": int(row[0]), "loops": [list(loop) for loop in loops]}


def decode_integers(code: Any, most: int) -> Integers:
    """Decode a row of at most `most` integers; the number is checked before memory is allocated.

    Raises TypeError, KeyError, ValueError or OverflowError for anything that `encode_integers` does not make.
    """
    number = count_encoded(code)
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
        raise TypeError("a number that is not an integer")


def count_encoded(code: Any) -> int:
    """Return the number of values of an encoded row without decoding it. Raises as decode_integers."""
    if type(code) is list:
        return len(code)
    if type(code) is not dict or code.keys() != {"from", "loops"}:
        raise TypeError("a column that is neither a list nor loops")
    first, loops = code["from"], code["loops"]
    check_integers([first])
    if type(loops) is not list or len(loops) > _MAX_LOOP_DEPTH:
        raise TypeError("invalid loops")
    total, low, high = 1, first, first
    for loop in loops:
        if type(loop) is not list or len(loop) != 2:
            raise TypeError("a loop that is not a pair")
        check_integers(loop)
        count, stride = loop
        if not 1 <= count <= LARGEST_INTEGER:
            raise ValueError(f"a loop of {count} rounds")
        total, low, high = total * count, low + min(0, (count - 1) * stride), high + max(0, (count - 1) * stride)
    if low < -LARGEST_INTEGER or high > LARGEST_INTEGER:
        raise OverflowError("a number that is too large")
    return total


def _find_loops(row: Integers) -> list[tuple[int, int]] | None:
    """Return (count, stride) of every loop, outermost first; None if the row is no nest of loops."""
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
    outer = _find_loops(rounds[:, 0])
    return None if outer is None else [*outer, (count, stride)]


class DecodeBudget:
    """Limit on the numbers in the columns of a manifest, because a few bytes of text can expand to many.

    A job of thousands of ranks needs millions of numbers in a few loops. But each number belongs to a dataset, which
    takes some hundred bytes of a shard file, so more than `_FREE` are accepted only if the shard files are that large.
    """

    def __init__(self, text: int, stored: Callable[[], int]) -> None:
        """text: bytes of the manifest. stored: returns how many bytes the shard files have on the disk."""
        self._left, self._stored = _FREE + text, stored
        self._asked = False

    def take(self, number: int) -> None:
        """Take `number` numbers off the budget. Raises ValueError if fewer are left."""
        if number > self._left and not self._asked:
            self._left, self._asked = self._left + self._stored() // 64, True
        if number > self._left:
            raise ValueError("columns of more numbers than there can be in files of that size")
        self._left -= number

    def decode_column(self, code: Any, most: int) -> Integers:
        """Decode a column of at most `most` numbers."""
        if type(code) is not list:  # a list is as long in the text
            self.take(min(count_encoded(code), most))
        return decode_integers(code, most)
