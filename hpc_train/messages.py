"""Exchange plain Python values between ranks, encoded as bytes that hold no code.

torch's own collectives of objects unpickle what comes from the network, which runs whatever code a peer sends. A Codec
encodes numbers, text, lists, registered dataclasses and NumPy arrays only; the collectives below use it on CPU tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_HEAD = struct.Struct("<Q")
"""A message is this (the length of its JSON), the JSON, and the raw bytes of its arrays, which the JSON points into."""
_PLAIN = {str, int, float, bool, type(None)}
"""Types that JSON has itself."""
_DTYPES = frozenset(np.dtype(name).str for name in ("?", *"bhilqBHILQfd", "<f2"))
"""Types of arrays that are accepted: numbers only, as an array of objects would be unpickled."""
_MIN_REPEATS = 4
"""Minimum values for each distinct one, for the distinct ones to be sent with an index."""
_MAX_UNCOLUMNED = 4
"""Maximum objects of a class that are not worth sending as columns."""


AsText = dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]]


class MessageError(ValueError):
    """Received bytes that no rank of this job has sent."""


class Codec:
    """Encodes values of Python's plain types, numpy arrays, paths, and the listed dataclasses and named tuples.

    Tuples stay tuples and lists stay lists; the values of a frozenset must be sortable.
    as_text: classes that are sent as text, with functions to text and back.
    """

    def __init__(
        self,
        classes: Iterable[type] = (),
        as_text: AsText | None = None,
    ) -> None:
        self._classes = {kind.__name__: kind for kind in classes}
        self._fields = {kind: _field_names(kind) for kind in self._classes.values()}
        paths: AsText = {PosixPath: (str, Path)}
        self._as_text = {**paths, **(as_text or {})}
        self._from_text = {kind.__name__: make for kind, (_, make) in self._as_text.items()}

    def encode(self, value: Any) -> bytes:
        """Return the value as bytes. Raises TypeError for a class that is not listed."""
        arrays = bytearray()
        text = json.dumps(self._encode_value(value, arrays), separators=(",", ":")).encode()
        return b"".join((_HEAD.pack(len(text)), text, arrays))

    def decode(self, data: bytes | memoryview) -> Any:
        """Return the value that `encode` was given. Raises MessageError for other bytes; no code from them runs."""
        try:
            (length,) = _HEAD.unpack_from(data)
            body = memoryview(data)[_HEAD.size :]
            if length > len(body):
                raise MessageError("a message that is cut short")
            return self._decode_value(json.loads(bytes(body[:length])), body[length:])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
            raise MessageError(f"a message that no rank of this job sends ({type(error).__name__}: {error})") from None

    # To JSON: plain values as they are, anything else as a list that begins with its kind. Long sequences of one class
    # are sent as columns, and repeated values once with an index: a manifest has thousands of nearly equal rows.

    def _encode_value(self, value: Any, arrays: bytearray) -> Any:
        """Return a value as JSON; bytes of arrays are appended to `arrays`. Raises TypeError for other types."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list or kind is tuple:
            return ["list" if kind is list else "tuple", *self._encode_sequence(value, arrays)]
        if kind is frozenset:
            return ["frozenset", *self._encode_sequence(sorted(value), arrays)]
        if kind is dict:
            return [
                "dict",
                *self._encode_sequence(list(value), arrays),
                *self._encode_sequence(list(value.values()), arrays),
            ]
        if kind in self._fields:
            return [
                "object",
                kind.__name__,
                [self._encode_value(getattr(value, name), arrays) for name in self._fields[kind]],
            ]
        if kind in self._as_text:
            return ["text", kind.__name__, self._as_text[kind][0](value)]
        if kind is np.ndarray:
            return ["array", value.dtype.str, list(value.shape), _append_data(np.ascontiguousarray(value), arrays)]
        if kind is bytes:
            return ["bytes", len(value), _append_data(value, arrays)]
        if isinstance(value, np.generic):
            return value.item()
        bases: tuple[Any, ...] = (str, int, float, tuple, list, dict)
        for base in bases:  # torch has classes of its own: TorchVersion, Size
            if isinstance(value, base) and not hasattr(value, "_fields"):
                return self._encode_value(base(value), arrays)
        raise TypeError(f"{kind.__name__} is not sent between ranks")

    def _encode_sequence(self, values: Sequence[Any], arrays: bytearray) -> list[Any]:
        """Return [kind, content] for a sequence of values."""
        kinds = set(map(type, values))
        if kinds <= _PLAIN:
            return ["plain", values]
        (kind, *others) = kinds
        if kind is tuple and not others and set(map(type, chain.from_iterable(values))) <= {int}:
            return _encode_mostly_equal(values, lambda some: ["tuples of int", some])
        if not others and len(values) > _MAX_UNCOLUMNED:
            if kind in self._fields:
                columns = [[getattr(value, name) for value in values] for name in self._fields[kind]]
                return ["columns", [kind.__name__, [self._encode_sequence(column, arrays) for column in columns]]]
            if kind in self._as_text:
                as_text = self._as_text[kind][0]
                return _encode_mostly_equal(values, lambda some: ["texts", [kind.__name__, list(map(as_text, some))]])
        return ["mixed", [self._encode_value(value, arrays) for value in values]]

    # From JSON: everything is checked, since the bytes may come from anybody.

    def _decode_value(self, code: Any, data: memoryview) -> Any:
        """Return the value that _encode_value has encoded. Raises MessageError for what it never writes."""
        if type(code) is not list:
            return code
        kind = code[0]
        if kind == "list":
            return self._decode_sequence(code[1], code[2], data)
        if kind == "tuple":
            return tuple(self._decode_sequence(code[1], code[2], data))
        if kind == "frozenset":
            return frozenset(self._decode_sequence(code[1], code[2], data))
        if kind == "dict":
            keys = self._decode_sequence(code[1], code[2], data)
            return dict(zip(keys, self._decode_sequence(code[3], code[4], data), strict=True))
        if kind == "object":
            return self._classes[code[1]](*(self._decode_value(part, data) for part in code[2]))
        if kind == "text":
            return self._from_text[code[1]](code[2])
        if kind == "array":
            return _read_array(code[1], code[2], code[3], data)
        if kind == "bytes":
            return bytes(_read_data(code[1], code[2], data))
        raise MessageError("a value of no kind")

    def _decode_sequence(self, kind: str, content: Any, data: memoryview) -> list[Any]:
        """Return the elements of a sequence; `kind` says how it was shortened."""
        if kind == "plain":
            if type(content) is not list or not set(map(type, content)) <= _PLAIN:
                raise MessageError("plain values that are not")
            return content
        if kind == "tuples of int":
            return list(map(tuple, content))
        if kind == "columns":
            columns = [self._decode_sequence(column[0], column[1], data) for column in content[1]]
            if not columns or len({len(column) for column in columns}) > 1:
                raise MessageError("columns of different lengths")
            return list(map(self._classes[content[0]], *columns))
        if kind == "few":
            # Each different value once, and for every element the index of its value.
            different = self._decode_sequence(content[0][0], content[0][1], data)
            if set(map(type, content[1])) != {int} or min(content[1]) < 0:
                raise MessageError("an invalid index")
            return list(map(different.__getitem__, content[1]))
        if kind == "texts":
            return list(map(self._from_text[content[0]], content[1]))
        if kind == "mixed":
            return [self._decode_value(part, data) for part in content]
        raise MessageError("values of no kind")


