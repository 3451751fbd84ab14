"""Is a committed checkpoint what was committed? And which is the newest that is?"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpc_train.api import World
from hpc_train.checkpoint.agreement import on_all, on_first
from hpc_train.checkpoint.catalogue import committed, locate
from hpc_train.checkpoint.chunks import Parts, stored_within
from hpc_train.checkpoint.consistency import check_file
from hpc_train.checkpoint.digests import BLOCK, Digests, digest_blocks, first_wrong
from hpc_train.checkpoint.errors import CheckpointError, Problem
from hpc_train.checkpoint.index import INDEX, index_problem
from hpc_train.checkpoint.loading import table_of
from hpc_train.checkpoint.manifest import MANIFEST, Manifest, ShardFile, incomplete, read
from hpc_train.checkpoint.shard import beside
from hpc_train.checkpoint.source import check_folders
from hpc_train.regular_files import check_regular, open_regular

_log = logging.getLogger(__name__)
_CHUNK = 1 << 20
"""Bytes that are still in the processor's cache when they are looked at."""
_SPAN = (256 << 20) // BLOCK
"""Blocks that a thread looks at in one go."""


def verify(directory: Path, step: int, world: World | None = None) -> list[Problem]:
    """Everything that is wrong with a committed step: none means that its bytes are those that were committed.

    Reads all of it. With a world every rank calls it, takes its share of the files and gets the whole answer.
    Raises UserError if the step is not there.
    """
    path, manifest, problems = on_first(world, lambda: _open(directory, step))
    if manifest is None:
        return problems
    rank, size = (world.rank, world.size) if world else (0, 1)
    mine = manifest.files[rank::size]

    def found() -> list[Problem]:
        return file_problems(path, manifest, mine) + (index_problems(path, manifest) if rank == 0 else [])

    return problems + on_all(world, found, lambda ranks: [problem for of_rank in ranks for problem in of_rank])


def verify_alone(
    path: Path, step: int, jobs: int = 1, tell: Callable[[int], object] = lambda done: None
) -> tuple[Manifest | None, list[Problem]]:
    """Verify a step in one process, given its directory; the returned manifest is None if it is damaged.

    jobs, tell: as in `file_problems`.
    """
    manifest, problems = _manifest(path, step)
    if manifest is None:
        return None, problems
    return manifest, problems + file_problems(path, manifest, manifest.files, jobs, tell) + index_problems(
        path, manifest
    )


def index_problems(path: Path, manifest: Manifest) -> list[Problem]:
    """Return the problems of a step's index, if it has one; only a regular file is opened."""
    try:
        check_regular(path / INDEX, follow=False)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [Problem(INDEX, f"it cannot be read: {error.strerror}")]
    found = index_problem(path, manifest)
    return [found] if found else []


def newest(directory: Path, world: World | None = None) -> int | None:
    """The last committed step that verifies; None if there is none. What is skipped is logged with its reason.

    With a world every rank calls it and gets the same answer.
    """
    for step in reversed(on_first(world, lambda: committed(directory))):
        problems = verify(directory, step, world)
        if not problems:
            return step
        if world is None or world.rank == 0:
            _log.warning("checkpoint step %d in %s is damaged and skipped: %s", step, directory, problems[0])
    return None


def file_problems(
    path: Path,
    manifest: Manifest,
    files: Sequence[ShardFile],
    jobs: int = 1,
    tell: Callable[[int], object] = lambda done: None,
) -> list[Problem]:
    """What is wrong with some of the files of a step, compared with its manifest: missing, size, content.

    jobs: threads, which share out large files too. tell: is called with the bytes that were looked at, by any of them.
    """

    def look(span: _Span) -> Problem | None:
        found = _look(path, manifest, span)
        tell(span.bytes)
        return found

    checked = {file.name: _spans(path, file) for file in files}
    with ThreadPoolExecutor(jobs) as pool:
        looks = [
            (name, [found] if isinstance(found, Problem) else [pool.submit(look, span) for span in found])
            for name, found in checked.items()
        ]
        results = [
            (name, [it if isinstance(it, Problem) else it.result() for it in of_file]) for name, of_file in looks
        ]
    damaged = {name: wrong[0] for name, of_file in results if (wrong := [problem for problem in of_file if problem])}
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    for name in checked.keys() - damaged.keys():
        if (problem := _contradiction(path, manifest, numbers[name])) is not None:
            damaged[name] = problem
    return [damaged[name] for name in checked if name in damaged]


