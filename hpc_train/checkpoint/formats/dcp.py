"""Files of torch.distributed.checkpoint: torch writes them, one tensor at a time; we read them without unpickling."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex

from hpc_train.api import Piece
from hpc_train.checkpoint.dtypes import dtype_name, dtype_of
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.formats.bounded_files import open_regular
from hpc_train.checkpoint.formats.dcp_metadata import METADATA, Chunk, StoredTensor
from hpc_train.checkpoint.formats.mapped_files import FilePart, MappedFile
from hpc_train.checkpoint.formats.pickle_values import PickleError, read_pickle
from hpc_train.checkpoint.formats.torch_pickle import allowed_names, read_tensor, zip_storages
from hpc_train.checkpoint.holdings import Tensor
from hpc_train.checkpoint.offline.source import Tensors, whole
from hpc_train.checkpoint.rectangle import Rectangle

_MAPPED_FILES = 256


def write(
    folder: Path, source: Tensors, tensors: Sequence[Tensor], dtype: torch.dtype | None, tell: Callable[[int], object]
) -> list[str]:
    """Write the tensors under their names; returns the names of the files. One is in memory at a time."""
    planner = _Planner(source, tensors, dtype, tell)
    empty = {it.name: torch.empty(it.shape, dtype=planner.dtype_of(it), device="meta") for it in tensors}
    with _quiet(folder):
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
        dcp.save(empty, storage_writer=writer, planner=planner, no_dist=True)
    return sorted(path.name for path in folder.iterdir())


class _Planner(dcp.DefaultSavePlanner):
    """Gives the writer each tensor when it is its turn."""

    def __init__(
        self,
        source: Tensors,
        tensors: Sequence[Tensor],
        dtype: torch.dtype | None,
        tell: Callable[[int], object],
    ) -> None:
        super().__init__()
        self._source, self._dtype, self._tell = source, dtype, tell
        self._tensors = {it.name: it for it in tensors}

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """That it is written in."""
        own = dtype_of(tensor.dtype)
        return self._dtype if self._dtype and own.is_floating_point else own

    def lookup_object(self, index: MetadataIndex) -> Any:
        tensor = self._tensors[index.fqn]
        made = whole(self._source, [tensor])[tensor.name].to(self.dtype_of(tensor))
        self._tell(tensor.rectangle.volume * tensor.itemsize)
        return made


class Stored:
    """Tensors of a torch.distributed.checkpoint (a Tensors). We read its files ourselves: torch's reader unpickles."""

    def __init__(
        self,
        folder: Path,
        stored: Mapping[str, StoredTensor],
        names: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        """stored: from parse_metadata. names: ours to theirs. dtypes: that our tensors shall have."""
        self._folder, self._stored, self._names, self._dtypes = folder, stored, names, dtypes
        self._mapped: dict[str, MappedFile] = {}

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Under our names."""
        return [
            Tensor(name, dtype_name(self._dtypes[name]), self._stored[theirs].shape)
            for name, theirs in self._names.items()
        ]

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Fill the pieces. Raises CheckpointError for a file that does not hold what the metadata says, and OSError."""
        for piece in pieces:
            wanted = Rectangle(tuple(piece.offset), tuple(piece.local.shape))
            stored = self._stored[self._names[piece.name]]
            for chunk in stored.chunks:
                common = wanted.overlap(chunk.rectangle)
                if common is not None:
                    inner = _slices(common.start_in(chunk.rectangle), common.shape)
                    outer = _slices(common.start_in(wanted), common.shape)
                    piece.local[outer].copy_(self._read(chunk, stored.dtype)[inner])

    def _read(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor of a chunk, as a view of the mapped file."""
        path = self._folder / chunk.file
        try:
            with open_regular(path) as file:
                data, storages = zip_storages(FilePart(file, chunk.begin, chunk.size))
                found = read_tensor(read_pickle(data, allowed_names()).value, storages)
                size = os.fstat(file.fileno()).st_size
        except PickleError as error:
            raise CheckpointError(f"{path}: at byte {chunk.begin} there is no tensor of torch.save ({error})") from None
        if (found.shape, found.dtype) != (chunk.rectangle.shape, dtype):
            raise CheckpointError(
                f"{path}: at byte {chunk.begin} is a tensor of shape {found.shape} and {found.dtype}, in {METADATA} of "
                f"{chunk.rectangle.shape} and {dtype}"
            )
        if chunk.file not in self._mapped:
            if len(self._mapped) >= _MAPPED_FILES:
                self._mapped.clear()
            self._mapped[chunk.file] = MappedFile(path, size)
        return self._mapped[chunk.file].view(found, chunk.begin)


def _slices(begin: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(begin, shape, strict=True))


@contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Without the warning that there is one process, and with what went wrong in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (CheckpointException, Exception) as error:  # whatever a damaged file makes of their reader
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(first, (CheckpointError, OSError)):
            raise first from None
        text = " ".join(str(first).split())
        raise CheckpointError(f"{folder}: torch's writer failed ({type(first).__name__}: {text})") from error
