"""Read files of torch.save without torch.load: no code runs, and every size is checked before use.

Files from elsewhere are opened only if they are regular and of bounded size. Tensors are views of a mapped file, so
that nothing is read before it is used.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpc_train.checkpoint.convert.formats.pickle_reader import (
    ForbiddenError,
    PickledPairs,
    PickledReference,
    PickleError,
    read_pickle,
)
from hpc_train.checkpoint.convert.formats.torch_pickle import (
    MAX_PICKLE_BYTES,
    ByteSpan,
    StorageLookup,
    StridedTensor,
    iterate_tensors,
    list_allowed_names,
    open_zip_storages,
    parse_storage_dtype,
    parse_storage_key,
)
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.errors import UserError


@contextmanager
def open_foreign_file(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read. Raises UserError for a pipe, a device or a folder, where open() could block.

    Links are followed, because model hubs store their files as links. Raises OSError where the file cannot be opened.
    """
    # O_NONBLOCK: opening a named pipe would otherwise wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path}: is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_bounded_file(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises UserError for a larger one."""
    with open_foreign_file(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise UserError(f"{path}: is larger than {most:,} bytes, which no such file is")
    return data


MAX_JSON_BYTES = 64 << 20
"""Maximum bytes of a JSON file; the index of a very large model has a few MB."""


def read_bounded_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises UserError above MAX_JSON_BYTES, and ValueError for other text."""
    try:
        return json.loads(read_bounded_file(path, MAX_JSON_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True)
class FilePart:
    """A byte range of an open file that holds one object of torch.save."""

    file: BinaryIO
    begin: int
    size: int

    def read(self, begin: int, size: int) -> bytes:
        """Read exactly `size` bytes. Raises PickleError if there are fewer."""
        if not 0 <= begin <= begin + size <= self.size:
            raise PickleError("a place past the end of the file")
        data = os.pread(self.file.fileno(), size, self.begin + begin)
        if len(data) != size:
            raise PickleError("the end of the file came too early")
        return data


class MappedFile:
    """A private memory mapping of a file: a write to a tensor does not reach the file."""

    def __init__(self, path: Path, size: int) -> None:
        self._storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)

    def view(self, tensor: StridedTensor, begin: int = 0) -> torch.Tensor:
        """Return a tensor in the file. begin: byte of the file that the tensor's place is relative to."""
        start = begin + tensor.begin
        stop = start + tensor.extent
        if not 0 <= start <= stop <= self._storage.nbytes():
            raise CheckpointError("a tensor past the end of the file")
        span = self._storage[start:stop]
        if start % tensor.dtype.itemsize:
            span = span.clone()  # processors and kernels expect elements aligned to their size
        viewed = torch.empty(0, dtype=tensor.dtype)
        try:
            return viewed.set_(span, 0, tensor.shape, tensor.stride)
        except RuntimeError as error:
            raise CheckpointError(f"a tensor of shape {tensor.shape} cannot be made ({error})") from None


_MAGIC = 0x1950A86A20F9469CFC6C
"""MAGIC_NUMBER of torch.serialization: the first value in a file that is no zip archive, as of torch before 1.6."""
_VERSION = 1001
"""MAGIC_NUMBER and PROTOCOL_VERSION of torch.serialization: the first two pickles of a file from before torch 1.6."""
_TIMES, _SPARE = 4, 64 << 20
"""All tensors may take _TIMES times the file's bytes plus _SPARE bytes: tied and expanded tensors share storage."""
_SPARE_NAMES = 1 << 20
"""The names of all tensors may take _TIMES times the file's bytes plus these."""
_COUNT = struct.Struct("<q")


def read_torch_file(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in nested dictionaries, mapped, with keys joined by dots; anything else is left out.

    Raises UserError for a file that is not of torch.save, or that holds more than torch.load with weights_only takes.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the file of torch.save")
    try:
        return _read_tensors(path)
    except ForbiddenError as error:
        raise UserError(
            f"{path}: holds more than tensors, and loading it could run code ({error}); save its state_dict() alone"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (RuntimeError, MemoryError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path}: is not a file of torch.save ({text})") from None


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    with open_foreign_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        stored = _find_tensors(file, size)
    total = sum(tensor.bytes for tensor in stored.values())
    if total > _TIMES * size + _SPARE:
        raise PickleError(f"its tensors would take {total:,} bytes, the file has {size:,}")
    mapped = MappedFile(path, size)
    return {name: mapped.view(tensor) for name, tensor in stored.items()}


def _find_tensors(file: BinaryIO, size: int) -> dict[str, StridedTensor]:
    part = FilePart(file, 0, size)
    if part.read(0, min(4, size)) == b"PK\x03\x04":
        data, storages = open_zip_storages(part)
        value, _ = read_pickle(data, list_allowed_names())[:2]
    else:
        value, storages = _find_legacy_tensors(part)
    return dict(iterate_tensors(value, storages, _TIMES * size + _SPARE_NAMES))


def _find_legacy_tensors(file: FilePart) -> tuple[Any, StorageLookup]:
    """Return (value, lookup of storages) of a file from before torch 1.6: several pickles, and then the storages."""
    data = file.read(0, min(file.size, MAX_PICKLE_BYTES))
    names = list_allowed_names()
    magic, at, _ = read_pickle(data, names)
    if magic != _MAGIC:
        raise PickleError("its first bytes are not those of torch.save")
    version, at, _ = read_pickle(data, names, at)
    system, at, _ = read_pickle(data, names, at)
    if version != _VERSION or not (type(system) is PickledPairs and system.by_name().get("little_endian") is True):
        raise PickleError("of a version or a machine that we do not read")
    value, at, persistent = read_pickle(data, names, at)
    keys, at, _ = read_pickle(data, names, at)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise PickleError("it does not say where its storages are")
    places = _find_places(file, keys, at, _list_item_sizes(persistent))

    def place(identifier: Any, dtype: torch.dtype) -> ByteSpan:
        key, count = parse_storage_key(identifier)
        begin, size = places.get(key, (0, -1))
        if count * dtype.itemsize > size:
            raise PickleError(f"a storage of {count:,} elements that is not in the file")
        return begin, size

    return value, place


def _list_item_sizes(persistent: list[PickledReference]) -> dict[str, int]:
    """Return the bytes per element of every storage, by its key."""
    item_sizes: dict[str, int] = {}
    for storage in persistent:
        size = parse_storage_dtype(storage).itemsize
        if item_sizes.setdefault(parse_storage_key(storage.identifier)[0], size) != size:
            raise PickleError("a storage of two types")
    return item_sizes


def _find_places(file: FilePart, keys: list[str], begin: int, item_sizes: dict[str, int]) -> dict[str, ByteSpan]:
    """Return the place of each storage: a count of elements, then the elements, whose size only the pickle tells."""
    spans: dict[str, ByteSpan] = {}
    for key in keys:
        (count,) = _COUNT.unpack(file.read(begin, _COUNT.size))
        # The file gives elements, not bytes; their type is only in the pickle before.
        size = count * item_sizes.get(key, 1)
        begin += _COUNT.size
        if not 0 <= size <= file.size - begin:
            raise PickleError(f"a storage of {count:,} elements that is not in the file")
        spans[key] = begin, size
        begin += size
    return spans
