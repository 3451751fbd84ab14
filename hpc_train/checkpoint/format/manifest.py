"""manifest.json describes a committed step: its tensors, its files and their checksums.

It is written before the directory gets its final name, so a directory of that name always has one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from hpc_train.checkpoint import provenance
from hpc_train.checkpoint.errors import CheckpointError, UnreadableError, format_error
from hpc_train.checkpoint.format.block_digests import BLOCK_BYTES, BLOCK_DIGEST_ALGORITHM
from hpc_train.checkpoint.format.integer_columns import LARGEST_INTEGER, DecodeBudget, check_integers
from hpc_train.checkpoint.format.layout_bounds import check_layout_bounds, find_duplicate_name
from hpc_train.checkpoint.format.manifest_encoding import decode_layout, encode_columns
from hpc_train.checkpoint.format.rectangle import Rectangle, explain_coverage, forms_grid
from hpc_train.checkpoint.format.shard_layout import SingleShardTensors, StepLayout, find_single_shard_tensors
from hpc_train.checkpoint.provenance import Origin, SaveTimes
from hpc_train.checkpoint.storage.file_system import checksum_bytes
from hpc_train.garbage_collection import pause_gc
from hpc_train.regular_files import NotRegularError, is_plain_directory, read_regular

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 5
"""Format version that is written; no other is read."""
_CANONICAL: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}
"""Options of json.dumps that give equal content the same text; the checksum is of that text."""
_NUMBERS = re.compile(rb',"sequence":(\d{1,19}),"step":(\d{1,19}),"tensors":\[')
_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}")
MAX_MANIFEST_BYTES = 1 << 30
"""Maximum bytes of a manifest."""
_MAX_INFLATION = 2200
"""Maximum bytes of an image per byte of its compressed file: deflate reaches 1032, and an image has padding."""
_MANY_ROWS = 4096
"""Number of rows of a layout above which the size of a file is checked before the rows are expanded."""
_PART, _DEPTH = 255, 8
"""Maximum bytes of a component of a file's name, and maximum number of components."""


@dataclass(frozen=True)
class ShardFile:
    """A shard file as it was committed."""

    name: str
    """Path within the directory of the step."""
    bytes: int
    digests: str
    """Checksum, `<algorithm>:<hex>`, of the table of digests beside the file."""
    written_at: int | None = None
    """Step that wrote the file, if an earlier one (see save.incremental); None: this step."""
    inflated: int | None = None
    """Bytes of the uncompressed image, if the file is compressed; places of tensors refer to the image."""

    @property
    def image(self) -> int:
        """Bytes of the uncompressed image."""
        return self.bytes if self.inflated is None else self.inflated


