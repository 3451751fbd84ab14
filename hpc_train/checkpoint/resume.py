"""What checkpoint.resume means: auto, never, a step, or a path."""

from __future__ import annotations

from pathlib import Path

from hpc_train.api import World
from hpc_train.checkpoint.agreement import on_first
from hpc_train.checkpoint.catalogue import found, locate, step_of
from hpc_train.checkpoint.errors import CheckpointError
from hpc_train.checkpoint.verification import newest
from hpc_train.errors import UserError


def choose(directory: Path, resume: str, world: World | None = None) -> tuple[Path, int] | None:
    """The (directory, step) to load; None to start from the beginning. The same on every rank, all of which call it.

    directory: where this run keeps its checkpoints.
    resume: `auto` (the newest that verifies), `never`, a step in `directory`, or the path of `step-<n>`, of a directory
    of checkpoints or of a run (the newest in it that verifies).

    Raises UserError for a step or a path that is not there; CheckpointError if there are checkpoints but all are
    damaged, because starting over would look like a success.
    """
    if resume == "never":
        return None
    if resume == "auto":
        return _newest_in(directory, world)
    if resume.isdecimal():
        on_first(world, lambda: locate(directory, int(resume)))
        return directory, int(resume)
    chosen, step = on_first(world, lambda: _at_path(Path(resume).expanduser()))
    return _newest_in(chosen, world) if step is None else (chosen, step)


def _newest_in(directory: Path, world: World | None) -> tuple[Path, int] | None:
    step = newest(directory, world)
    if step is None and on_first(world, lambda: bool(found(directory))):
        raise CheckpointError(
            f"every checkpoint in {directory} is damaged (`hpc-train checkpoint verify` tells how);"
            " checkpoint.resume=never starts over"
        )
    return None if step is None else (directory, step)


def _at_path(path: Path) -> tuple[Path, int | None]:
    path = path.absolute()
    step = step_of(path)
    if step is not None and path.is_dir():
        return path.parent, step
    for directory in (path, path / "checkpoints"):
        if found(directory):
            return directory, None
    raise UserError(f"checkpoint.resume={path}: there is no checkpoint; give the path of a step-<n>, or a step")
