"""Is a committed checkpoint what was committed? And which is the newest that is?"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from hpc_train.api import World
from hpc_train.checkpoint.agreement import on_all, on_first
from hpc_train.checkpoint.catalogue import committed, locate
from hpc_train.checkpoint.digests import BLOCK, Digests, first_wrong
from hpc_train.checkpoint.errors import CheckpointError, Problem
from hpc_train.checkpoint.loading import table_of
from hpc_train.checkpoint.manifest import MANIFEST, Manifest, ShardFile, incomplete, read
from hpc_train.checkpoint.shard import beside

_log = logging.getLogger(__name__)
_CHUNK = 16 << 20


def verify(directory: Path, step: int, world: World | None = None) -> list[Problem]:
    """Everything that is wrong with a committed step: none means that its bytes are those that were committed.

    Reads all of it. With a world every rank calls it, takes its share of the files and gets the whole answer.
    Raises UserError if the step is not there.
    """
    path, manifest, problems = on_first(world, lambda: _open(directory, step))
    if manifest is None:
        return problems
    rank, size = (world.rank, world.size) if world else (0, 1)
    return problems + on_all(
        world,
        lambda: file_problems(path, manifest, manifest.files[rank::size]),
        lambda found: [problem for of_rank in found for problem in of_rank],
    )


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


def file_problems(path: Path, manifest: Manifest, files: Sequence[ShardFile]) -> list[Problem]:
    """What is wrong with some of the files of a step, compared with its manifest: missing, size, content."""
    return [problem for file in files if (problem := _file_problem(path, manifest, file))]


def _open(directory: Path, step: int) -> tuple[Path, Manifest | None, list[Problem]]:
    path = locate(directory, step)
    try:
        manifest = read(path, step)
    except CheckpointError as error:
        return path, None, [Problem(MANIFEST, str(error))]
    wrong = incomplete(manifest.holdings)
    return path, manifest, [Problem(MANIFEST, wrong[1], tensor=wrong[0])] if wrong else []


def _file_problem(path: Path, manifest: Manifest, file: ShardFile) -> Problem | None:
    try:
        size = (path / file.name).stat().st_size
        if size != file.bytes:
            return Problem(file.name, f"it has {size} bytes, {file.bytes} were committed")
        wrong = _first_wrong_block(path / file.name, table_of(path, file))
    except FileNotFoundError:
        return Problem(file.name, "it is missing")
    except CheckpointError as error:
        return Problem(beside(Path(file.name)).as_posix(), str(error).partition(": ")[2])
    except OSError as error:
        return Problem(file.name, f"it cannot be read: {error.strerror}")
    if wrong is None:
        return None
    what = "its content is not what was committed"
    return Problem(file.name, what, tensor=_tensor_at(manifest, file, wrong * BLOCK), offset=wrong * BLOCK)


def _first_wrong_block(path: Path, table: Digests) -> int | None:
    buffer = memoryview(mmap.mmap(-1, _CHUNK))
    with path.open("rb", buffering=0) as file:
        for begin in range(0, len(table), _CHUNK // BLOCK):
            count = _fill(file.fileno(), buffer, begin * BLOCK)
            expected = table[begin : begin + _CHUNK // BLOCK]
            wrong = first_wrong(buffer[:count], expected)
            if wrong is not None:
                return begin + wrong
    return None


def _fill(file: int, buffer: memoryview, begin: int) -> int:
    """As many bytes as there are, up to the length of the buffer."""
    at = 0
    while at < len(buffer) and (count := os.preadv(file, [buffer[at:]], begin + at)):
        at += count
    return at


def _tensor_at(manifest: Manifest, file: ShardFile, begin: int) -> str | None:
    """A tensor that has bytes in the block that begins there; None in what is HDF5's own."""
    index = manifest.files.index(file)
    tensors = {tensor.name: tensor for tensor in manifest.holdings.tensors}
    for name, parts in manifest.holdings.parts().items():
        for part in parts:
            end = part.place + part.rectangle.volume * tensors[name].itemsize
            if part.file == index and part.place < begin + BLOCK and end > begin:
                return name
    return None
