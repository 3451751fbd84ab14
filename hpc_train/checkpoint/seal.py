"""Digest of what a file holds, stored beside the file; a manifest that says anything else does not belong to it.

The manifest tells where each tensor lies, but anybody can make its checksum again. The rank that writes the file makes
the seal, from the same names, rectangles and places; comparing it costs a reader next to nothing. The seal is no
signature either: files without one are compared with their HDF5 structure (see consistency).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from hpc_train.checkpoint.dtypes import dtype_name
from hpc_train.checkpoint.image import Row

Form = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(dtype, shape of the tensor, offset and shape of the rectangle)"""


def seal_of_rows(rows: Sequence[Row], places: Sequence[int]) -> bytes:
    """Return the 16-byte seal of a file as its writer knows it, from all its datasets in order."""
    codes: dict[Form, int] = {}
    forms = [(dtype_name(it.dtype), it.shape, it.offset, it.local_shape) for it in rows]
    column = [codes[it] if it in codes else codes.setdefault(it, code_of(it)) for it in forms]
    return seal([it.name for it in rows], np.array(column, dtype=np.uint64), np.array(places, dtype=np.int64))


def seal_of_table(of_rows: bytes, parts: NDArray[Any] | None) -> bytes:
    """Return the seal that the table stores; for a compressed file it covers its parts too."""
    return of_rows if parts is None else xxhash.xxh3_128_digest(of_rows + parts.tobytes())


def code_of(form: Form) -> int:
    """Return a 64-bit hash of a form."""
    return xxhash.xxh3_64_intdigest(json.dumps(form).encode())


def seal(names: Sequence[str], codes: NDArray[np.uint64], places: NDArray[np.int64]) -> bytes:
    """Return the 16-byte seal. names, codes, places: of every row; see code_of."""
    text = "\0".join(names)
    if text.count("\0") != max(0, len(names) - 1):  # a name contains NUL
        text = json.dumps(list(names))
    state = xxhash.xxh3_128(codes.astype("<u8").tobytes())
    state.update(places.astype("<i8").tobytes())
    state.update(text.encode())
    return state.digest()
