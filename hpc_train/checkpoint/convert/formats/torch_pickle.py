"""Find the tensors in the pickle of a torch.save file, and where their bytes are, without torch.load.

torch stores the records of its zip archive uncompressed, so a record is a byte range of the file. An archive with other
records (compressed, encrypted, past its end) is refused before memory is allocated for it. Layout: PKWARE's APPNOTE.TXT
6.3, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Protocol

import torch

from hpc_train.checkpoint.convert.formats.pickle_reader import (
    PickledCall,
    PickledName,
    PickledPairs,
    PickledReference,
    PickleError,
)

# Records of the zip format, in the names of APPNOTE.TXT: end of central directory, its 64-bit locator and 64-bit form,
# entry of the central directory, local header, header of an extra field.
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_EXTRA = struct.Struct("<2H")
_MAX_DIRECTORY = 64 << 20
"""Maximum bytes of the central directory; a record takes about 80 of them."""
_COMMENT = 1 << 16
"""Longest comment at the end of an archive; the end record lies before it."""
_FULL_32, _FULL_16 = 0xFFFFFFFF, 0xFFFF
"""A field of 32 or 16 bits with this says that its value is in the 64-bit form."""
ByteSpan = tuple[int, int]
"""(first byte, bytes)"""


class ByteSource(Protocol):
    """A file, or a part of one."""

    @property
    def size(self) -> int:
        """Size in bytes."""

    def read(self, begin: int, size: int) -> bytes:
        """Read exactly `size` bytes. Raises PickleError past the end."""


def find_zip_records(file: ByteSource) -> dict[str, ByteSpan]:
    """Return the place of every record, by its name without the archive's folder ("data.pkl" for "archive/data.pkl").

    Raises PickleError if the file is no such archive.
    """
    try:
        entries = _list_entries(file)
        spans = {name.partition("/")[2]: _find_span(file, at, size) for name, at, size in entries}
        if len(spans) != len(entries):
            raise PickleError("a zip archive with two records of one name")
    except (struct.error, UnicodeDecodeError) as error:
        raise PickleError(f"a damaged zip archive ({type(error).__name__})") from None
    if sum(size for _, size in spans.values()) > file.size:
        raise PickleError("a zip archive whose records are larger than the file")
    return spans


def _list_entries(file: ByteSource) -> list[tuple[str, int, int]]:
    """Return (name, byte of its local header, bytes) of every record, from the central directory."""
    at, size = _read_directory(file)
    if not 0 <= at <= at + size <= file.size or size > _MAX_DIRECTORY:
        raise PickleError(f"a zip archive with a directory of {size:,} bytes at byte {at:,} of {file.size:,}")
    data, place, entries = file.read(at, size), 0, []
    while place < len(data):
        signature, *_, flags, method, _, _, _, stored, plain, name, extra, comment, _, _, _, local = _ENTRY.unpack_from(
            data, place
        )
        place += _ENTRY.size
        text = data[place : place + name].decode()
        more = data[place + name : place + name + extra]
        place += name + extra + comment
        plain, stored, local = _read_wide(more, plain, stored, local)
        if signature != b"PK\x01\x02" or place > len(data):
            raise PickleError("a zip archive with a damaged directory")
        # Method 0 is stored; bit 0 of the flags is encryption.
        if method or flags & 1 or plain != stored:
            raise PickleError(f"a zip archive with a compressed record, of {plain:,} bytes; torch.save compresses none")
        entries.append((text, local, plain))
    return entries


def _read_directory(file: ByteSource) -> ByteSpan:
    """Return the span of the central directory."""
    tail = file.read(begin := max(0, file.size - _END.size - _COMMENT), file.size - begin)
    # From the end backwards, as the format says: the signature may also occur inside a record.
    at = tail.rfind(b"PK\x05\x06")
    if at < 0:
        raise PickleError("not a zip archive")
    _, _, _, _, _, size, place, _ = _END.unpack_from(tail, at)
    locator = begin + at - _LOCATOR.size
    if locator >= 0:
        signature, _, place_64, _ = _LOCATOR.unpack(file.read(locator, _LOCATOR.size))
        # Archives above 4 GiB have this locator just before the end record, whose 32-bit numbers are then all ones.
        if signature == b"PK\x06\x07":
            *_, size, place = _END_64.unpack(file.read(place_64, _END_64.size))
    return place, size


def _read_wide(extra: bytes, plain: int, stored: int, local: int) -> tuple[int, int, int]:
    """Return the three numbers, from the 64-bit extra field where they do not fit into 32 bits."""
    place = 0
    while place + _EXTRA.size <= len(extra):
        kind, size = _EXTRA.unpack_from(extra, place)
        place += _EXTRA.size
        if kind == 1:
            values = iter(struct.unpack_from(f"<{size // 8}Q", extra, place))
            plain, stored, local = (
                next(values, number) if number == _FULL_32 else number for number in (plain, stored, local)
            )
        place += size
    return plain, stored, local


def _find_span(file: ByteSource, at: int, size: int) -> ByteSpan:
    """Return the span of a record's content, which follows its local header."""
    signature, *_, name, extra = _LOCAL.unpack(file.read(at, _LOCAL.size))
    begin = at + _LOCAL.size + name + extra
    if signature != b"PK\x03\x04" or begin + size > file.size:
        raise PickleError("a zip archive with a record past its end")
    return begin, size


