"""One shard file, from pieces in memory to a file on the disk: staged first, written later."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from hpc_train.api import Piece
from hpc_train.checkpoint.arena import Arena
from hpc_train.checkpoint.copying import Copying, begin
from hpc_train.checkpoint.digests import to_bytes
from hpc_train.checkpoint.files import checksum_of, write_file
from hpc_train.checkpoint.filling import THREADS, Filling, can_fill
from hpc_train.checkpoint.holdings import Held, held_by
from hpc_train.checkpoint.image import Image, Row, make_image, row_of
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.poison import all_finite
from hpc_train.checkpoint.storage.policy import USUAL, Behaviour
from hpc_train.checkpoint.storage.staging import LocalFile, LocalStage
from hpc_train.checkpoint.stream import write_image, write_stream

DIGESTS = ".digests"
"""Suffix of the table of digests beside a shard file."""


@dataclass(frozen=True)
class Staged:
    """A shard file's image, in memory or on a disk of the node."""

    image: memoryview | LocalFile
    size: int
    held: Held
    finite: bool | None = None
    """None: nobody has looked yet."""
    copying: Copying | None = None
    """What fills the image, where that may still be under way."""
    filling: Filling | None = None
    """What fills it while it is written."""

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it; see poison."""
        if self.finite is not None:
            return self.finite
        if self.filling is not None and not self.filling.in_doubt:
            return True
        assert isinstance(self.image, memoryview)
        return all_finite(self.image, self.held)


@dataclass
class Stage:
    """The memory for one rank's shard, and the image of the layout it last had."""

    threads: int = 2
    """That copy."""
    make: Callable[[Sequence[Row]], Image] = make_image
    """section.make_section for a rank that shares its file."""
    _arena: Arena = field(default_factory=Arena)
    _rows: tuple[Row, ...] | None = None
    _image: Image | None = None

    def take(self, pieces: Sequence[Piece], overlap: bool = False, late: bool = False) -> Staged:
        """Copy the pieces. What was taken before is overwritten. overlap: see copying.begin. late: see filling.

        Raises CheckpointError for a dtype that HDF5 does not have and where memory is short.
        """
        rows = tuple(row_of(piece) for piece in pieces)
        if self._image is None or rows != self._rows:
            self._image, self._rows = self.make(rows), rows
        memory = self._arena.reserve(self._image.size)
        held = held_by(rows, self._image)
        if late and can_fill(pieces):
            return Staged(memory, self._image.size, held, filling=Filling(memory, self._image, pieces, held))
        copying = begin(memory, self._image, pieces, self.threads, overlap)
        return Staged(memory, self._image.size, held, copying=copying)

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
    if isinstance(image, LocalFile):
        digests = image.copy_to(path, how)
    elif staged.filling is not None:
        digests = write_stream(path, staged.filling.read, staged.size, how, THREADS)
    else:
        digests = write_image(path, image, staged.size, how)
    return write_table(directory, name, staged.size, digests), staged.held


def write_table(directory: Path, name: str, size: int, digests: Sequence[int]) -> ShardFile:
    """Put the table of digests of a shard file of that size beside it, and on the disk. Raises OSError."""
    table = to_bytes(size, digests)
    write_file(beside(directory / name), table)
    return ShardFile(name, size, checksum_of(table))


def beside(path: Path) -> Path:
    """Where the table of digests of a shard file lies."""
    return path.with_name(path.name + DIGESTS)


def shard_name(number: int, ranks: range | None = None) -> str:
    """Path within a step's directory of the file of that number, from 0: however many there are, no folder has many.

    ranks: those that write it; None: the one of that number.
    """
    ranks = range(number, number + 1) if ranks is None else ranks
    last = f"-{ranks[-1]:06d}" if len(ranks) > 1 else ""
    return f"{SHARDS}/{number // FOLDER:03d}/{ranks[0]:06d}{last}.h5"


def writers_of(name: str) -> int:
    """How many ranks have written the file of that name (or were to: some may have had nothing)."""
    found = re.fullmatch(r"(\d+)-(\d+)\..*", PurePosixPath(name).name)
    return int(found[2]) - int(found[1]) + 1 if found else 1


SHARDS = "shards"
FOLDER = 64
"""Shard files in a folder; each has its table of digests beside it."""


def folders(files: int) -> list[str]:
    """The folders that so many files need."""
    return [str(Path(shard_name(first)).parent) for first in range(0, files, FOLDER)]
