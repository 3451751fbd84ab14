"""One shard file, from pieces in memory to a file on the disk: staged first, written later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from hpc_train.api import Piece
from hpc_train.checkpoint.arena import Arena
from hpc_train.checkpoint.chunks import Parts
from hpc_train.checkpoint.compressed import Lying, write_compressed
from hpc_train.checkpoint.copying import Copying, begin
from hpc_train.checkpoint.digests import to_bytes
from hpc_train.checkpoint.files import checksum_of, write_file
from hpc_train.checkpoint.filling import Filling, can_fill
from hpc_train.checkpoint.holdings import Held, held_by
from hpc_train.checkpoint.image import Image, Row, make_image, row_of
from hpc_train.checkpoint.looking import Looking
from hpc_train.checkpoint.manifest import ShardFile
from hpc_train.checkpoint.packing import Buffers
from hpc_train.checkpoint.poison import Span, all_finite
from hpc_train.checkpoint.seal import seal_of_table
from hpc_train.checkpoint.slots import Slots, make_slots
from hpc_train.checkpoint.storage.policy import USUAL, Behaviour
from hpc_train.checkpoint.storage.staging import LocalFile, LocalStage
from hpc_train.checkpoint.stream import Stream, write_image, write_stream

DIGESTS = ".digests"
"""Suffix of the table of digests beside a shard file."""
_OF_PIECE = attrgetter("name", "shape", "dtype", "offset")
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_Looks = tuple[list[Any], ...]
"""What of pieces decides where they go, in columns, as an object a piece takes longer to make."""


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
    looking: Looking | None = None
    """Sees whether it is finite, while it is written."""
    spans: Sequence[Span] = ()
    """What of it can have a NaN."""
    level: int = 0
    """At which it is to be compressed; 0: not."""
    buffers: Buffers = field(default_factory=Buffers)
    """For that."""

    def is_finite(self) -> bool:
        """Whether there is neither NaN nor infinity in it; see poison."""
        if self.finite is not None:
            return self.finite
        if self.looking is not None and self.looking.is_finite:
            return True
        assert isinstance(self.image, memoryview)
        return all_finite(self.image, self.spans)


@dataclass
class Stage:
    """The memory for one rank's shard, and the image of the layout it last had."""

    threads: int = 2
    """That copy."""
    make: Callable[[Sequence[Row]], Image] = make_image
    """section.make_section for a rank that shares its file."""
    level: int = 0
    """See Staged."""
    _arena: Arena = field(default_factory=Arena)
    _buffers: Buffers = field(default_factory=Buffers)
    _looks: _Looks = ()
    _slots: Slots | None = None
    """Of tensors that look so."""

    def take(self, pieces: Sequence[Piece], overlap: bool = False, late: bool = False) -> Staged:
        """Copy the pieces. What was taken before is overwritten. overlap: see copying.begin. late: see filling.

        Raises CheckpointError for a dtype that HDF5 does not have and where memory is short.
        """
        tensors = [piece.local for piece in pieces]
        slots = self._slots_of(pieces, tensors)
        staged = Staged(slots.memory, slots.image.size, slots.held, spans=slots.spans)
        if late and not self.level and can_fill(tensors):
            filling = Filling(slots, tensors)
            return replace(staged, filling=filling, looking=filling.looking)
        looking = Looking(slots) if self.make is make_image and not self.level else None
        copying = begin(slots, pieces, self.threads, overlap)
        return replace(staged, copying=copying, looking=looking, level=self.level, buffers=self._buffers)

    def _slots_of(self, pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> Slots:
        """Those of the last time, if the pieces are like them: making them takes longer than many a copy."""
        looks = list(map(_OF_PIECE, pieces)), list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors))
        if self._slots is None or looks != self._looks:
            self._slots = None  # it has a view of the memory
            rows = tuple(row_of(piece) for piece in pieces)
            image = self.make(rows)
            memory = self._arena.reserve(image.size)
            self._slots, self._looks = make_slots(memory, image, held_by(rows, image)), looks
        return self._slots

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
        self._slots = None
        staged.image.release()
        self._arena.spare()
        return replace(staged, image=copy, looking=None)


def write_shard(directory: Path, name: str, staged: Staged, how: Behaviour = USUAL) -> tuple[ShardFile, Held]:
    """Write a shard file and its table of digests into a step's directory, and put both on the disk.

    name: path within the directory; its folder is there. Raises OSError, and CheckpointError for an image that was
    damaged on the disk of the node. An image that is compressed is none any more.
    """
    if staged.level:
        return compress_shard(directory, name, staged, staged.held, staged.held.places, staged.size, how)
    path, image = directory / name, staged.image
    if isinstance(image, LocalFile):
        return write_table(directory, name, staged.size, image.copy_to(path, how), staged.held), staged.held
    if staged.looking is None:
        digests = write_image(path, image, staged.size, how)
        return write_table(directory, name, staged.size, digests, staged.held), staged.held
    found: list[ShardFile] = []

    def known(digests: list[int]) -> None:
        if not found:
            found.append(write_table(directory, name, staged.size, digests, staged.held))

    write_stream(path, Stream(staged.looking.read, staged.size, True, staged.looking.digests, known), how)
    return found[0], staged.held


def compress_shard(
    directory: Path, name: str, staged: Staged, held: Held, begins: Sequence[int], size: int, how: Behaviour
) -> tuple[ShardFile, Held]:
    """The same with tensors that are compressed; `held` says what is to be in it, and `size` the bytes of its image.

    begins: byte of what is staged at which each row's data lies. Raises OSError and CheckpointError.
    """
    memory = staged.image
    assert isinstance(memory, memoryview)
    lying = (
        Lying(row, place, memory[begin : begin + row.bytes])
        for row, place, begin in zip(held.rows, held.places, begins, strict=True)
    )
    found = write_compressed(directory / name, list(lying), staged.level, how, staged.buffers)
    return write_table(directory, name, found.size, found.digests, held, found.parts, size), held


def write_table(
    directory: Path,
    name: str,
    size: int,
    digests: Sequence[int],
    held: Held,
    parts: Parts | None = None,
    inflated: int | None = None,
) -> ShardFile:
    """Put the table of a shard file of that size beside it, and on the disk. Raises OSError.

    held: contents of the file. parts, inflated: of a compressed file; see chunks and ShardFile.
    """
    table = to_bytes(size, digests, seal_of_table(held.seal, parts), parts)
    write_file(beside(directory / name), table)
    return ShardFile(name, size, checksum_of(table), inflated=inflated)


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


SHARDS = "shards"
FOLDER = 64
"""Shard files in a folder; each has its table of digests beside it."""


def folders(files: int) -> list[str]:
    """The folders that so many files need."""
    return [str(Path(shard_name(first)).parent) for first in range(0, files, FOLDER)]
