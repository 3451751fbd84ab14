"""manifest.json: what a committed step holds and where. Its presence under the final name is the commit."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_train.checkpoint import older, origin
from hpc_train.checkpoint.collecting import uncollected
from hpc_train.checkpoint.digests import ALGORITHM, BLOCK
from hpc_train.checkpoint.errors import CheckpointError, UnreadableError
from hpc_train.checkpoint.files import checksum_of
from hpc_train.checkpoint.holdings import Holdings
from hpc_train.checkpoint.listing import from_json, texts
from hpc_train.checkpoint.lone import Lone, lone
from hpc_train.checkpoint.origin import Origin, Times
from hpc_train.checkpoint.rectangle import Rectangle, is_grid, uncovered

MANIFEST = "manifest.json"
FORMAT_VERSION = 4
"""Goes up when an older release could no longer read what is written."""
_CANONICAL: dict[str, Any] = {"sort_keys": True, "separators": (",", ":")}
"""The same text for equal content, on which the checksum is."""
_NUMBERS = re.compile(rb',"sequence":(\d+),"step":(\d+),"tensors":\[')


@dataclass(frozen=True)
class ShardFile:
    """A file as it was when it was committed."""

    name: str
    """Path within the directory of the step."""
    bytes: int
    digests: str
    """`<algorithm>:<hex>` of its table of digests, which lies beside it."""
    written_at: int | None = None
    """The earlier step that it was written with, where it is a file of both (see links); None: this one."""
    inflated: int | None = None
    """Bytes of its image, where it is compressed: places in it are in that (see chunks)."""

    @property
    def image(self) -> int:
        """Bytes of its image."""
        return self.bytes if self.inflated is None else self.inflated


@dataclass(frozen=True)
class Manifest:
    """Everything that is known of a checkpoint step without opening its shard files."""

    step: int
    sequence: int
    """Counts the commits in a directory. It orders checkpoints: after a rollback the newest is not the highest step."""
    world_size: int
    holdings: Holdings
    files: tuple[ShardFile, ...]
    extra: dict[str, Any]
    finite: bool = True
    """Neither NaN nor infinity in it, and none in the loss or the gradient since the save before."""
    validation_loss: float | None = None
    """At this very step; None if it was not measured, or is not finite."""
    origin: Origin | None = None
    """What made it, where that was told."""
    times: Times | None = None
    """Of its save; None for one that no training saved, and of earlier releases."""

    @property
    def size(self) -> int:
        """Bytes of all shard files."""
        return sum(file.bytes for file in self.files)

    @property
    def shared(self) -> int:
        """Bytes of those that were written with earlier steps."""
        return sum(file.bytes for file in self.files if file.written_at is not None)

    @property
    def inflated(self) -> int | None:
        """Bytes of all images, if there is a compressed file."""
        compressed = any(file.inflated is not None for file in self.files)
        return sum(file.image for file in self.files) if compressed else None

    @cached_property
    def lone(self) -> Lone:
        """The tensors of the holdings that are found by name alone; made once, as reshard asks many times."""
        return lone(self.holdings)

    @uncollected()
    def to_bytes(self, listed: dict[str, bytes] | None = None) -> bytes:
        """JSON text with a checksum of itself. Raises TypeError or ValueError if `extra` is not JSON.

        listed: listing.texts of the holdings, if they are at hand.
        """
        body = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "sequence": self.sequence,
            "world_size": self.world_size,
            "finite": self.finite,
            "validation_loss": self.validation_loss,
            "block": BLOCK,
            "algorithm": ALGORITHM,
            "files": [[file.name, file.bytes, file.digests] for file in self.files],
            **({"written_at": [file.written_at for file in self.files]} if self.shared else {}),
            **({"inflated": [file.inflated for file in self.files]} if self.inflated is not None else {}),
            "extra": json.loads(json.dumps(self.extra, allow_nan=False)),  # as a reader will see it: no int keys
            **({"origin": origin.to_json(self.origin)} if self.origin is not None else {}),
            **({"times": origin.to_json(self.times)} if self.times is not None else {}),
        }
        values = {key: json.dumps(value, **_CANONICAL).encode() for key, value in body.items()}
        values |= texts(self.holdings) if listed is None else listed
        parts = [it for key in sorted(values) for it in (b",", json.dumps(key).encode(), b":", values[key])]
        parts[0] = b"{"
        end = f',"checksum":"{checksum_of(*parts, b"}")}"}}\n'
        return b"".join((*parts, end.encode()))


@uncollected()
def from_bytes(data: bytes) -> Manifest:
    """Raises CheckpointError if the text is not exactly what `to_bytes` made, or is of another format."""
    body = _parsed(data)
    version = body.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(f"format {version} is newer than {FORMAT_VERSION}, the newest this release can read")
    if not _is_intact(data, body.pop("checksum", None), body):
        raise CheckpointError("its content does not match its own checksum")
    known = version in (*older.FORMATS, FORMAT_VERSION)
    if not known or (body.get("block"), body.get("algorithm")) != (BLOCK, ALGORITHM):
        raise CheckpointError(f"format {version} is not read by this release; load it with the one that wrote it")
    try:
        files = _files(body["files"], body.get("written_at"), body.get("inflated"))
        step, sequence, world_size = (int(body[key]) for key in ("step", "sequence", "world_size"))
        holdings, score = _holdings(body, len(files)), body.get("validation_loss")
        finite, score = bool(body.get("finite", True)), None if score is None else float(score)
        told = origin.origin_from(body.get("origin")), origin.times_from(body.get("times"))
        return Manifest(step, sequence, world_size, holdings, files, body["extra"], finite, score, *told)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"it is not a manifest ({type(error).__name__}: {error})") from error


def read(path: Path, step: int) -> Manifest:
    """The manifest in the directory of a step. Raises CheckpointError if it is missing, damaged or another step's.

    UnreadableError, which is one too, if the file system fails.
    """
    manifest = from_bytes(_content(path))
    if manifest.step != step:
        raise CheckpointError(f"it is the manifest of step {manifest.step}")
    return manifest


def sequence(path: Path, step: int) -> int:
    """Of the manifest in the directory of a step, without a look at what the step holds. Raises as `read` does."""
    data = _content(path)
    if (told := _told(data)) is not None and told[1] == step:
        return told[0]
    body = _parsed(data)
    if not _is_intact(data, body.pop("checksum", None), body):
        raise CheckpointError("its content does not match its own checksum")
    if body.get("step") != step or not isinstance(body.get("sequence"), int):
        raise CheckpointError("it is not the manifest of that step")
    return int(body["sequence"])


def _told(data: bytes) -> tuple[int, int] | None:
    """(sequence, step), if the text is as it was written; None: it must be looked at as a whole.

    Without making objects of what it says of thousands of tensors. `extra` is before it, and in strings no quote stands
    by itself, so the last text like this is that of the manifest.
    """
    end = data.rfind(b',"checksum":')
    if end < 0 or data[end:] != f',"checksum":"{checksum_of(data[:end] + b"}")}"}}\n'.encode():
        return None
    found = _NUMBERS.match(data, max(0, data.rfind(b',"sequence":')))
    return (int(found[1]), int(found[2])) if found else None


def _content(path: Path) -> bytes:
    try:
        return (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise CheckpointError("missing") from None
    except OSError as error:
        raise UnreadableError(f"cannot be read: {error.strerror}") from error


def incomplete(holdings: Holdings) -> tuple[str, str] | None:
    """(tensor, why) of the first tensor whose parts disagree or do not cover it exactly once; None if all do."""
    counted = Counter(tensor.name for tensor in holdings.tensors)
    if len(counted) < len(holdings.tensors):
        return counted.most_common(1)[0][0], "its pieces disagree on shape or dtype"
    for tensor in holdings.tensors:
        if holdings.is_in_one_part(tensor):
            continue
        offsets, shapes = holdings.rectangles(tensor)
        if not is_grid(tensor.shape, offsets, shapes):
            rows = zip(offsets.tolist(), shapes.tolist(), strict=True)
            parts = [Rectangle(tuple(offset), tuple(shape)) for offset, shape in rows]
            if why := uncovered(tensor.rectangle, parts):
                return tensor.name, why
    return None


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError as error:  # also UnicodeDecodeError
        raise CheckpointError("it is not JSON") from error
    if not isinstance(body, dict):
        raise CheckpointError("it is not a JSON object")
    return body


def _is_intact(data: bytes, checksum: object, body: dict[str, Any]) -> bool:
    """checksum, body: what `data` says. As it was written its text can be looked at; elsewise its content."""
    written = data[: max(0, data.rfind(b',"checksum":'))] + b"}"
    return checksum == checksum_of(written) or checksum == checksum_of(json.dumps(body, **_CANONICAL).encode())


def _files(rows: list[Any], *optional: list[int | None] | None) -> tuple[ShardFile, ...]:
    """optional: the columns that a manifest may lack, written_at and inflated."""
    columns = ([None] * len(rows) if column is None else map(_integer, column) for column in optional)
    return tuple(
        ShardFile(_checked(str(name)), int(size), str(digests), *rest)
        for (name, size, digests), *rest in zip(rows, *columns, strict=True)
    )


def _integer(value: int | None) -> int | None:
    return None if value is None else int(value)


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name:
        raise ValueError(f"{name!r} is not the name of a file of a step")
    return name


def _holdings(body: dict[str, Any], files: int) -> Holdings:
    holdings = from_json(older.listed(body) if body["format_version"] in older.FORMATS else body)
    if any(len(it.files) and not 0 <= it.files.min() <= it.files.max() < files for it in holdings.layouts):
        raise ValueError("a layout of a file that is not there")
    return holdings
