"""Read and write torch.distributed.checkpoint (DCP): torch writes it, one tensor at a time; reading unpickles nothing.

`parse_dcp_metadata` reads the metadata, a pickle, as data; `DcpTensors` reads the tensors it describes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from hpc_train.checkpoint.convert.formats.pickle_reader import (
    ForbiddenError,
    PickledCall,
    PickledPairs,
    PickleError,
    read_pickle,
)
from hpc_train.checkpoint.convert.formats.torch_files import FilePart, MappedFile, open_foreign_file, read_bounded_file
from hpc_train.checkpoint.convert.formats.torch_pickle import (
    list_allowed_names,
    list_dtype_names,
    open_zip_storages,
    parse_pickled_dtype,
    parse_shape,
    parse_strided_tensor,
)
from hpc_train.checkpoint.convert.tensor_sources import TensorSource, read_whole_tensors
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.format.hdf5_layout import dtype_name, parse_dtype
from hpc_train.checkpoint.format.rectangle import Rectangle, explain_coverage, forms_grid, make_slices
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.errors import UserError
from hpc_train.interfaces import TensorShard

METADATA_FILE = ".metadata"
_MAX_METADATA_BYTES = 512 << 20
_MAX_OBJECTS = 10_000_000
"""Limit on objects in the metadata; a chunk takes about ten."""
_MIN_CHUNK_BYTES = 16
"""Minimum bytes of a chunk in the metadata. It bounds the chunks, as a pickle can refer to one list many times."""
_MAX_ODD_CHUNKS = 4096
"""Limit on chunks of a tensor that are not cells of a grid; comparing them takes time quadratic in their number."""
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_BEFORE_2_3 = "torch.distributed._shard.sharded_tensor.metadata"
"""Module of the tensor properties before torch 2.3."""


@cache
def _list_allowed_globals() -> frozenset[tuple[str, str]]:
    """Return the exact names that torch's metadata is made of."""
    classes = ("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
    paths = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    return frozenset(
        {
            *(
                (_METADATA_MODULE, name)
                for name in (*classes, "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")
            ),
            (_BEFORE_2_3, "TensorProperties"),
            (_BEFORE_2_3, "MEM_FORMAT_ENCODING"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            *((module, name) for module in ("pathlib", "pathlib._local") for name in paths),
            *list_dtype_names(),
        }
    )


@dataclass(frozen=True)
class StoredChunk:
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
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True)
class _Item:
    """Place of an item according to the metadata."""

    file: str
    begin: int
    size: int


_Key = tuple[str, tuple[int, ...]]
"""(tensor name, offset of the chunk in it)"""


def parse_dcp_metadata(folder: Path) -> dict[str, StoredTensor]:
    """Parse the metadata of a DCP folder; returns dtype, shape and chunks of every tensor, by name.

    Other objects are left out and never read. Raises UserError if the folder is no such checkpoint, if its metadata
    names anything that torch's metadata never does, or if it contradicts the files.
    """
    path = folder / METADATA_FILE
    try:
        data = read_bounded_file(path, _MAX_METADATA_BYTES)
        tensors = _parse_tensors(
            read_pickle(data, _list_allowed_globals(), most=_MAX_OBJECTS).value, len(data) // _MIN_CHUNK_BYTES
        )
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


def _parse_tensors(root: Any, most_chunks: int) -> dict[str, StoredTensor]:
    try:
        fields = _read_fields(root, "Metadata")
        items = dict(_parse_items(fields["storage_data"]))
        described = {
            name: _read_fields(value, "TensorStorageMetadata")
            for name, value in fields["state_dict_metadata"].by_name().items()
            if type(value) is PickledCall and value.function.name == "TensorStorageMetadata"
        }
        if sum(len(tensor["chunks"]) for tensor in described.values()) > most_chunks:
            raise PickleError("more chunks than metadata of its size has")
        return {name: _parse_tensor(name, tensor, items) for name, tensor in described.items()}
    except (KeyError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise PickleError(f"a part is missing or of another type: {type(error).__name__}") from None


def _read_fields(value: Any, name: str) -> dict[str, Any]:
    """Return the attributes of a pickled object of class `name`, without making one."""
    if (
        type(value) is not PickledCall
        or value.function.name != name
        or value.args
        or type(value.state) is not PickledPairs
    ):
        raise PickleError(f"no {name} where one should be")
    return value.state.by_name()


def _parse_items(value: Any) -> Iterable[tuple[_Key, _Item]]:
    for key, info in value.pairs:
        index, where = _read_fields(key, "MetadataIndex"), _read_fields(info, "_StorageInfo")
        if index.get("offset") is None:
            continue  # an object, not a tensor
        if where.get("transform_descriptors"):
            raise PickleError("its files are transformed (compressed or encrypted), which is not read")
        file, begin, size = where["relative_path"], where["offset"], where["length"]
        if not (type(file) is str and type(begin) is type(size) is int and begin >= 0 and size >= 0):
            raise PickleError("an invalid place")
        yield (index["fqn"], parse_shape(index["offset"])), _Item(_check_file_name(file), begin, size)


def _check_file_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable() or not path.name:
        raise PickleError(f"a file outside of the folder, {ascii(name)[:100]}")
    return name


def _parse_tensor(name: str, fields: dict[str, Any], items: dict[_Key, _Item]) -> StoredTensor:
    state = fields["properties"].state
    dtype = parse_pickled_dtype(state[0] if type(state) is tuple else state.by_name()["dtype"])
    shape, chunks = parse_shape(fields["size"]), []
    for value in fields["chunks"]:
        chunk = _read_fields(value, "ChunkStorageMetadata")
        rectangle = Rectangle(parse_shape(chunk["offsets"]), parse_shape(chunk["sizes"]))
        if len(rectangle.offset) != len(shape) or len(rectangle.shape) != len(shape):
            raise PickleError(f"a chunk of {ascii(name)[:100]} of other dimensions")
        item = items[name, rectangle.offset]
        if rectangle.volume * dtype.itemsize > item.size:
            raise PickleError(f"a chunk of {ascii(name)[:100]} of shape {rectangle.shape} in {item.size:,} bytes")
        chunks.append(StoredChunk(rectangle, item.file, item.begin, item.size))
    _check_cover(name, shape, [chunk.rectangle for chunk in chunks])
    return StoredTensor(dtype, shape, tuple(chunks))


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Rectangle]) -> None:
    """Raise PickleError unless the chunks cover the tensor exactly once."""
    filled = [chunk for chunk in chunks if chunk.volume]
    if not filled and not prod(shape):
        return
    columns = [chunk.offset for chunk in filled], [chunk.shape for chunk in filled]
    offsets, shapes = (np.array(column, dtype=np.int64).reshape(len(filled), len(shape)) for column in columns)
    if filled and forms_grid(shape, offsets, shapes):
        return
    many = len(filled) > _MAX_ODD_CHUNKS
    why = "too many odd pieces" if many else explain_coverage(Rectangle((0,) * len(shape), shape), filled)
    if why:
        raise PickleError(f"the chunks of {ascii(name)[:100]} do not make it: {why}")