MAX_PICKLE_BYTES = 64 << 20
"""Maximum bytes of the pickle, which does not contain the tensors' data."""
_MAX_DIMENSIONS, _MAX_VALUES, _MAX_DEPTH, _LONGEST_NAME = 32, 1_000_000, 64, 4096
"""Beyond what any checkpoint has: a small file could otherwise describe tensors without end."""
_OF_A_TENSOR = 256
"""Minimum bytes of a tensor in a file of torch.save, besides its elements and its name."""
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
_UNTYPED = PickledName("torch.storage", "UntypedStorage")
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
"""Functions that rebuild tensors other than strided arrays; they may be named, but their tensors are refused."""
_PLAIN_TYPES = (("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer"))


@cache
def list_allowed_names() -> frozenset[tuple[str, str]]:
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
            *list_dtype_names(),
        }
    )


@cache
def list_dtype_names() -> frozenset[tuple[str, str]]:
    """Return the names of all dtypes, such as torch.float32."""
    return frozenset(("torch", name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


def parse_pickled_dtype(value: Any) -> torch.dtype:
    """Return the dtype that a pickle names. Raises PickleError if it is none."""
    if type(value) is not PickledName or (value.module, value.name) not in list_dtype_names():
        raise PickleError("a dtype that torch does not have")
    dtype: torch.dtype = getattr(torch, value.name)
    return dtype


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


StorageLookup = Callable[[Any, torch.dtype], ByteSpan]
"""Maps (persistent identifier of a storage, its dtype) to its place in the file."""


def open_zip_storages(file: ByteSource) -> tuple[bytes, StorageLookup]:
    """Return (pickle, lookup of storages) of a torch.save archive. Raises PickleError if it is none."""
    records = find_zip_records(file)
    if "data.pkl" not in records or records["data.pkl"][1] > MAX_PICKLE_BYTES:
        raise PickleError("a zip archive without a data.pkl of a size that we read")
    order = records.get("byteorder")
    if order is not None and file.read(order[0], min(order[1], 16)) != b"little":
        raise PickleError("a file of a big-endian machine")

    def place(identifier: Any, dtype: torch.dtype) -> ByteSpan:
        key, count = parse_storage_key(identifier)
        span = records.get(f"data/{key}")
        if span is None or count * dtype.itemsize > span[1]:
            raise PickleError(f"a storage of {count:,} elements that is not in the file")
        return span[0], count * dtype.itemsize

    return file.read(*records["data.pkl"]), place


def iterate_tensors(value: Any, storages: StorageLookup, room: int) -> Iterator[tuple[str, StridedTensor]]:
    """Yield every tensor in nested dictionaries, with its keys joined by dots; anything else is left out.

    room: limit on the bytes of all names plus _OF_A_TENSOR for each tensor: a pickle can refer to one many times.
    Raises PickleError for a tensor that is not within its storage, and for more values or levels than we read.
    """
    visited = 0

    def walk(value: Any, name: str, depth: int) -> Iterator[tuple[str, StridedTensor]]:
        nonlocal visited, room
        pairs = _list_pairs(value)
        visited += len(pairs.pairs) if pairs is not None else 1  # entries that are left out take time too
        if visited > _MAX_VALUES or depth > _MAX_DEPTH or len(name) > _LONGEST_NAME:
            raise PickleError("dictionaries nested more deeply, or with more entries, than we read")
        if pairs is not None:
            for key, inner in pairs.pairs:
                if type(key) in (str, int, float, bool, type(None)):
                    yield from walk(inner, f"{name}.{key}" if name else str(key), depth + 1)
        elif type(value) is PickledCall and _is_tensor(value):
            room -= len(name) + _OF_A_TENSOR
            if room < 0:
                raise PickleError("more names of tensors than a file of its size has")
            yield name or "tensor", parse_strided_tensor(value, storages)

    yield from walk(value, "", 0)


def _list_pairs(value: Any) -> PickledPairs | None:
    if type(value) is PickledCall and value.function == PickledName("collections", "OrderedDict"):
        return value.items or PickledPairs()
    return value if type(value) is PickledPairs else None


def _is_tensor(value: PickledCall) -> bool:
    return value.function.module in ("torch._utils", "torch._tensor")


def parse_strided_tensor(value: Any, storages: StorageLookup) -> StridedTensor:
    """Return the tensor that a call would make. Raises PickleError if it is none, or not within its storage."""
    try:
        return _parse_rebuild_call(value, storages, 0)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise PickleError(f"a tensor that torch did not write ({type(error).__name__})") from None


def _parse_rebuild_call(value: Any, storages: StorageLookup, depth: int) -> StridedTensor:
    if type(value) is not PickledCall or depth > 4:
        raise PickleError("no tensor where one should be")
    name, args = value.function.name, value.args
    if name in _PARAMETERS:
        return _parse_rebuild_call(args[0], storages, depth + 1)
    if name == "_rebuild_from_type_v2":
        # How torch pickles a subclass; only the classes that add nothing to a tensor are accepted.
        function, kind, inner, _ = args
        if type(kind) is not PickledName or (kind.module, kind.name) not in _PLAIN_TYPES or type(inner) is not tuple:
            raise PickleError(f"a tensor of class {kind}, which is not imported; save plain tensors")
        return _parse_rebuild_call(PickledCall(function, inner), storages, depth + 1)
    if name not in _TYPED:
        raise PickleError(f"a tensor made by {value.function}, which is not imported; save dense ones")
    return _parse_strided(name, args, storages)


def _parse_strided(name: str, args: tuple[Any, ...], storages: StorageLookup) -> StridedTensor:
    stored, offset, size, stride = args[0], args[1], parse_shape(args[2]), parse_shape(args[3])
    math_bits = args[7:8] if name == "_rebuild_tensor_v3" else args[6:7]
    if any(type(bits) is PickledPairs and bits.pairs for bits in math_bits):
        raise PickleError("a conjugated or negated view; save it with resolve_conj() and resolve_neg()")
    storage_dtype = parse_storage_dtype(stored)
    dtype = parse_pickled_dtype(args[6]) if name == "_rebuild_tensor_v3" else storage_dtype
    begin, length = storages(stored.identifier, storage_dtype)
    if type(offset) is not int or offset < 0 or len(size) != len(stride):
        raise PickleError("a tensor of an impossible shape")
    # One past the last element, counted in elements from the first: strides may skip, but not leave the storage.
    last = sum((count - 1) * step for count, step in zip(size, stride, strict=True)) + 1 if prod(size) else 0
    if (offset + last) * dtype.itemsize > length:
        raise PickleError(f"a tensor of shape {size}, which is larger than its storage of {length:,} bytes")
    return StridedTensor(dtype, size, stride, begin + offset * dtype.itemsize, last * dtype.itemsize)


def parse_storage_dtype(stored: Any) -> torch.dtype:
    """Return the dtype of a storage, a PickledReference of ("storage", class, key, device, elements).

    Raises PickleError for anything else.
    """
    if (
        type(stored) is not PickledReference
        or type(stored.identifier) is not tuple
        or stored.identifier[:1] != ("storage",)
    ):
        raise PickleError("a tensor without a storage")
    kind = stored.identifier[1]
    if kind == _UNTYPED:
        return torch.uint8
    if type(kind) is not PickledName or kind.name not in _STORAGES:
        raise PickleError("a storage of a class that torch.save does not write")
    return _STORAGES[kind.name]


def parse_storage_key(identifier: Any) -> tuple[str, int]:
    """Return (key, elements) of the identifier of a storage."""
    if len(identifier) < 5:
        raise PickleError("a storage without a name or a size")
    key, count = identifier[2], identifier[4]
    if type(key) is not str or type(count) is not int or count < 0 or any(rest is not None for rest in identifier[5:]):
        raise PickleError("a storage without a name or a size")
    return key, count


def parse_shape(value: Any) -> tuple[int, ...]:
    """Return a shape or strides as a tuple. Raises PickleError if it is neither."""
    if type(value) is PickledCall and value.function == PickledName("torch", "Size"):
        (value,) = value.args
    if type(value) not in (tuple, list) or len(value) > _MAX_DIMENSIONS:
        raise PickleError("an invalid shape")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise PickleError("a shape or a stride that is negative or too large")
    return tuple(value)