@dataclass(frozen=True)
class Manifest:
    """A committed step as manifest.json describes it, without its tensors."""

    step: int
    sequence: int
    """Number of the commit in its directory. It orders checkpoints: after a rollback the newest has a lower step."""
    world_size: int
    step_layout: StepLayout
    files: tuple[ShardFile, ...]
    extra: dict[str, Any]
    finite: bool = True
    """Whether the tensors, and the loss and gradients since the save before, are free of NaN and infinity."""
    validation_loss: float | None = None
    """Validation loss at this step; None if it was not measured or is not finite."""
    origin: Origin | None = None
    """Code and config that made the step, if known."""
    times: SaveTimes | None = None
    """How long each part of the save took; None for a step that no training saved."""
    index: str | None = None
    """Checksum of index.h5."""

    @property
    def size(self) -> int:
        """Bytes of all shard files."""
        return sum(file.bytes for file in self.files)

    @property
    def shared(self) -> int:
        """Bytes of the shard files that earlier steps wrote."""
        return sum(file.bytes for file in self.files if file.written_at is not None)

    @property
    def inflated(self) -> int | None:
        """Bytes of all images; None if no file is compressed."""
        compressed = any(file.inflated is not None for file in self.files)
        return sum(file.image for file in self.files) if compressed else None

    @cached_property
    def single_shard_tensors(self) -> SingleShardTensors:
        """Tensors stored whole in one shard file; cached, because reshard asks for each batch of tensors."""
        return find_single_shard_tensors(self.step_layout)

    @pause_gc()
    def to_bytes(self, columns: dict[str, bytes] | None = None) -> bytes:
        """Encode the manifest as JSON text that contains its own checksum.

        columns: encode_columns of the step layout, if already made. Raises TypeError or ValueError if `extra` is not
        JSON.
        """
        body = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "sequence": self.sequence,
            "world_size": self.world_size,
            "finite": self.finite,
            "validation_loss": self.validation_loss,
            "block": BLOCK_BYTES,
            "algorithm": BLOCK_DIGEST_ALGORITHM,
            "files": [[file.name, file.bytes, file.digests] for file in self.files],
            **({"written_at": [file.written_at for file in self.files]} if self.shared else {}),
            **({"inflated": [file.inflated for file in self.files]} if self.inflated is not None else {}),
            "extra": json.loads(json.dumps(self.extra, allow_nan=False)),  # as a reader will see it: no int keys
            **({"index": self.index} if self.index is not None else {}),
            **({"origin": provenance.encode_provenance(self.origin)} if self.origin is not None else {}),
            **({"times": provenance.encode_provenance(self.times)} if self.times is not None else {}),
        }
        values = {key: json.dumps(value, **_CANONICAL).encode() for key, value in body.items()}
        values |= encode_columns(self.step_layout) if columns is None else columns
        parts = [part for key in sorted(values) for part in (b",", json.dumps(key).encode(), b":", values[key])]
        parts[0] = b"{"
        end = f',"checksum":"{checksum_bytes(*parts, b"}")}"}}\n'
        return b"".join((*parts, end.encode()))


@pause_gc()
def parse_manifest(data: bytes, directory: Path | None = None) -> Manifest:
    """Parse a manifest and check every number in it (docs/checkpoint_format.md).

    directory: of the step; the sizes of its shard files bound how many rows a manifest may claim. Raises
    CheckpointError if the text does not match its checksum, is of another format, or contradicts itself.
    """
    try:
        return _parse_body(data, directory)
    except KeyError as error:
        raise CheckpointError(f"it is not a manifest (it has no {error})") from error
    except (TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(f"it is not a manifest ({format_error(error)})") from error
    except (RecursionError, MemoryError) as error:
        raise CheckpointError(f"it is not a manifest ({type(error).__name__} while it was read)") from error


def _parse_body(data: bytes, directory: Path | None) -> Manifest:
    """Check version, checksum and content of a manifest. Raises CheckpointError, or what parsing raises."""
    body = _parse_json(data)
    version = body.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise CheckpointError(f"format {version} is newer than {FORMAT_VERSION}, the one this release can read")
    if type(version) is not int or version < FORMAT_VERSION:  # before the checksum, which could be another one there
        raise CheckpointError(
            f"format {str(version)[:20]} is not read by this release, which reads {FORMAT_VERSION}; load it with the "
            "release that wrote it"
        )
    if not _is_intact(data, body.pop("checksum", None), body):
        raise CheckpointError("its content does not match its own checksum")
    if (body.get("block"), body.get("algorithm")) != (BLOCK_BYTES, BLOCK_DIGEST_ALGORITHM):
        raise CheckpointError("its blocks of digests are of another kind")
    files = _parse_files(body["files"], body.get("written_at"), body.get("inflated"))
    budget = DecodeBudget(len(data), lambda: _count_bytes_on_disk(files, directory))
    step_layout = decode_layout(body, len(files), budget)
    check_layout_bounds(step_layout, files)
    if directory is not None:
        _check_sizes(step_layout, files, directory)

    return Manifest(
        step=_parse_number(body["step"]),
        sequence=_parse_number(body["sequence"]),
        world_size=_parse_number(body["world_size"]),
        step_layout=step_layout,
        files=files,
        extra=_parse_object(body["extra"]),
        finite=_parse_bool(body.get("finite", True)),
        validation_loss=_parse_score(body.get("validation_loss")),
        origin=provenance.parse_origin(body.get("origin")),
        times=provenance.parse_times(body.get("times")),
        index=_parse_checksum(body.get("index")),
    )


def read_manifest(path: Path, step: int) -> Manifest:
    """Read the manifest in the directory of a step.

    Raises CheckpointError if it is missing, damaged or another step's; its subclass UnreadableError if the file system
    fails.
    """
    manifest = parse_manifest(_read_bytes(path), path)
    if manifest.step != step:
        raise CheckpointError(f"it is the manifest of step {manifest.step}")
    return manifest


def read_sequence(path: Path, step: int) -> int:
    """Read only the sequence number from the manifest of a step, which is much faster. Raises as read_manifest."""
    data = _read_bytes(path)
    numbers = _find_numbers(data)
    if numbers is not None and numbers[1] == step and numbers[0] <= LARGEST_INTEGER:
        return numbers[0]
    try:
        body = _parse_json(data)
        if not _is_intact(data, body.pop("checksum", None), body):
            raise CheckpointError("its content does not match its own checksum")
        if body.get("step") != step:
            raise CheckpointError("it is not the manifest of that step")
        return _parse_number(body.get("sequence"))
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"it is not a manifest ({type(error).__name__})") from error


