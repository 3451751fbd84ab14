"""One shard file, from pieces in memory to a file on the disk: staged first, written later."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpc_train.api import Piece
from hpc_train.checkpoint.arena import Arena, fill
from hpc_train.checkpoint.digests import to_bytes
from hpc_train.checkpoint.files import checksum_of, write_file
from hpc_train.checkpoint.holdings import Held, held_by
from hpc_train.checkpoint.image import Image, Row, make_image, row_of
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.poison import all_finite
from hpc_train.checkpoint.storage.policy import USUAL, Behaviour
from hpc_train.checkpoint.storage.staging import LocalFile, LocalStage
from hpc_train.checkpoint.stream import write_image

DIGESTS = ".digests"
"""Suffix of the table of digests beside a shard file."""


@dataclass(frozen=True)
class Staged:
    """A shard file's image, in memory or on a disk of the node; the pieces it was made of may change."""

    image: memoryview | LocalFile
    size: int
    held: Held
    finite: bool | None = None
    """None: nobody has looked yet."""

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it; see poison."""
        if self.finite is not None:
            return self.finite
        assert isinstance(self.image, memoryview)
        return all_finite(self.image, self.held)


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

    def put_aside(self, staged: Staged, local: LocalStage) -> Staged:
        """The same on a disk of the node, and the memory to spare; unchanged where that cannot be used."""
        assert isinstance(staged.image, memoryview)
        with ThreadPoolExecutor(1) as pool:
            finite = pool.submit(staged.is_finite)
            copy = local.put(staged.image, staged.size)
            staged = replace(staged, finite=finite.result())
        if copy is None:
            return staged
        assert isinstance(staged.image, memoryview)
        staged.image.release()
        self._arena.spare()
        return replace(staged, image=copy)


def write_shard(directory: Path, name: str, staged: Staged, how: Behaviour = USUAL) -> tuple[ShardFile, Held]:
    """Write a shard file and its table of digests into a step's directory, and put both on the disk.

    name: path within the directory; its folder is there. Raises OSError, and CheckpointError for an image that was
    damaged on the disk of the node.
    """
    path, image = directory / name, staged.image
    digests = image.copy_to(path, how) if isinstance(image, LocalFile) else write_image(path, image, staged.size, how)
    table = to_bytes(staged.size, digests)
    write_file(beside(path), table)
    return ShardFile(name, staged.size, checksum_of(table)), staged.held


def beside(path: Path) -> Path:
    """Where the table of digests of a shard file lies."""
    return path.with_name(path.name + DIGESTS)


def shard_name(writer: int) -> str:
    """Path within a step's directory: no folder has more than a few hundred entries, however many write."""
    return f"{SHARDS}/{writer // FOLDER:03d}/{writer:06d}.h5"


SHARDS = "shards"
FOLDER = 128
"""Shard files in a folder; each has its table of digests beside it."""


def folders(writers: int) -> list[str]:
    """The folders that so many writers need."""
    return [str(Path(shard_name(first)).parent) for first in range(0, writers, FOLDER)]
