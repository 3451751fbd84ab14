"""Parse the metadata of torch.distributed.checkpoint without running any code from the file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from hpc_train.checkpoint.formats.bounded_files import read_bounded
from hpc_train.checkpoint.formats.pickle_values import Call, ForbiddenError, Pairs, PickleError, read_pickle
from hpc_train.checkpoint.formats.torch_pickle import dtype_named, dtype_names, read_shape
from hpc_train.checkpoint.rectangle import Rectangle, is_grid, uncovered
from hpc_train.errors import UserError

METADATA = ".metadata"
_MOST_BYTES = 512 << 20
_MOST_OBJECTS = 10_000_000
"""Limit on objects in the metadata; a chunk takes about ten."""
_OF_A_CHUNK = 16
"""Bytes that a chunk takes in the metadata at least. A pickle can name a list of chunks again and again."""
_MOST_ODD_CHUNKS = 4096
"""Limit on chunks of a tensor that are not cells of a grid; comparing them takes time quadratic in their number."""
_HERE = "torch.distributed.checkpoint.metadata"
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
"""Module of the tensor properties before torch 2.3."""


@cache
def _allowed() -> frozenset[tuple[str, str]]:
    """Return the exact names that torch's metadata is made of."""
    classes = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
    paths = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    return frozenset(
        {
            *((_HERE, name) for name in (*classes, "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
            (_BEFORE_2_3, "TensorProperties"),
            (_BEFORE_2_3, "MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            *((module, name) for module in ("pathlib", "pathlib._local") for name in paths),
            *dtype_names(),
        }
    )


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor and the bytes that hold it, as an object of torch.save."""

    rectangle: Rectangle
    file: str
    """Path within the folder."""
    begin: int
    size: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint. Its chunks cover it exactly once and lie within existing files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class _Item:
    """Place of an item, as the metadata says."""

    file: str
    begin: int
    size: int


_Key = tuple[str, tuple[int, ...]]
"""(tensor name, offset of the chunk in it)"""


def parse_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Return name, dtype, shape and places of every tensor. Other objects are left out, and never read.

    Raises UserError if it is no such checkpoint, names what torch's metadata never does, or contradicts its files.
    """
    path = folder / METADATA
    try:
        data = read_bounded(path, _MOST_BYTES)
        tensors = _tensors(read_pickle(data, _allowed(), most=_MOST_OBJECTS).value, len(data) // _OF_A_CHUNK)
        _check_sizes(folder, tensors)
    except OSError as error:
        raise UserError(
            f"{error.filename or path}: {error.strerror}; give the folder of a torch.distributed.checkpoint"
        ) from None
    except ForbiddenError as error:
        raise UserError(f"{path}: needs {error}, which no metadata of torch has; it is not loaded") from None
    except (PickleError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{path}: is not metadata of torch.distributed.checkpoint ({str(error) or type(error).__name__})"
        ) from None
    return tensors


def _tensors(root: Any, most_chunks: int) -> dict[str, StoredTensor]:
    try:
        fields = _fields(root, "Metadata")
        items = dict(_items(fields["storage_data"]))
        described = {
            name: _fields(it, "TensorStorageMetadata")
            for name, it in fields["state_dict_metadata"].by_name().items()
            if type(it) is Call and it.function.name == "TensorStorageMetadata"
        }
        if sum(len(it["chunks"]) for it in described.values()) > most_chunks:
            raise PickleError("more chunks than metadata of its size has")
        return {name: _tensor(name, it, items) for name, it in described.items()}
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise PickleError(f"a part is missing or of another type: {type(error).__name__}") from None


def _fields(value: Any, name: str) -> dict[str, Any]:
    """Return the attributes of a pickled object of class `name`, without making one."""
    if type(value) is not Call or value.function.name != name or value.args or type(value.state) is not Pairs:
        raise PickleError(f"no {name} where one should be")
    return value.state.by_name()


def _items(value: Any) -> Iterable[tuple[_Key, _Item]]:
    for key, info in value.pairs:
        index, where = _fields(key, "MetadataIndex"), _fields(info, "_StorageInfo")
        if index.get("offset") is None:
            continue  # an object, not a tensor
        if where.get("transform_descriptors"):
            raise PickleError("its files are transformed (compressed or encrypted), which is not read")
        file, begin, size = where["relative_path"], where["offset"], where["length"]
        if not (type(file) is str and type(begin) is type(size) is int and begin >= 0 and size >= 0):
            raise PickleError("a place that is none")
        yield (index["fqn"], read_shape(index["offset"])), _Item(_checked(file), begin, size)


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable() or not path.name:
        raise PickleError(f"a file outside of the folder, {ascii(name)[:100]}")
    return name


def _tensor(name: str, fields: dict[str, Any], items: dict[_Key, _Item]) -> StoredTensor:
    state = fields["properties"].state
    dtype = dtype_named(state[0] if type(state) is tuple else state.by_name()["dtype"])
    shape, chunks = read_shape(fields["size"]), []
    for it in fields["chunks"]:
        chunk = _fields(it, "ChunkStorageMetadata")
        rectangle = Rectangle(read_shape(chunk["offsets"]), read_shape(chunk["sizes"]))
        if len(rectangle.offset) != len(shape) or len(rectangle.shape) != len(shape):
            raise PickleError(f"a chunk of {ascii(name)[:100]} of other dimensions")
        item = items[name, rectangle.offset]
        if rectangle.volume * dtype.itemsize > item.size:
            raise PickleError(f"a chunk of {ascii(name)[:100]} of shape {rectangle.shape} in {item.size:,} bytes")
        chunks.append(Chunk(rectangle, item.file, item.begin, item.size))
    _check_cover(name, shape, [it.rectangle for it in chunks])
    return StoredTensor(dtype, shape, tuple(chunks))


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Rectangle]) -> None:
    """Raise PickleError unless the chunks cover the tensor exactly once."""
    filled = [it for it in chunks if it.volume]
    if not filled and not prod(shape):
        return
    offsets, shapes = (np.array(it, dtype=np.int64).reshape(len(filled), len(shape)) for it in _columns(filled))
    if filled and is_grid(shape, offsets, shapes):
        return
    many = len(filled) > _MOST_ODD_CHUNKS
    why = "too many odd pieces" if many else uncovered(Rectangle((0,) * len(shape), shape), filled)
    if why:
        raise PickleError(f"the chunks of {ascii(name)[:100]} do not make it: {why}")


def _columns(rectangles: list[Rectangle]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [it.offset for it in rectangles], [it.shape for it in rectangles]


def _check_sizes(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Raise PickleError if a chunk ends past the end of its file, or all tensors together are larger than all files."""
    chunks = [chunk for tensor in tensors.values() for chunk in tensor.chunks]
    sizes = {name: (folder / name).stat().st_size for name in {it.file for it in chunks}}
    for it in chunks:
        if it.begin + it.size > sizes[it.file]:
            raise PickleError(f"{it.file}: has {sizes[it.file]:,} bytes, and a tensor at {it.begin:,}+{it.size:,}")
    total = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if total > sum(sizes.values()):
        raise PickleError(f"tensors of {total:,} bytes in files of {sum(sizes.values()):,}")
