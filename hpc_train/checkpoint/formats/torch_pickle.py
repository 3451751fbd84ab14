"""Find the tensors in the pickle of a torch.save file, and where their bytes are, without torch.load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from hpc_train.checkpoint.formats.pickle_values import Call, Name, Pairs, Persistent, PickleError
from hpc_train.checkpoint.formats.zip_records import Bytes, Span, find_records

MOST_PICKLE = 64 << 20
"""Maximum bytes of the pickle, which does not contain the tensors' data."""
_MOST_DIMENSIONS = 32
_MOST_VALUES = 1_000_000
_MOST_DEPTH = 64
_LONGEST_NAME = 4096
_OF_A_TENSOR = 256
"""Bytes that a tensor takes in a file of torch.save at least, beside its elements and its name."""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_UNTYPED = Name("torch.storage", "UntypedStorage")
_TYPED = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_PARAMETERS = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_OTHERS = (
    "_rebuild_sparse_tensor",
    "_rebuild_sparse_csr_tensor",
    "_rebuild_qtensor",
    "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage",
    "_rebuild_wrapper_subclass",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_device_tensor_from_cpu_tensor",
)
"""Functions that rebuild tensors which are not a strided array of numbers in the file."""
_PLAIN_TYPES = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"))


@cache
def allowed_names() -> frozenset[tuple[str, str]]:
    """Return the names that a file of tensors may use: those that torch.load allows with weights_only, and no more."""
    functions = ("_rebuild_from_type_v2",)
    builtin = ("set", "frozenset", "bytearray", "complex")
    return frozenset(
        {
            ("collections", "OrderedDict"),
            ("collections", "Counter"),
            ("_codecs", "encode"),
            ("torch", "Size"),
            ("torch", "device"),
            ("torch.serialization", "_get_layout"),
            ("torch.storage", "UntypedStorage"),
            *(("torch", name) for name in _STORAGES),
            *(("torch._utils", name) for name in (*_TYPED, *_PARAMETERS, *_OTHERS)),
            *(("torch._tensor", name) for name in functions),
            *((module, name) for module in ("builtins", "__builtin__") for name in builtin),
            *_PLAIN_TYPES,
            *dtype_names(),
        }
    )


