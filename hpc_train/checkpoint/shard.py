"""One shard file, from pieces in memory to a file on the disk: staged first, written later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_train.api import Piece
from hpc_train.checkpoint.arena import Arena, fill
from hpc_train.checkpoint.digests import to_bytes
from hpc_train.checkpoint.files import checksum_of, write_file
from hpc_train.checkpoint.holdings import Held, held_by
from hpc_train.checkpoint.image import Image, Row, make_image, row_of
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.stream import write_image

DIGESTS = ".digests"
"""Suffix of the table of digests beside a shard file."""


@dataclass(frozen=True)
class Staged:
    """A shard file's image in memory; the pieces it was made of may change."""

    memory: memoryview
    size: int
    held: Held


@dataclass
class Stage:
    """The memory for one rank's shard, and the image of the layout it last had."""

    threads: int = 2
    """That copy."""
    _arena: Arena = field(default_factory=Arena)
    _rows: tuple[Row, ...] | None = None
    _image: Image | None = None

    def take(self, pieces: Sequence[Piece]) -> Staged:
        """Copy the pieces. What was taken before is overwritten.

        Raises CheckpointError for a dtype that HDF5 does not have and where memory is short.
        """
        rows = tuple(row_of(piece) for piece in pieces)
        if self._image is None or rows != self._rows:
            self._image, self._rows = make_image(rows), rows
        memory = self._arena.reserve(self._image.size)
        fill(memory, self._image, pieces, self.threads)
        return Staged(memory, self._image.size, held_by(rows, self._image))


def write_shard(directory: Path, name: str, staged: Staged, direct: bool = True) -> tuple[ShardFile, Held]:
    """Write a shard file and its table of digests into a step's directory, and put both on the disk.

    name: path within the directory; its folder is made where it is missing, and is synchronised. Raises OSError.
    """
    path = directory / name
    digests = write_image(path, staged.memory, staged.size, direct)
    table = to_bytes(staged.size, digests)
    write_file(beside(path), table)
    return ShardFile(name, staged.size, checksum_of(table)), staged.held


def beside(path: Path) -> Path:
    """Where the table of digests of a shard file lies."""
    return path.with_name(path.name + DIGESTS)


def shard_name(writer: int) -> str:
    """Path within a step's directory: no folder has more than a few hundred entries, however many write."""
    return f"shards/{writer // FOLDER:03d}/{writer:06d}.h5"


FOLDER = 128
"""Shard files in a folder; each has its table of digests beside it."""


def folders(writers: int) -> list[str]:
    """The folders that so many writers need."""
    return [str(Path(shard_name(first)).parent) for first in range(0, writers, FOLDER)]