def _field_names(kind: type) -> list[str]:
    if is_dataclass(kind):
        return [field.name for field in fields(kind) if field.init]
    return list(kind._fields)  # type: ignore[attr-defined]


def _encode_mostly_equal(values: Sequence[Any], row: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """Encode values that are mostly equal as the distinct ones and an index of each; others as they are."""
    index: dict[Any, int] = {}
    of_value = [index.setdefault(value, len(index)) for value in values]
    return row(values) if len(index) * _MIN_REPEATS > len(values) else ["few", [row(list(index)), of_value]]


def _append_data(data: Any, arrays: bytearray) -> int:
    """Append data to the raw bytes; returns its offset."""
    at = len(arrays)
    arrays += data if type(data) is bytes else data.tobytes()
    return at


def _read_data(size: Any, at: Any, data: memoryview) -> memoryview:
    if type(size) is not int or type(at) is not int or not 0 <= at <= at + size <= len(data):
        raise MessageError("raw bytes that are not there")
    return data[at : at + size]


def _read_array(name: Any, shape: Any, at: Any, data: memoryview) -> Any:
    if name not in _DTYPES or not all(type(size) is int and size >= 0 for size in shape):
        raise MessageError("an array of no shape or type")
    dtype, count = np.dtype(name), 1
    for size in shape:
        count *= size
    return np.frombuffer(_read_data(count * dtype.itemsize, at, data), dtype=dtype).reshape(shape).copy()


PLAIN = Codec()
"""Codec for values of plain types only."""


T = TypeVar("T")


def all_gather_values(value: T, group: ProcessGroup | None = None, codec: Codec = PLAIN) -> list[T]:
    """Return the values of all ranks of the group, in rank order. Uses CPU tensors."""
    message = _to_tensor(codec.encode(value))
    lengths = _gather_lengths(message, group)
    received = list(torch.empty(len(lengths), max(lengths), dtype=torch.uint8))
    dist.all_gather(received, _pad_to(message, max(lengths)), group=group)
    return [codec.decode(data[:length].numpy().tobytes()) for data, length in zip(received, lengths, strict=True)]


def gather_values(value: T) -> list[T] | None:
    """Return the values, of plain types, of all ranks in rank order on rank 0; None on the others."""
    message = _to_tensor(PLAIN.encode(value))
    lengths = _gather_lengths(message, None)
    first = dist.get_rank() == 0
    received = list(torch.empty(len(lengths), max(lengths), dtype=torch.uint8)) if first else None
    dist.gather(_pad_to(message, max(lengths)), received, group_dst=0)
    if received is None:
        return None
    return [PLAIN.decode(data[:length].numpy().tobytes()) for data, length in zip(received, lengths, strict=True)]


def broadcast_value(value: T | None, codec: Codec = PLAIN) -> T:
    """Return rank 0's value on every rank; the values of the others are ignored."""
    first = dist.get_rank() == 0
    message = _to_tensor(codec.encode(value) if first else b"")
    length = torch.tensor([len(message)])
    dist.broadcast(length, group_src=0)
    message = message if first else torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, group_src=0)
    decoded: T = codec.decode(message.numpy().tobytes())
    return decoded


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _pad_to(message: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(message, (0, length - len(message)))


def _gather_lengths(message: Tensor, group: ProcessGroup | None) -> list[int]:
    lengths = list(torch.empty(dist.get_world_size(group), 1, dtype=torch.int64))
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    return [int(length) for length in lengths]