@cache
def dtype_names() -> frozenset[tuple[str, str]]:
    """Return the names of all dtypes, such as torch.float32."""
    return frozenset(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


def dtype_named(value: Any) -> torch.dtype:
    """Return the dtype that a pickle names. Raises PickleError if it is none."""
    if type(value) is not Name or (value.module, value.name) not in dtype_names():
        raise PickleError("a dtype that torch does not have")
    found: torch.dtype = getattr(torch, value.name)
    return found


@dataclass(frozen=True)
class StridedTensor:
    """A tensor in a file: all of it is within its storage, and the storage within the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    """Byte of the file where its first element begins."""
    extent: int
    """Bytes from there to the end of its last element."""

    @property
    def bytes(self) -> int:
        """Bytes that it takes in memory."""
        return prod(self.shape) * self.dtype.itemsize


Storages = Callable[[Any, torch.dtype], Span]
"""Maps (persistent identifier of a storage, its dtype) to its place in the file."""


def zip_storages(file: Bytes) -> tuple[bytes, Storages]:
    """Return (pickle, lookup of storages) of a torch.save archive. Raises PickleError if it is none."""
    records = find_records(file)
    if "data.pkl" not in records or records["data.pkl"][1] > MOST_PICKLE:
        raise PickleError("a zip archive without a data.pkl of a size that we read")
    order = records.get("byteorder")
    if order is not None and file.read(order[0], min(order[1], 16)) != b"little":
        raise PickleError("a file of a big-endian machine")

    def place(identifier: Any, dtype: torch.dtype) -> Span:
        key, count = storage_key(identifier)
        span = records.get(f"data/{key}")
        if span is None or count * dtype.itemsize > span[1]:
            raise PickleError(f"a storage of {count:,} elements that is not in the file")
        return span[0], count * dtype.itemsize

    return file.read(*records["data.pkl"]), place


def find_tensors(value: Any, storages: Storages, room: int) -> Iterator[tuple[str, StridedTensor]]:
    """Yield every tensor in nested dictionaries, with its keys joined by dots; anything else is left out.

    room: limit on the bytes of all names and of a few words about each tensor; a pickle can name one again and again.
    Raises PickleError for a tensor that is not within its storage, and for more values or levels than we read.
    """
    visited = 0

    def walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, StridedTensor]]:
        nonlocal visited, room
        pairs = _pairs(value)
        visited += len(pairs.pairs) if pairs is not None else 1  # entries that are left out take time too
        if visited > _MOST_VALUES or depth > _MOST_DEPTH or len(name) > _LONGEST_NAME:
            raise PickleError("dictionaries nested more deeply, or with more entries, than we read")
        if pairs is not None:
            for key, inner in pairs.pairs:
                if type(key) in (str, int, float, bool, type(None)):
                    yield from walk(inner, f"{name}.{key}" if name else str(key), depth + 1)
        elif type(value) is Call and _is_tensor(value):
            room -= len(name) + _OF_A_TENSOR
            if room < 0:
                raise PickleError("more names of tensors than a file of its size has")
            yield name or "tensor", read_tensor(value, storages)

    yield from walk(value, "", 0)


def _pairs(value: Any) -> Pairs | None:
    if type(value) is Call and value.function == Name("collections", "OrderedDict"):
        return value.items or Pairs()
    return value if type(value) is Pairs else None


def _is_tensor(value: Call) -> bool:
    return value.function.module in ("torch._utils", "torch._tensor")


def read_tensor(value: Any, storages: Storages) -> StridedTensor:
    """Return the tensor that a call would make. Raises PickleError if it is none, or not within its storage."""
    try:
        return _rebuilt(value, storages, 0)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise PickleError(f"a tensor that torch did not write ({type(error).__name__})") from None


def _rebuilt(value: Any, storages: Storages, depth: int) -> StridedTensor:
    if type(value) is not Call or depth > 4:
        raise PickleError("no tensor where one should be")
    name, args = value.function.name, value.args
    if name in _PARAMETERS:
        return _rebuilt(args[0], storages, depth + 1)
    if name == "_rebuild_from_type_v2":
        function, kind, inner, _ = args
        if type(kind) is not Name or (kind.module, kind.name) not in _PLAIN_TYPES or type(inner) is not tuple:
            raise PickleError(f"a tensor of class {kind}, which is not imported; save plain tensors")
        return _rebuilt(Call(function, inner), storages, depth + 1)
    if name not in _TYPED:
        raise PickleError(f"a tensor made by {value.function}, which is not imported; save dense ones")
    return _strided(name, args, storages)


def _strided(name: str, args: tuple[Any, ...], storages: Storages) -> StridedTensor:
    stored, offset, size, stride = args[0], args[1], _integers(args[2]), _integers(args[3])
    math_bits = args[7:8] if name == "_rebuild_tensor_v3" else args[6:7]
    if any(type(it) is Pairs and it.pairs for it in math_bits):
        raise PickleError("a conjugated or negated view; save it with resolve_conj() and resolve_neg()")
    own = storage_dtype(stored)
    dtype = dtype_named(args[6]) if name == "_rebuild_tensor_v3" else own
    begin, length = storages(stored.identifier, own)
    if type(offset) is not int or offset < 0 or len(size) != len(stride):
        raise PickleError("a tensor of an impossible shape")
    last = sum((count - 1) * step for count, step in zip(size, stride, strict=True)) + 1 if prod(size) else 0
    if (offset + last) * dtype.itemsize > length:
        raise PickleError(f"a tensor of shape {size}, which is larger than its storage of {length:,} bytes")
    return StridedTensor(dtype, size, stride, begin + offset * dtype.itemsize, last * dtype.itemsize)


def storage_dtype(stored: Any) -> torch.dtype:
    """Return the dtype of a Persistent ("storage", class, key, device, elements). Raises PickleError if it is none."""
    if type(stored) is not Persistent or type(stored.identifier) is not tuple or stored.identifier[:1] != ("storage",):
        raise PickleError("a tensor without a storage")
    kind = stored.identifier[1]
    if kind == _UNTYPED:
        return torch.uint8
    if type(kind) is not Name or kind.name not in _STORAGES:
        raise PickleError("a storage of a class that torch.save does not write")
    return _STORAGES[kind.name]


def storage_key(identifier: Any) -> tuple[str, int]:
    """Return (key, elements) of the identifier of a storage."""
    if len(identifier) < 5:
        raise PickleError("a storage without a name or a size")
    key, count = identifier[2], identifier[4]
    if type(key) is not str or type(count) is not int or count < 0 or any(it is not None for it in identifier[5:]):
        raise PickleError("a storage without a name or a size")
    return key, count


def _integers(value: Any) -> tuple[int, ...]:
    """Return a shape or strides as a tuple. Raises PickleError if it is neither."""
    if type(value) is Call and value.function == Name("torch", "Size"):
        (value,) = value.args
    if type(value) not in (tuple, list) or len(value) > _MOST_DIMENSIONS:
        raise PickleError("a shape that is none")
    if not all(type(it) is int and 0 <= it < 1 << 62 for it in value):
        raise PickleError("a shape or a stride that is negative or too large")
    return tuple(value)


read_shape = _integers
