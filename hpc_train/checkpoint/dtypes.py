"""How a torch dtype is stored in HDF5. Element size and bits are those in memory: nothing is converted."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from h5py import h5t

from hpc_train.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    import torch  # not at run time: listing checkpoints must not need torch

_NUMPY = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "?",
    "complex64": "<c8",
    "complex128": "<c16",
    # HDF5 would take the largest values of these for infinities, so they are plain bytes; torch_dtype names them
    "float8_e4m3fn": "u1",
    "float8_e4m3fnuz": "u1",
    "float8_e5m2fnuz": "u1",
}
_OTHER_SIZES = {"bfloat16": 2, "float8_e5m2": 1}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """As in the manifest: `float32`, `bfloat16`, ..."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name. Raises ValueError if there is none."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"no dtype is called {name!r}")
    return dtype


@cache
def itemsize_of(name: str) -> int:
    """Return bytes per element of the dtype of that name. Raises ValueError if there is none."""
    if name in _NUMPY:
        return np.dtype(_NUMPY[name]).itemsize
    return _OTHER_SIZES.get(name) or dtype_of(name).itemsize


def hdf5_type(dtype: torch.dtype) -> Any:
    """The HDF5 type that any reader understands, of the same size in bytes.

    Raises CheckpointError for a dtype that has none (quantised and sub-byte ones).
    """
    name = dtype_name(dtype)
    if name == "bfloat16":
        return _float_type(h5t.IEEE_F32LE, sign=15, exponent=(7, 8), mantissa=(0, 7), size=2, bias=127)
    if name == "float8_e5m2":
        return _float_type(h5t.IEEE_F16LE, sign=7, exponent=(2, 5), mantissa=(0, 2), size=1, bias=15)
    if name not in _NUMPY:
        raise CheckpointError(f"tensors of {dtype} cannot be stored in HDF5")
    return h5t.py_create(np.dtype(_NUMPY[name]), logical=True)


def _float_type(
    base: Any, *, sign: int, exponent: tuple[int, int], mantissa: tuple[int, int], size: int, bias: int
) -> Any:
    """A floating-point type by its bit fields (first bit, number of bits). HDF5 checks each call: the order matters."""
    made = base.copy()
    made.set_fields(sign, *exponent, *mantissa)
    made.set_precision(8 * size)
    made.set_size(size)
    made.set_ebias(bias)
    return made
