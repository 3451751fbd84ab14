"""Is a committed checkpoint what was committed? And which is the newest that is?"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hpc_train.api import World
from hpc_train.checkpoint.agreement import on_all, on_first
from hpc_train.checkpoint.catalogue import committed, locate
from hpc_train.checkpoint.errors import CheckpointError, Problem
from hpc_train.checkpoint.files import checksum
from hpc_train.checkpoint.manifest import MANIFEST, Manifest, ShardFile, incomplete, read

_log = logging.getLogger(__name__)


def verify(directory: Path, step: int, world: World | None = None) -> list[Problem]:
    """Everything that is wrong with a committed step: none means that its bytes are those that were committed.

    Reads all of it. With a world every rank calls it, takes its share of the files and gets the whole answer.
    Raises UserError if the step is not there.
    """
    path, manifest, problems = on_first(world, lambda: _open(directory, step))
    if manifest is None:
        return problems
    names = [file.name for file in manifest.files]
    rank, size = (world.rank, world.size) if world else (0, 1)
    return problems + on_all(
        world,
        lambda: file_problems(path, manifest, names[rank::size]),
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


def file_problems(path: Path, manifest: Manifest, names: Sequence[str]) -> list[Problem]:
    """What is wrong with some of the files of a step, compared with its manifest: missing, size, checksum."""
    files = {file.name: file for file in manifest.files}
    return [problem for name in names if (problem := _file_problem(path, name, files.get(name)))]


def _open(directory: Path, step: int) -> tuple[Path, Manifest | None, list[Problem]]:
    path = locate(directory, step)
    try:
        manifest = read(path, step)
    except CheckpointError as error:
        return path, None, [Problem(MANIFEST, str(error))]
    wrong = incomplete(manifest.entries)
    return path, manifest, [Problem(MANIFEST, wrong[1], tensor=wrong[0])] if wrong else []


def _file_problem(path: Path, name: str, expected: ShardFile | None) -> Problem | None:
    if expected is None:
        return Problem(name, "the manifest names it but has no checksum of it")
    try:
        size = (path / name).stat().st_size
        if size != expected.bytes:
            return Problem(name, f"it has {size} bytes, {expected.bytes} were committed")
        if checksum(path / name)[1] != expected.checksum:
            return Problem(name, "its content is not what was committed (checksum)")
    except FileNotFoundError:
        return Problem(name, "it is missing")
    except OSError as error:
        return Problem(name, f"it cannot be read: {error.strerror}")
    return None
