"""torch.distributed.checkpoint, by torch's own reader and writer, one tensor at a time."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hpc_train.api import Piece
from hpc_train.checkpoint.dtypes import dtype_name, dtype_of
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.holdings import Tensor
from hpc_train.checkpoint.offline.source import Tensors, whole
from hpc_train.errors import UserError

_METADATA = ".metadata"
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, path) for module in ("pathlib", "pathlib._local") for path in ("PosixPath", "PurePosixPath", "Path")),
}


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
    """The tensors of such a checkpoint (a Tensors). The last ones that were read are kept."""

    def __init__(self, folder: Path, names: Mapping[str, str], dtypes: Mapping[str, torch.dtype]) -> None:
        """names: ours, and theirs. dtypes: that ours are to have."""
        self._folder, self._names, self._dtypes = folder, names, dtypes
        self._known = metadata(folder)
        self._kept: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Under our names."""
        return [
            Tensor(name, dtype_name(self._dtypes[name]), tuple(self._known[theirs].size))
            for name, theirs in self._names.items()
        ]

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Raises CheckpointError if torch cannot read them."""
        wanted = {self._names[piece.name] for piece in pieces}
        if not wanted <= self._kept.keys():
            self._kept = self._load(wanted)
        for piece in pieces:
            spans = zip(piece.offset, piece.local.shape, strict=True)
            where = tuple(slice(begin, begin + size) for begin, size in spans)
            piece.local.copy_(self._kept[self._names[piece.name]][where])

    def _load(self, wanted: set[str]) -> dict[str, torch.Tensor]:
        known = self._known
        state = {name: torch.empty(known[name].size, dtype=known[name].properties.dtype) for name in sorted(wanted)}
        with _quiet(self._folder):
            dcp.load(state, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        return state


def metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name, size and type of every tensor. Raises UserError if it is no such checkpoint, or not a harmless one."""
    _check_harmless(folder)
    with _quiet(folder):
        known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: it for name, it in known.items() if isinstance(it, TensorStorageMetadata)}


class _Restricted(pickle.Unpickler):
    """Knows what torch's metadata is made of, and nothing else: torch itself reads that pickle without a look at it."""

    def find_class(self, module: str, name: str) -> Any:
        harmless = module in _MODULES or (module, name) in _CLASSES
        if harmless or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _check_harmless(folder: Path) -> None:
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            _Restricted(file).load()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the folder of a torch.distributed.checkpoint") from error
    except pickle.UnpicklingError as error:
        raise UserError(f"{path}: needs {error}, which no metadata of torch has; it is not loaded") from error
    except Exception as error:  # pickles fail in every way
        raise UserError(f"{path}: is not metadata of torch.distributed.checkpoint ({type(error).__name__})") from error


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
        raise CheckpointError(f"{folder}: torch's reader or writer failed ({type(first).__name__}: {text})") from error
