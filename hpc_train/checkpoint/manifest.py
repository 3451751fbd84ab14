"""manifest.json: what a committed step holds and where. Its presence under the final name is the commit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.files import checksum_of
from hpc_train.checkpoint.rectangle import Rectangle, uncovered

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
"""Goes up when an older release could no longer read what is written."""


@dataclass(frozen=True)
class Entry:
    """One saved rectangle of a logical tensor: a contiguous dataset of a shard file."""

    name: str
    shape: tuple[int, ...]
    """Of the whole logical tensor."""
    dtype: str
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    file: str
    dataset: str

    @property
    def rectangle(self) -> Rectangle:
        """The part of the logical tensor that it holds."""
        return Rectangle(self.offset, self.local_shape)


@dataclass(frozen=True)
class ShardFile:
    """A file as it was when it was committed."""

    name: str
    bytes: int
    checksum: str
    """`<algorithm>:<hex>` of the whole file."""


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a checkpoint step without opening its shard files."""

    format_version: int
    step: int
    sequence: int
    """Counts the commits in a directory. It orders checkpoints: after a rollback the newest is not the highest step."""
    world_size: int
    entries: tuple[Entry, ...]
    files: tuple[ShardFile, ...]
    extra: dict[str, Any]

    def to_bytes(self) -> bytes:
        """JSON text with a checksum of itself. Raises TypeError or ValueError if `extra` is not JSON."""
        body = json.loads(json.dumps(asdict(self), allow_nan=False))  # as a reader will see it: no tuples, no int keys
        return json.dumps({**body, "checksum": _checksum(body)}, indent=1).encode()


def from_bytes(data: bytes) -> Manifest:
    """Raises CheckpointError if the text is not exactly what `to_bytes` made, or is of a newer format."""
    body = _parsed(data)
    version = body.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(f"format {version} is newer than {FORMAT_VERSION}, the newest this release can read")
    if body.pop("checksum", None) != _checksum(body):
        raise CheckpointError("its content does not match its own checksum")
    try:
        return Manifest(**{**body, "entries": _entries(body["entries"]), "files": _files(body["files"])})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"it is not a manifest ({type(error).__name__}: {error})") from error


def read(path: Path, step: int) -> Manifest:
    """The manifest in the directory of a step. Raises CheckpointError if it is missing, damaged or another step's."""
    try:
        manifest = from_bytes((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointError("missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}") from error
    if manifest.step != step:
        raise CheckpointError(f"it is the manifest of step {manifest.step}")
    return manifest


def incomplete(entries: Iterable[Entry]) -> tuple[str, str] | None:
    """(tensor, why) of the first tensor whose pieces disagree or do not cover it exactly once; None if all do."""
    for name, pieces in by_name(entries).items():
        first = pieces[0]
        if any((piece.shape, piece.dtype) != (first.shape, first.dtype) for piece in pieces):
            return name, "its pieces disagree on shape or dtype"
        why = uncovered(Rectangle((0,) * len(first.shape), first.shape), [piece.rectangle for piece in pieces])
        if why:
            return name, why
    return None


def by_name(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The pieces of each logical tensor."""
    tensors: dict[str, list[Entry]] = {}
    for entry in entries:
        tensors.setdefault(entry.name, []).append(entry)
    return tensors


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError as error:  # also UnicodeDecodeError
        raise CheckpointError("it is not JSON") from error
    if not isinstance(body, dict):
        raise CheckpointError("it is not a JSON object")
    return body


def _checksum(body: dict[str, Any]) -> str:
    return checksum_of(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _entries(rows: list[dict[str, Any]]) -> tuple[Entry, ...]:
    shapes = ("shape", "offset", "local_shape")
    entries = tuple(Entry(**{**row, **{key: tuple(row[key]) for key in shapes}}) for row in rows)
    for entry in entries:
        _check_file_name(entry.file)
    return entries


def _files(rows: list[dict[str, Any]]) -> tuple[ShardFile, ...]:
    files = tuple(ShardFile(**row) for row in rows)
    for file in files:
        _check_file_name(file.name)
    return files


def _check_file_name(name: str) -> None:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file name")
