"""Read and write safetensors with its library: model.safetensors, or numbered files of 5 GB with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpc_train.checkpoint.convert.formats.torch_files import open_foreign_file, read_bounded_json
from hpc_train.checkpoint.convert.tensor_sources import TensorSource, read_whole_tensors
from hpc_train.checkpoint.format.hdf5_layout import parse_dtype
from hpc_train.checkpoint.format.shard_layout import SavedTensor
from hpc_train.errors import UserError

if TYPE_CHECKING:
    from types import ModuleType

MAX_FILE_BYTES = 5 * 10**9
"""Maximum bytes of a file, as in transformers; a file is in memory while it is written."""
_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
State = dict[str, torch.Tensor]
Convert = Callable[[State], State]


def write_safetensors(
    folder: Path,
    source: TensorSource,
    groups: Sequence[Sequence[SavedTensor]],
    convert: Convert,
    on_bytes: Callable[[int], object],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write groups of tensors, each converted on its own, into files of limited size; returns the names of the files.

    A larger group gets a file of its own. convert: maps the state of a group to that of the file (as cast_state does);
    it may rename and cast.
    """
    library = import_safetensors()
    shards = list(_pack_groups(groups, max_file_bytes))
    names = (
        [_SINGLE_FILE] if len(shards) == 1 else [_format_file_name(index, len(shards)) for index in range(len(shards))]
    )
    places: dict[str, str] = {}
    total = 0
    for name, shard in zip(names, shards, strict=True):
        state: State = {}
        for group in shard:
            converted = convert(read_whole_tensors(source, group))
            state |= {key: tensor.contiguous() for key, tensor in converted.items()}
            on_bytes(sum(map(_count_bytes, group)))
        _save(library, state, folder / name)
        places |= dict.fromkeys(state, name)
        total += sum(tensor.nbytes for tensor in state.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return names


def read_safetensors(path: Path) -> State:
    """Return the tensors of a file, or of all files of a folder, mapped and not yet read. Raises UserError."""
    library = import_safetensors()
    state: State = {}
    for file in list_weight_files(path):
        try:
            with open_foreign_file(file):
                pass
            with library.safe_open(file, framework="pt") as opened:
                state |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (library.SafetensorError, OSError) as error:
            raise UserError(f"{file}: cannot be read as safetensors ({' '.join(str(error).split())})") from error
    return state


def save_state(state: State, path: Path) -> None:
    """Write tensors into one file."""
    _save(import_safetensors(), state, path)


def cast_state(state: State, dtype: torch.dtype | None) -> State:
    """Cast floating-point tensors to a dtype; None leaves them as they are."""
    return {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for name, tensor in state.items()
    }


def import_safetensors() -> ModuleType:
    """Import the library. Raises UserError if it is not installed."""
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("this format needs the package safetensors: pip install 'hpc_train[hf]'") from None
    return safetensors


def _save(library: Any, state: State, path: Path) -> None:
    try:
        library.torch.save_file(state, path, metadata={"format": "pt"})
    except library.SafetensorError as error:
        raise UserError(f"safetensors cannot hold these tensors ({' '.join(str(error).split())})") from error
    except KeyError as error:
        raise UserError(f"safetensors cannot hold tensors of {error}; export to dcp") from error


def _pack_groups(groups: Sequence[Sequence[SavedTensor]], max_file_bytes: int) -> Iterator[list[Sequence[SavedTensor]]]:
    shard: list[Sequence[SavedTensor]] = []
    size = 0
    for group in groups:
        bytes_of = sum(map(_count_bytes, group))
        if shard and size + bytes_of > max_file_bytes:
            yield shard
            shard, size = [], 0
        shard.append(group)
        size += bytes_of
    yield shard


def _count_bytes(tensor: SavedTensor) -> int:
    return tensor.rectangle.volume * parse_dtype(tensor.dtype).itemsize


def _format_file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def list_weight_files(path: Path) -> list[Path]:
    """Return the file itself, or the safetensors files of a folder, as its index names them. Raises UserError."""
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        try:
            names = sorted(set(read_bounded_json(index)["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(f"{index}: is not an index of safetensors files ({type(error).__name__})") from error
        for name in names:
            if not isinstance(name, str) or not name.isprintable() or name in ("", "..") or name != Path(name).name:
                raise UserError(
                    f"{index}: names {str(name)[:80]!r}, which is not the name of a file in its folder; copy the files "
                    "again"
                )
        return [path / name for name in names]
    files = [path / _SINGLE_FILE] if (path / _SINGLE_FILE).is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{path}: there is no .safetensors file; save with save_pretrained(..., safe_serialization=True)"
        )
    return files
