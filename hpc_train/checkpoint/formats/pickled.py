"""Read files of torch.save without torch.load: no code runs, and every size is checked before use."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpc_train.checkpoint.formats.bounded_files import open_regular
from hpc_train.checkpoint.formats.mapped_files import FilePart, MappedFile
from hpc_train.checkpoint.formats.pickle_values import ForbiddenError, Pairs, Persistent, PickleError, read_pickle
from hpc_train.checkpoint.formats.torch_pickle import (
    MOST_PICKLE,
    Storages,
    StridedTensor,
    allowed_names,
    find_tensors,
    storage_dtype,
    storage_key,
    zip_storages,
)
from hpc_train.checkpoint.formats.zip_records import Span
from hpc_train.errors import UserError

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_TIMES, _SPARE = 4, 64 << 20
"""All tensors may take _TIMES times the file's bytes plus _SPARE bytes: tied and expanded ones share storage."""
_SPARE_NAMES = 1 << 20
"""The names of all tensors may take _TIMES times the file's bytes plus these."""
_COUNT = struct.Struct("<q")


def read(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in nested dictionaries, mapped, with keys joined by dots; anything else is left out.

    Raises UserError for a file that is not of torch.save, or that holds more than torch.load with weights_only takes.
    """
    if path.is_dir():
        raise UserError(f"{path}: is a folder; give the file of torch.save")
    try:
        return _read(path)
    except ForbiddenError as error:
        raise UserError(
            f"{path}: holds more than tensors, and loading it could run code ({error}); save its state_dict() alone"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (RuntimeError, MemoryError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        text = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path}: is not a file of torch.save ({text})") from None


def _read(path: Path) -> dict[str, torch.Tensor]:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        found = _find(file, size)
    total = sum(it.bytes for it in found.values())
    if total > _TIMES * size + _SPARE:
        raise PickleError(f"its tensors would take {total:,} bytes, the file has {size:,}")
    mapped = MappedFile(path, size)
    return {name: mapped.view(it) for name, it in found.items()}


def _find(file: BinaryIO, size: int) -> dict[str, StridedTensor]:
    part = FilePart(file, 0, size)
    if part.read(0, min(4, size)) == b"PK\x03\x04":
        data, storages = zip_storages(part)
        value, _ = read_pickle(data, allowed_names())[:2]
    else:
        value, storages = _legacy(part)
    return dict(find_tensors(value, storages, _TIMES * size + _SPARE_NAMES))


def _legacy(file: FilePart) -> tuple[Any, Storages]:
    """Return (value, lookup of storages) of a file from before torch 1.6: several pickles, and then the storages."""
    data = file.read(0, min(file.size, MOST_PICKLE))
    names = allowed_names()
    magic, at, _ = read_pickle(data, names)
    if magic != _MAGIC:
        raise PickleError("its first bytes are not those of torch.save")
    version, at, _ = read_pickle(data, names, at)
    system, at, _ = read_pickle(data, names, at)
    if version != _VERSION or not (type(system) is Pairs and system.by_name().get("little_endian") is True):
        raise PickleError("of a version or a machine that we do not read")
    value, at, persistent = read_pickle(data, names, at)
    keys, at, _ = read_pickle(data, names, at)
    if type(keys) is not list or not all(type(key) is str for key in keys):
        raise PickleError("it does not tell where its storages are")
    places = _places(file, keys, at, _item_sizes(persistent))

    def place(identifier: Any, dtype: torch.dtype) -> Span:
        key, count = storage_key(identifier)
        begin, size = places.get(key, (0, -1))
        if count * dtype.itemsize > size:
            raise PickleError(f"a storage of {count:,} elements that is not in the file")
        return begin, size

    return value, place


def _item_sizes(persistent: list[Persistent]) -> dict[str, int]:
    """Return the bytes per element of every storage, by its key."""
    found: dict[str, int] = {}
    for it in persistent:
        size = storage_dtype(it).itemsize
        if found.setdefault(storage_key(it.identifier)[0], size) != size:
            raise PickleError("a storage of two types")
    return found


def _places(file: FilePart, keys: list[str], begin: int, item_sizes: dict[str, int]) -> dict[str, Span]:
    """Return the place of each storage: a count of elements, then the elements, whose size only the pickle tells."""
    found: dict[str, Span] = {}
    for key in keys:
        (count,) = _COUNT.unpack(file.read(begin, _COUNT.size))
        size = count * item_sizes.get(key, 1)
        begin += _COUNT.size
        if not 0 <= size <= file.size - begin:
            raise PickleError(f"a storage of {count:,} elements that is not in the file")
        found[key] = begin, size
        begin += size
    return found