def _find_numbers(data: bytes) -> tuple[int, int] | None:
    """Find (sequence, step) in the text of a manifest without parsing it; None if it must be parsed.

    The text must be as `to_bytes` writes it: keys are sorted, so `extra`, which may contain anything, comes before
    `sequence`, and quotes within strings are escaped. So the last match is the manifest's own.
    """
    end = data.rfind(b',"checksum":')
    if end < 0 or data[end:] != f',"checksum":"{checksum_bytes(data[:end] + b"}")}"}}\n'.encode():
        return None
    match = _NUMBERS.match(data, max(0, data.rfind(b',"sequence":')))
    return (int(match[1]), int(match[2])) if match else None


def _read_bytes(path: Path) -> bytes:
    try:
        if not is_plain_directory(path):
            raise CheckpointError("the step is not a directory")
        return read_regular(path / MANIFEST_FILE, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        raise CheckpointError("missing") from None
    except NotRegularError as error:
        raise CheckpointError(str(error.strerror)) from error
    except MemoryError as error:
        raise CheckpointError("it is larger than the memory") from error
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error


def find_incomplete_tensor(step_layout: StepLayout) -> tuple[str, str] | None:
    """Return (tensor, reason) for the first tensor whose parts do not cover it exactly once; None if all do."""
    if twice := find_duplicate_name(step_layout.names):
        return twice, "its pieces disagree on shape or dtype"
    for tensor in step_layout.tensors:
        if step_layout.is_in_one_part(tensor):
            continue
        offsets, shapes = step_layout.rectangles(tensor)
        if not forms_grid(tensor.shape, offsets, shapes):
            rows = zip(offsets.tolist(), shapes.tolist(), strict=True)
            parts = [Rectangle(tuple(offset), tuple(shape)) for offset, shape in rows]
            if why := explain_coverage(tensor.rectangle, parts):
                return tensor.name, why
    return None


def _parse_json(data: bytes) -> dict[str, Any]:
    """Return the JSON object. Raises CheckpointError, and RecursionError if it is nested too deeply."""
    try:
        body = json.loads(data.decode(), object_pairs_hook=_make_object, parse_constant=_refuse_constant)
    except ValueError as error:  # also UnicodeDecodeError
        raise CheckpointError(f"it is not JSON ({format_error(error)})") from error
    if type(body) is not dict:
        raise CheckpointError("it is not a JSON object")
    return body


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key twice in one object")
    return values


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _is_intact(data: bytes, checksum: object, body: dict[str, Any]) -> bool:
    """Return whether the checksum matches: of the text as written or, if it was reformatted, of its content.

    checksum, body: as parsed from `data`.
    """
    written = data[: max(0, data.rfind(b',"checksum":'))] + b"}"
    return checksum == checksum_bytes(written) or checksum == checksum_bytes(json.dumps(body, **_CANONICAL).encode())


def _parse_files(rows: Any, *optional: Any) -> tuple[ShardFile, ...]:
    """Parse the table of files. optional: columns that a manifest may lack (written_at, inflated)."""
    columns = [[None] * len(rows) if column is None else column for column in optional]
    if any(type(column) is not list or len(column) != len(rows) for column in (rows, *columns)):
        raise ValueError("columns of files that do not fit each other")
    files = tuple(_parse_file(row, *rest) for row, *rest in zip(rows, *columns, strict=True))
    if len({file.name for file in files}) < len(files):
        raise ValueError("the same file twice")
    return files


def _parse_file(row: Any, written_at: Any, inflated: Any) -> ShardFile:
    name, size, digests = row
    name = _check_file_name(name)
    if type(digests) is not str or not _CHECKSUM.fullmatch(digests):
        raise ValueError("a table of digests without a checksum")
    since = None if written_at is None else _parse_number(written_at)
    inflated_bytes = None if inflated is None else _parse_number(inflated)
    if inflated_bytes is not None and inflated_bytes > _parse_number(size) * _MAX_INFLATION + _MAX_INFLATION:
        raise ValueError(f"a file of {size} bytes that would be {inflated_bytes} bytes inflated")
    return ShardFile(name, _parse_number(size), digests, since, inflated_bytes)


def _parse_checksum(value: Any) -> str | None:
    if value is not None and (type(value) is not str or not _CHECKSUM.fullmatch(value)):
        raise ValueError("an invalid checksum")
    return value


def _parse_number(value: Any) -> int:
    check_integers([value])
    if not 0 <= value <= LARGEST_INTEGER:
        raise ValueError("a number that is negative or too large")
    return int(value)


def _parse_object(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise TypeError("extra that is not an object")
    return value


def _parse_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError("neither true nor false")
    return value


def _parse_score(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not isfinite(value):
        raise TypeError("a validation loss that is not a finite number")
    return float(value)


def _check_file_name(name: Any) -> str:
    """Return the name of a shard file, a path below the directory of the step. Raises ValueError for any other."""
    parts = name.split("/") if type(name) is str else [""]
    plain = all(part not in ("", ".", "..") and len(os.fsencode(part)) <= _PART for part in parts)
    if not plain or len(parts) > _DEPTH or not name.isprintable() or parts[0] in (MANIFEST_FILE, "bad", "index.h5"):
        raise ValueError(f"{str(name)[:200]!r} is not the name of a file of a step")
    return str(name)


def _check_sizes(step_layout: StepLayout, files: Sequence[ShardFile], directory: Path) -> None:
    """Raise CheckpointError if many rows are said to be in a file that does not have its size.

    Other files are checked when they are opened; expanding so many rows takes memory.
    """
    for layout in step_layout.layouts:
        if len(layout.tensors) > _MANY_ROWS and len(layout.files):
            file = files[layout.files[0]]
            with suppress(OSError):
                size = (directory / file.name).lstat().st_size
                if size != file.bytes:
                    raise CheckpointError(f"{file.name} has {size} bytes, {file.bytes} were committed")


def _count_bytes_on_disk(files: Sequence[ShardFile], directory: Path | None) -> int:
    """Return the total bytes of the shard files that exist and have the right size."""
    if directory is None:
        return 0
    total = 0
    for file in files:
        with suppress(OSError, ValueError):
            size = (directory / file.name).lstat().st_size
            total += size if size == file.bytes else 0
    return total