def _contradiction(path: Path, manifest: Manifest, number: int) -> Problem | None:
    """Return how a file contradicts the manifest, if it does, although its bytes are those that were committed."""
    file = manifest.files[number]
    try:
        with os.fdopen(open_regular(path / file.name), "rb", buffering=0) as opened:

            def read(begin: int, end: int) -> bytes:
                return os.pread(opened.fileno(), end - begin, begin)

            check_file(manifest.holdings, number, file, table_of(path, file), read, thorough=True)
    except OSError as error:
        return Problem(file.name, f"it cannot be read: {error.strerror}")
    except CheckpointError as error:
        return Problem(file.name, str(error))
    return None


@dataclass(frozen=True)
class _Span:
    """Some blocks of a file, and their digests."""

    file: ShardFile
    first: int
    table: Digests
    parts: Parts | None

    @property
    def bytes(self) -> int:
        begin = self.first * BLOCK
        return min(begin + len(self.table) * BLOCK, self.file.bytes) - begin


def _open(directory: Path, step: int) -> tuple[Path, Manifest | None, list[Problem]]:
    path = locate(directory, step)
    return path, *_manifest(path, step)


def _manifest(path: Path, step: int) -> tuple[Manifest | None, list[Problem]]:
    try:
        manifest = read(path, step)
    except CheckpointError as error:
        return None, [Problem(MANIFEST, str(error))]
    wrong = incomplete(manifest.holdings)
    return manifest, [Problem(MANIFEST, wrong[1], tensor=wrong[0])] if wrong else []


def _spans(path: Path, file: ShardFile) -> list[_Span] | Problem:
    """All blocks of a file; or what is wrong before any of them is looked at."""
    try:
        check_folders(path, file.name)
        size = (path / file.name).lstat().st_size
        if size != file.bytes:
            return Problem(file.name, f"it has {size} bytes, {file.bytes} were committed")
        table = table_of(path, file)
    except FileNotFoundError:
        return Problem(file.name, "it is missing")
    except CheckpointError as error:
        return Problem(beside(Path(file.name)).as_posix(), str(error).partition(": ")[2])
    except OSError as error:
        return Problem(file.name, f"it cannot be read: {error.strerror}")
    starts = range(0, len(table.digests), _SPAN)
    return [_Span(file, first, table.digests[first : first + _SPAN], table.parts) for first in starts]


def _look(path: Path, manifest: Manifest, span: _Span) -> Problem | None:
    name = span.file.name
    try:
        wrong = _first_wrong_block(path / name, span.first, span.table)
    except OSError as error:
        return Problem(name, f"it cannot be read: {error.strerror}")
    except CheckpointError as error:
        return Problem(name, str(error))
    if wrong is None:
        return None
    what = "its content is not what was committed"
    return Problem(name, what, tensor=_tensor_at(manifest, span, wrong * BLOCK), offset=wrong * BLOCK)


def _first_wrong_block(path: Path, first: int, table: Digests) -> int | None:
    """Its index in the file. first: index of the block that the table begins with."""
    buffer = memoryview(mmap.mmap(-1, _CHUNK))
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        for begin in range(0, len(table), _CHUNK // BLOCK):
            expected = table[begin : begin + _CHUNK // BLOCK].tolist()
            count = _fill(file.fileno(), buffer[: len(expected) * BLOCK], (first + begin) * BLOCK)
            if -(-count // BLOCK) < len(expected):
                raise CheckpointError("it became shorter while it was read")
            wrong = first_wrong(digest_blocks(buffer[:count]), expected)
            if wrong is not None:
                return first + begin + wrong
    return None


def _fill(file: int, buffer: memoryview, begin: int) -> int:
    """As many bytes as there are, up to the length of the buffer."""
    at = 0
    while at < len(buffer) and (count := os.preadv(file, [buffer[at:]], begin + at)):
        at += count
    return at


def _tensor_at(manifest: Manifest, span: _Span, begin: int) -> str | None:
    """A tensor that has bytes in the block that begins there; None in what is HDF5's own."""
    index, end = manifest.files.index(span.file), begin + BLOCK
    if span.parts is not None:
        hit = stored_within(span.parts, begin, end)
        if not len(hit):
            return None
        begin, end = int(hit["begin"][0]), int(hit["begin"][0]) + 1
    tensors = {tensor.name: tensor for tensor in manifest.holdings.tensors}
    for name, parts in manifest.holdings.parts().items():
        for part in parts:
            last = part.place + part.rectangle.volume * tensors[name].itemsize
            if part.file == index and part.place < end and last > begin:
                return name
    return None