def _check_sizes(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    """Raise PickleError if a chunk ends past the end of its file, or all tensors together are larger than all files."""
    chunks = [chunk for tensor in tensors.values() for chunk in tensor.chunks]
    sizes = {name: (folder / name).stat().st_size for name in {chunk.file for chunk in chunks}}
    for chunk in chunks:
        size = sizes[chunk.file]
        if chunk.begin + chunk.size > size:
            raise PickleError(f"{chunk.file}: has {size:,} bytes, and a tensor at {chunk.begin:,}+{chunk.size:,}")
    total = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    if total > sum(sizes.values()):
        raise PickleError(f"tensors of {total:,} bytes in files of {sum(sizes.values()):,}")


_MAPPED_FILES = 256
"""Maximum files that are mapped at a time; a checkpoint of many ranks has thousands."""


def write_dcp(
    folder: Path,
    source: TensorSource,
    tensors: Sequence[SavedTensor],
    dtype: torch.dtype | None,
    on_bytes: Callable[[int], object],
) -> list[str]:
    """Write the tensors, one in memory at a time; returns the names of the files."""
    planner = _Planner(source, tensors, dtype, on_bytes)
    empty = {
        tensor.name: torch.empty(tensor.shape, dtype=planner.dtype_of(tensor), device="meta") for tensor in tensors
    }
    with _silence_dcp(folder):
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
        dcp.save(empty, storage_writer=writer, planner=planner, no_dist=True)
    return sorted(path.name for path in folder.iterdir())


class _Planner(dcp.DefaultSavePlanner):
    """Save planner that reads each tensor when torch's writer asks for it."""

    def __init__(
        self,
        source: TensorSource,
        tensors: Sequence[SavedTensor],
        dtype: torch.dtype | None,
        on_bytes: Callable[[int], object],
    ) -> None:
        super().__init__()
        self._source, self._dtype, self._on_bytes = source, dtype, on_bytes
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def dtype_of(self, tensor: SavedTensor) -> torch.dtype:
        """Return the dtype in which a tensor is written."""
        stored_dtype = parse_dtype(tensor.dtype)
        return self._dtype if self._dtype and stored_dtype.is_floating_point else stored_dtype

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._tensors[index.fqn]
        made = read_whole_tensors(self._source, [tensor])[tensor.name].to(self.dtype_of(tensor))
        self._on_bytes(tensor.rectangle.volume * tensor.itemsize)
        return made


class DcpTensors:
    """Tensors of a DCP folder (a TensorSource), read without torch's reader, which unpickles."""

    def __init__(
        self,
        folder: Path,
        stored: Mapping[str, StoredTensor],
        names: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """stored: from parse_dcp_metadata. names: our name -> name in the folder. dtypes: by our names."""
        self._folder, self._stored, self._names, self._dtypes = folder, stored, names, dtypes
        self._mapped: dict[str, MappedFile] = {}

    @property
    def tensors(self) -> Sequence[SavedTensor]:
        """The tensors under our names."""
        return [
            SavedTensor(name, dtype_name(self._dtypes[name]), self._stored[theirs].shape)
            for name, theirs in self._names.items()
        ]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Fill the shards. Raises CheckpointError for a file that does not hold what the metadata says, and OSError."""
        for shard in shards:
            wanted = Rectangle(tuple(shard.offset), tuple(shard.local.shape))
            stored = self._stored[self._names[shard.name]]
            for chunk in stored.chunks:
                common = wanted.overlap(chunk.rectangle)
                if common is not None:
                    inner = make_slices(common.start_in(chunk.rectangle), common.shape)
                    outer = make_slices(common.start_in(wanted), common.shape)
                    shard.local[outer].copy_(self._read(chunk, stored.dtype)[inner])

    def _read(self, chunk: StoredChunk, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of a chunk, as a view of the mapped file."""
        path = self._folder / chunk.file
        try:
            with open_foreign_file(path) as file:
                data, storages = open_zip_storages(FilePart(file, chunk.begin, chunk.size))
                tensor = parse_strided_tensor(read_pickle(data, list_allowed_names()).value, storages)
                size = os.fstat(file.fileno()).st_size
        except PickleError as error:
            raise CheckpointError(f"{path}: at byte {chunk.begin} there is no tensor of torch.save ({error})") from None
        if (tensor.shape, tensor.dtype) != (chunk.rectangle.shape, dtype):
            raise CheckpointError(
                f"{path}: at byte {chunk.begin} is a tensor of shape {tensor.shape} and "
                f"{tensor.dtype}, in {METADATA_FILE} of "
                f"{chunk.rectangle.shape} and {dtype}"
            )
        if chunk.file not in self._mapped:
            if len(self._mapped) >= _MAPPED_FILES:
                self._mapped.clear()
            self._mapped[chunk.file] = MappedFile(path, size)
        return self._mapped[chunk.file].view(tensor, chunk.begin)


@contextmanager
def _silence_dcp(folder: Path) -> Iterator[None]:
    """Silence torch's warning about a single process, and turn its errors into one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (CheckpointException, Exception) as error:  # torch's writer may raise anything
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(first, (CheckpointError, OSError)):
            raise first from None
        text = " ".join(str(first).split())
        raise CheckpointError(f"{folder}: torch's writer failed ({type(first).__name__}: {text})") from error
